"""Megatron's spellings for user code: `get_args()`, `get_timers()`, `print_rank_0(...)`.

A facade: `pretrain` fills it once, user code (model, data and forward-step providers) reads it, nothing
inside this package does. The values are those that the parts were built from; changing them has no effect on
the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron.training.guard.console import say


class NotInitializedError(RuntimeError):
    """A `get_*` function was called before `pretrain` had set what it returns."""


class _Globals:
    """The one place for what Megatron keeps global."""

    def __init__(self) -> None:
        self.args: SimpleNamespace | None = None
        self.rank = 0
        self.world_size = 1
        self.values: dict[str, Any] = {}


_GLOBALS = _Globals()
_NAMES = (
    "config",
    "device",
    "parallel_state",
    "timers",
    "tokenizer",
    "tensorboard_writer",
    "wandb_writer",
    "num_microbatches",
    "global_batch_size",
)


def set_global_variables(args: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """Publish the configuration; `pretrain` calls it once, before any provider runs.

    args: `Config.flat()` with the user's extra flags; becomes the namespace of `get_args()`.
    """
    assert _GLOBALS.args is None, (
        "global variables are already set: call unset_global_variables() between two runs"
    )
    _GLOBALS.args = SimpleNamespace(**args)
    _GLOBALS.args.rank = rank
    _GLOBALS.args.world_size = world_size
    _GLOBALS.rank, _GLOBALS.world_size = rank, world_size


def set_progress(**counters: int) -> None:
    """Publish how far the run is in `get_args()`, as Megatron does: iteration, curr_iteration,
    consumed_train_samples, consumed_valid_samples."""
    assert _GLOBALS.args is not None, "progress before set_global_variables()"
    vars(_GLOBALS.args).update(counters)


def provide(**values: Any) -> None:
    """Publish parts as they come to exist: timers, tokenizer, tensorboard_writer, wandb_writer, and two
    callables, num_microbatches and global_batch_size."""
    for name, value in values.items():
        assert name in _NAMES, f"unknown global {name!r}, known: {_NAMES}"
        _GLOBALS.values[name] = value


def unset_global_variables() -> None:
    """Forget everything: the end of `pretrain`."""
    _GLOBALS.__init__()  # type: ignore[misc]


def _get(name: str) -> Any:
    if name not in _GLOBALS.values:
        raise NotInitializedError(
            f"get_{name}() was called before pretrain() had made it: call it inside a provider or the "
            "forward step, not while the script is imported"
        )
    return _GLOBALS.values[name]


def get_args() -> SimpleNamespace:
    """The resolved configuration under Megatron's names, and the user's extra flags."""
    if _GLOBALS.args is None:
        raise NotInitializedError(
            "get_args() was called before pretrain() had parsed the command line: call it inside a "
            "provider or the forward step, not while the script is imported"
        )
    return _GLOBALS.args


def get_config() -> Any:
    """The resolved configuration in its groups (`megatron.training.config.config.Config`)."""
    return _get("config")


def get_device() -> Any:
    """What this rank computes on (`megatron.core.device.Device`)."""
    return _get("device")


def get_parallel_state() -> Any:
    """The run's ParallelState: this rank's place along every axis, and its groups."""
    return _get("parallel_state")


def get_timers() -> Any:
    """The run's Timers."""
    return _get("timers")


def get_tokenizer() -> Any:
    """The run's tokenizer."""
    return _get("tokenizer")


def get_tensorboard_writer() -> Any:
    """torch's SummaryWriter on the last rank with --tensorboard-dir, else None."""
    return _get("tensorboard_writer")


def get_wandb_writer() -> Any:
    """The wandb run on the last rank with --wandb-project, else None."""
    return _get("wandb_writer")


def get_num_microbatches() -> int:
    """Microbatches per pipeline and step, at the present place of the batch ramp-up."""
    return int(_get("num_microbatches")())


def get_current_global_batch_size() -> int:
    """Samples per step, at the present place of the batch ramp-up."""
    return int(_get("global_batch_size")())


def print_rank_0(message: Any) -> None:
    """Print on rank 0 only; before `pretrain` has started, on every rank."""
    if _GLOBALS.rank == 0:
        say(message)


def print_rank_last(message: Any) -> None:
    """Print on the last rank only, where the loss is known."""
    if _GLOBALS.rank == _GLOBALS.world_size - 1:
        say(message)


def is_last_rank() -> bool:
    """Whether this is the rank that prints losses."""
    return _GLOBALS.rank == _GLOBALS.world_size - 1
