"""The padded vocabulary: of the checkpoint to load it does not follow the tensor parallel size (floor 0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config_base import IDS
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.config.config import Config
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.saved_config import saved_config

CHECKPOINT = "checkpoint"  # the origin of a size that a checkpoint gave


def saved_padded_vocabulary(settings: Mapping[str, Any]) -> int | None:
    """Of the checkpoint that `--load` and `--ckpt-step` of these settings name; None where there is none.

    A checkpoint that cannot be read is told of when it is loaded, with what to do about it.
    """
    if settings.get("load") is None:
        return None
    try:
        saved = saved_config(settings["load"], settings.get("ckpt_step"))
    except CheckpointError:
        return None
    size = None if saved is None else saved.get("padded_vocab_size")
    return size if isinstance(size, int) and IDS.hold(size) else None


def with_saved_vocabulary(config: Config, size: int) -> Config:
    """The configuration with a checkpoint's padded vocabulary, which TP must divide. Raises ConfigurationError."""
    tp = config.parallel.tensor_model_parallel_size
    if size % tp == 0:
        return config.replace(padded_vocab_size=size, origin=CHECKPOINT)
    problem = Problem(
        "vocabulary",
        ("--load", "--tensor-model-parallel-size"),
        f"the checkpoint in {config.checkpoint.load} has a padded vocabulary of {size}, which "
        f"--tensor-model-parallel-size {tp} does not divide",
        f"choose a tensor parallel size that divides {size}",
    )
    raise ConfigurationError([problem])


def check_holds_tokenizer(config: Config, vocab_size: int) -> None:
    """Refuse a padded vocabulary with fewer than the tokenizer's `vocab_size` ids. Raises ConfigurationError."""
    padded = config.model.padded_vocab_size
    assert padded is not None, "the padded vocabulary is not known yet"
    if padded >= vocab_size:
        return
    if config.origin.get("padded_vocab_size") == CHECKPOINT:
        flags: tuple[str, ...] = ("--load", "--tokenizer-type")
        told = f"the padded vocabulary of {padded} of the checkpoint in {config.checkpoint.load}"
        fix = "use the tokenizer of that run"
    else:
        flags = ("--padded-vocab-size",)
        told = f"--padded-vocab-size {padded}"
        fix = f"leave it unset, or give at least {vocab_size}"
    message = f"{told} is smaller than the tokenizer's vocabulary of {vocab_size}"
    raise ConfigurationError([Problem("padded-vocab-size", flags, message, fix)])
