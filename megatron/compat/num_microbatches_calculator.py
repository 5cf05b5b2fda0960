"""Megatron's `num_microbatches_calculator`: microbatches of a step, also while the batch is ramped up."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training import global_vars
from megatron.training.config.microbatches import BatchSchedule

__all__ = [
    "destroy_num_microbatches_calculator",
    "get_current_global_batch_size",
    "get_current_running_global_batch_size",
    "get_micro_batch_size",
    "get_num_microbatches",
    "init_num_microbatches_calculator",
    "reconfigure_num_microbatches_calculator",
    "unset_num_microbatches_calculator",
    "update_num_microbatches",
]


class _State:
    """Of a loop of one's own; a run's answers come from the run."""

    schedule: BatchSchedule | None = None
    consumed = 0


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Raises BatchScheduleError (a ValueError) for a batch that does not divide."""
    ramp = None
    if rampup_batch_size is not None:
        start, increment, samples = map(int, rampup_batch_size)
        ramp = (start, increment, samples)
    _State.schedule = BatchSchedule(
        micro_batch_size, data_parallel_size, global_batch_size, ramp, decrease_batch_size_if_needed
    )
    _State.consumed = 0


reconfigure_num_microbatches_calculator = init_num_microbatches_calculator


def unset_num_microbatches_calculator() -> None:
    """Forget it."""
    _State.schedule = None


destroy_num_microbatches_calculator = unset_num_microbatches_calculator


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """So many samples have been trained on."""
    _State.consumed = consumed_samples


def get_num_microbatches() -> int:
    """Of a step, on each data parallel rank."""
    if _State.schedule is None:
        return global_vars.get_num_microbatches()
    return _State.schedule.num_microbatches(_State.consumed)


def get_current_global_batch_size() -> int:
    """Samples of a step."""
    if _State.schedule is None:
        return global_vars.get_current_global_batch_size()
    return _State.schedule.global_batch_size(_State.consumed)


get_current_running_global_batch_size = get_current_global_batch_size


def get_micro_batch_size() -> int:
    """Samples of a microbatch."""
    if _State.schedule is None:
        return int(global_vars.get_args().micro_batch_size)
    return _State.schedule.micro_batch_size
