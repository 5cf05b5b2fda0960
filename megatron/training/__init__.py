"""Megatron's public names, imported when first asked for."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "pretrain": "megatron.training.run.training",
    "get_args": "megatron.training.global_vars",
    "get_timers": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "get_tensorboard_writer": "megatron.training.global_vars",
    "get_num_microbatches": "megatron.training.global_vars",
    "print_rank_0": "megatron.training.global_vars",
    "print_rank_last": "megatron.training.global_vars",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
