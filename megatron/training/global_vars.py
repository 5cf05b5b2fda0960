"""Megatron's spellings for user code: `get_args()`, `get_timers()`, `print_rank_0(...)`.

A facade: `pretrain` fills it once, user code (model, data and forward-step providers) reads it, nothing
inside this package does. The values are those that the parts were built from; changing them has no effect on
the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from megatron.training.guard.console import say


class NotInitializedError(RuntimeError):
    """A `get_*` function was called before `pretrain` had set what it returns."""


_GLOBALS: dict[str, Any] = {}  # the one place for what Megatron keeps global
# In its place, of a rank that is one of several in this process.
_OF_RANK: ContextVar[dict[str, Any] | None] = ContextVar("global variables of a rehearsed rank", default=None)
_NAMES = frozenset(
    "config device parallel_state timers tokenizer tensorboard_writer wandb_writer num_microbatches "
    "global_batch_size batch_schedule".split()
)


def publish(args: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """Publish the configuration; `pretrain` calls it once, before any provider runs.

    args: `Config.flat()` with the user's extra flags; becomes the namespace of `get_args()`.
    """
    told = "global variables are already set: call unset_global_variables() between two runs"
    assert "args" not in _GLOBALS, told
    set_args(SimpleNamespace(**{**args, "rank": rank, "world_size": world_size}))


def set_args(args: Any) -> None:
    """What `get_args()` gives from now on, in place of what it gave."""
    place = {name: one for name, one in vars(args).items() if name in ("rank", "world_size")}
    _GLOBALS.update(place, args=args)


def set_progress(**counters: int) -> None:
    """Publish how far the run is in `get_args()`, as Megatron does: iteration, curr_iteration,
    consumed_train_samples, consumed_valid_samples."""
    assert "args" in _GLOBALS, "progress before publish()"
    vars(_GLOBALS["args"]).update(counters)


def provide(**values: Any) -> None:
    """Publish parts as they come to exist: timers, tokenizer, tensorboard_writer, wandb_writer, and two
    callables, num_microbatches and global_batch_size."""
    for name in values:
        assert name in _NAMES, f"unknown global {name!r}, known: {sorted(_NAMES)}"
    _GLOBALS.update(values)


def provide_here(**values: Any) -> None:
    """From now on in this thread, these are all that is published: of one of several ranks of this process."""
    _OF_RANK.set(values)


def unset_global_variables() -> None:
    """Forget everything: the end of `pretrain`."""
    _GLOBALS.clear()


def _known() -> dict[str, Any]:
    here = _OF_RANK.get()
    return _GLOBALS if here is None else here


def _getter(name: str, what: str, missing: str = "made it") -> Callable[[], Any]:
    """`get_<name>`. Raises NotInitializedError."""

    def get() -> Any:
        known = _known()
        if name not in known:
            raise NotInitializedError(
                f"get_{name}() was called before initialize_megatron() or pretrain() had {missing}: call it after the "
                "first, inside a provider or inside the forward step, not while the script is imported"
            )
        return known[name]

    get.__name__, get.__doc__ = f"get_{name}", what
    return get


_PARSED = "The resolved configuration under Megatron's names, and the user's extra flags, a SimpleNamespace."
get_args = _getter("args", _PARSED, "parsed the command line")
get_config = _getter("config", "The resolved configuration in its groups (`config.config.Config`).")
get_device = _getter("device", "What this rank computes on (`megatron.core.device.Device`).")
get_parallel_state = _getter("parallel_state", "This rank's place along every axis, and its groups.")
get_timers = _getter("timers", "The run's Timers.")
get_tokenizer = _getter("tokenizer", "The run's tokenizer.")
get_tensorboard_writer = _getter(
    "tensorboard_writer", "torch's SummaryWriter on the last rank with --tensorboard-dir, else None."
)
get_wandb_writer = _getter("wandb_writer", "The wandb run on the last rank with --wandb-project, else None.")
get_batch_schedule = _getter("batch_schedule", "The run's `BatchSchedule`.")
_num_microbatches = _getter("num_microbatches", "A function.")
_global_batch_size = _getter("global_batch_size", "A function.")


def get_num_microbatches() -> int:
    """Microbatches per pipeline and step, at the present place of the batch ramp-up."""
    return int(_num_microbatches()())


def get_current_global_batch_size() -> int:
    """Samples per step, at the present place of the batch ramp-up."""
    return int(_global_batch_size()())


def print_rank_0(message: Any) -> None:
    """Print on rank 0 only; before `pretrain` has started, on every rank."""
    if _known().get("rank", 0) == 0 or _is_fake():
        say(message)


def print_rank_last(message: Any) -> None:
    """Print on the last rank only, where the loss is known."""
    if is_last_rank():
        say(message)


def is_last_rank() -> bool:
    """Whether this is the rank that prints losses."""
    return bool(_known().get("rank", 0) == _known().get("world_size", 1) - 1) or _is_fake()


def _is_fake() -> bool:
    """Whether no other rank is there to speak."""
    ps = _known().get("parallel_state")
    return ps is not None and ps.is_fake
