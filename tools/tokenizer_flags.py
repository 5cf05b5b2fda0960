"""Flags that name a tokenizer, named as the trainer's, and what they say beside a checkpoint's configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any

from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from tools.flags import add_settings

FIELDS = dataclasses.fields(TokenizerConfig)


def add_tokenizer_flags(
    parser: argparse.ArgumentParser, about: str = "", required: Collection[str] = ()
) -> None:
    """A group of flags. required: names of fields."""
    add_settings(parser.add_argument_group("tokenizer", about), FIELDS, required)


def tokenizer_config(args: argparse.Namespace, saved: TokenizerConfig | None = None) -> TokenizerConfig:
    """What the flags say, over what a checkpoint says; where they say another type, that of a checkpoint has no say."""
    given = _given(args)
    if saved is None or given.get("tokenizer_type", saved.tokenizer_type) != saved.tokenizer_type:
        saved = TokenizerConfig()
    return dataclasses.replace(saved, **given)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    given = {field.name: getattr(args, field.name) for field in FIELDS}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
