"""What tools/inspect_data.py takes from a checkpoint, and the text of samples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core.datasets.gpt_dataset_config import requested_sizes
from megatron.core.datasets.gpt_samples import pad_id
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.words import printable
from megatron.training.config.config import Config
from tools.tokenizer_flags import tokenizer_config

WHERE = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)
HOW = (
    "split",
    "mid_level_dataset_surplus",
    "multiple_validation_sets",
    "full_validation",
    "seed",
    "seq_length",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
)


def defaults_of_run(config: Config, named: argparse.Namespace) -> dict[str, Any]:
    """Values for the flags that a line leaves out: those of the run; its corpora where the line names none.

    named: the line, read without these.
    """
    flat, training, evaluation = config.flat(), config.training, config.evaluation
    if named.write_checksums:
        return {}
    if any(getattr(named, name) for name in WHERE):
        return {name: flat[name] for name in HOW if name != "split"}
    sizes = requested_sizes(
        train_samples=training.train_samples,
        train_iters=training.train_iters or (training.train_samples or 0) // training.global_batch_size,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=training.global_batch_size,
    )
    return {**{name: flat[name] for name in (*WHERE, *HOW)}, "sizes": tuple(sizes)}


def tokenizer_of(args: argparse.Namespace, config: Config | None) -> Tokenizer | None:
    """The tokenizer of the flags over that of a run; None where neither names one. Its ids are the samples' where no
    flag says them. Raises TokenizerError and MissingPackageError."""
    wanted = tokenizer_config(args, None if config is None else config.tokenizer)
    if wanted.tokenizer_type is None:
        if wanted != TokenizerConfig(vocab_size=wanted.vocab_size):
            raise TokenizerError(
                "flags of a tokenizer need --tokenizer-type, or --load of a run that has one"
            )
        return None
    tokenizer = build_from_config(wanted)
    args.vocab_size = tokenizer.vocab_size
    args.eod = tokenizer.eod if args.eod is None else args.eod
    args.pad = pad_id(tokenizer.pad, tokenizer.special_ids) if args.pad is None else args.pad
    return tokenizer


def texts(tokenizer: Tokenizer, ids: Sequence[int], pad: int) -> list[str]:
    """The text of a sample, a piece a document; padding is left out."""
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == tokenizer.eod:
            pieces.append([])
        elif token != pad:
            pieces[-1].append(token)
    return [tokenizer.detokenize(piece) for piece in pieces]


def told(pieces: Sequence[str], most: int) -> list[str]:
    """Lines for a terminal: at most so many characters, those that a terminal would obey spelled out."""
    text = "\n-- end of document --\n".join(pieces)
    lines = [f"    | {line}".expandtabs(4) for line in printable(text[:most], keep="\n\t").split("\n")]
    more = len(text) - most
    return [*lines, f"    ... and {more} characters"] if more > 0 else lines
