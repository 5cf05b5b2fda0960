"""Flags that name a tokenizer, named as the trainer's, and what they say beside a checkpoint's configuration."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron.core.config_base import bounds_of
from megatron.core.tokenizers.build import TOKENIZER_TYPES
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

FIELDS = {field.name: field for field in dataclasses.fields(TokenizerConfig)}


def add_tokenizer_flags(
    parser: argparse.ArgumentParser, about: str = "", *, required: bool = False, skip: tuple[str, ...] = ()
) -> None:
    """A group of flags, None where not given. required: --tokenizer-type is. skip: flags that the caller has."""
    group = parser.add_argument_group("tokenizer", about)

    def add(flag: str, **settings: Any) -> None:
        if flag not in skip:
            group.add_argument(flag, **settings)

    kinds = f"one of {', '.join(TOKENIZER_TYPES)}"
    add("--tokenizer-type", choices=TOKENIZER_TYPES, required=required, metavar="TYPE", help=kinds)
    add("--tokenizer-model", metavar="PATH", help="file or folder of the tokenizer")
    add("--vocab-file", metavar="FILE", help="GPT-2 vocabulary (vocab.json)")
    add("--merge-file", metavar="FILE", help="GPT-2 merges (merges.txt)")
    add("--vocab-size", type=int, metavar="N", help="for NullTokenizer and TikTokenizer")
    add("--tiktoken-pattern", choices=("v1", "v2"))
    add("--tiktoken-num-special-tokens", type=int, metavar="N", help="of TikTokenizer; 1000 by default")
    add("--tiktoken-special-tokens", nargs="+", metavar="TOKEN")


def check_tokenizer_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Numbers out of bounds end the program with status 2."""
    for name, value in _given(args).items():
        bounds = bounds_of(FIELDS[name])
        if bounds is not None and not bounds.hold(value):
            told = f"must be from {bounds.least} to {bounds.most}"
            parser.error(f"--{name.replace('_', '-')} {value}: {told}")


def tokenizer_config(args: argparse.Namespace, saved: TokenizerConfig | None = None) -> TokenizerConfig:
    """What the flags say, over what a checkpoint says; where they say another type, that of a checkpoint has no say."""
    given = _given(args)
    if saved is None or given.get("tokenizer_type", saved.tokenizer_type) != saved.tokenizer_type:
        saved = TokenizerConfig()
    return dataclasses.replace(saved, **given)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in FIELDS}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
