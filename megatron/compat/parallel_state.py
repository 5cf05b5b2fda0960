"""Megatron's `parallel_state` (`mpu`): one process-wide grid of ranks, asked by functions `get_AXIS_WHAT`.

`partial_data_parallel` is of the ranks of one distributed optimizer instance. Their other arguments, such as
`with_context_parallel`, are without effect: no other axis has several kinds of groups.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.core.device import device_in_use
from megatron.core.transport import parallel_state as ours
from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.core.transport.rank_grid import dense_grid
from megatron.training import global_vars


class _Process:
    """What this process has. ps: by `initialize_model_parallel`. alone: torch's group of this rank only."""

    ps: ParallelState | None = None
    alone: dist.ProcessGroup | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *others: Any,
    num_distributed_optimizer_instances: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    **named: Any,
) -> None:
    """Make the groups; torch's default process group has to exist, unless there is one rank. Communicates over the
    world. Raises ValueError where sizes do not divide the world, and for parallelism of other kinds."""
    if asked := {k: v for k, v in [*enumerate(others, 3), *named.items()] if v not in (None, 0, 1)}:
        raise ValueError(
            f"initialize_model_parallel({asked}): here is tensor, pipeline, data parallelism alone"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    _Process.ps = ours.make_parallel_state(
        dense_grid(world, tp=tensor_model_parallel_size, pp=pipeline_model_parallel_size, order=order),
        device_in_use("cpu" if world == 1 or dist.get_backend() == "gloo" else None),
        datetime.timedelta(minutes=distributed_timeout_minutes),
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
    )


def destroy_model_parallel() -> None:
    """Forget the groups; torch's own stay."""
    _Process.ps = _Process.alone = None


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called."""
    return _Process.ps is not None


def current() -> ParallelState:
    """Our state: of `initialize_model_parallel`, else of the run under `pretrain`. Raises NotInitializedError."""
    return _Process.ps or global_vars.get_parallel_state()


def process_group(group: Group) -> dist.ProcessGroup | None:
    """torch's; of one rank a group of its own, as None would mean the whole world."""
    if group.process_group is None and dist.is_initialized():
        _Process.alone = _Process.alone or ours.group_of_this_rank()
        return _Process.alone
    return group.process_group


_READ: dict[str, Callable[[Group], Any]] = {  # what is asked of a group
    "world_size": lambda group: group.size,
    "rank": lambda group: group.rank,
    "group": process_group,
    "global_ranks": lambda group: list(group.ranks),
    "src_rank": lambda group: group.ranks[0],
    "first_rank": lambda group: group.ranks[0],
    "last_rank": lambda group: group.ranks[-1],
    "next_rank": lambda group: group.ranks[(group.rank + 1) % group.size],
    "prev_rank": lambda group: group.ranks[group.rank - 1],
}
_ENDS = "first_rank last_rank next_rank prev_rank"
# By Megatron's axes: the purpose of `rank_grid` ("": a rank is alone), and what is asked of its group.
_AXES = {
    "tensor_model_parallel": ("tp", "world_size rank group src_rank global_ranks"),
    "pipeline_model_parallel": ("pp", f"world_size rank group {_ENDS}"),
    "data_parallel": ("dp", "world_size rank group src_rank"),
    "model_parallel": ("mp", "group src_rank"),
    "embedding": ("embedding", "group"),
    "context_parallel": ("", "world_size rank group global_ranks"),
    "expert_model_parallel": ("ep", "world_size rank group"),
    "expert_tensor_parallel": ("etp", "world_size rank group"),
    "expert_data_parallel": ("expert_dp", "world_size rank group"),
}


def _getter(purpose: str, read: Callable[[Group], Any]) -> Callable[..., Any]:
    def get(_: Any = None, partial_data_parallel: Any = False, **__: Any) -> Any:
        ps = current()
        alone = Group("alone", (ps.rank,), 0, ps.device.backend, None, ps.device, ours.DEFAULT_TIMEOUT)
        name = purpose
        if purpose == "expert_dp":
            name = "dp" if ps.experts is None else "expert_dp_reduce"
        elif purpose == "dp" and partial_data_parallel:
            name = "dp_reduce"
        return read(ps.groups.get(name, alone))

    return get


_GETTERS = {
    f"get_{axis}_{what}": _getter(purpose, _READ[what])
    for axis, (purpose, asked) in _AXES.items()
    for what in asked.split()
} | {
    "is_pipeline_first_stage": _getter("pp", lambda group: group.rank == 0),
    "is_pipeline_last_stage": _getter("pp", lambda group: group.rank == group.size - 1),
    "is_rank_in_embedding_group": _getter("pp", lambda group: group.rank in (0, group.size - 1)),
    "get_virtual_pipeline_model_parallel_rank": _getter("pp", lambda group: None),
    "get_virtual_pipeline_model_parallel_world_size": _getter("pp", lambda group: None),
    "is_initialized": model_parallel_is_initialized,
}
globals().update(_GETTERS)
__all__ = ["destroy_model_parallel", "initialize_model_parallel", "model_parallel_is_initialized", *_GETTERS]
