"""Megatron's `parallel_state` (`mpu`): one process-wide grid of ranks, asked by functions."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.core.device import device_in_use
from megatron.core.transport import parallel_state as ours
from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.core.transport.rank_grid import dense_grid
from megatron.training.global_vars import NotInitializedError, get_parallel_state


class _State:
    """ps: of `initialize_model_parallel`; without it, the run's under `pretrain`. alone: this rank's own group."""

    ps: ParallelState | None = None
    alone: dist.ProcessGroup | None = None
    num_chunks: int | None = None
    chunk: int | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    num_distributed_optimizer_instances: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    **others: Any,
) -> None:
    """Make the groups; torch's default process group has to exist. Communicates over the world.

    Raises ValueError where the ranks do not divide, and for parallelism that is not here (context, experts).
    """
    _refuse(others)
    world = dist.get_world_size() if dist.is_initialized() else 1
    grid = dense_grid(world, tp=tensor_model_parallel_size, pp=pipeline_model_parallel_size, order=order)
    device = device_in_use("cpu" if world == 1 or dist.get_backend() == "gloo" else None)
    _State.ps = ours.make_parallel_state(
        grid,
        device,
        datetime.timedelta(minutes=distributed_timeout_minutes),
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
    )
    _State.num_chunks, _State.chunk = virtual_pipeline_model_parallel_size, None


def _refuse(others: dict[str, Any]) -> None:
    asked = {name: value for name, value in others.items() if value not in (None, False, 1)}
    if asked:
        told = ", ".join(f"{name}={value!r}" for name, value in sorted(asked.items()))
        raise ValueError(
            f"initialize_model_parallel({told}): not here; tensor, pipeline and data parallelism are, the others are"
            " planned (docs/roadmap.md)"
        )


def destroy_model_parallel() -> None:
    """Forget the groups; torch's own stay."""
    _State.ps = _State.alone = _State.num_chunks = _State.chunk = None


def current() -> ParallelState:
    """Our state: of `initialize_model_parallel`, or of the run. Raises NotInitializedError."""
    if _State.ps is not None:
        return _State.ps
    try:
        return get_parallel_state()  # type: ignore[no-any-return]
    except NotInitializedError:
        raise NotInitializedError(
            "model parallel is not initialized: call initialize_model_parallel() first"
        ) from None


def model_parallel_is_initialized() -> bool:
    """Whether `current` has an answer."""
    try:
        current()
    except NotInitializedError:
        return False
    return True


is_initialized = is_unitialized = model_parallel_is_initialized


def _process_group(group: Group) -> dist.ProcessGroup | None:
    """torch's; of one rank a group of its own, as None would mean all ranks. None in a world of one."""
    if group.process_group is not None or not dist.is_initialized():
        return group.process_group
    if _State.alone is None:
        _State.alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _State.alone


def _getters(prefix: str, purpose: str, axis: str) -> dict[str, Callable[..., Any]]:
    """Of an axis. Arguments such as `with_context_parallel` are taken: without context parallelism all are alike."""

    def size(*_: Any, **__: Any) -> int:
        return int(getattr(current(), f"{axis}_size"))

    def rank(*_: Any, **__: Any) -> int:
        return int(getattr(current(), f"{axis}_rank"))

    def group(*_: Any, **__: Any) -> dist.ProcessGroup | None:
        return _process_group(current().group(purpose))

    def first(*_: Any, **__: Any) -> int:
        return current().group(purpose).ranks[0]

    def ranks(*_: Any, **__: Any) -> list[int]:
        return list(current().group(purpose).ranks)

    return {
        f"get_{prefix}_world_size": size,
        f"get_{prefix}_rank": rank,
        f"get_{prefix}_group": group,
        f"get_{prefix}_src_rank": first,
        f"get_{prefix}_global_ranks": ranks,
    }


def _of_one(prefix: str) -> dict[str, Callable[..., Any]]:
    """Of an axis that is not here: one rank."""
    return {
        f"get_{prefix}_world_size": lambda *_, **__: 1,
        f"get_{prefix}_rank": lambda *_, **__: 0,
        f"get_{prefix}_group": lambda *_, **__: _process_group(current().group("world")) and _own_group(),
    }


def _own_group() -> dist.ProcessGroup | None:
    alone = Group("alone", (current().rank,), 0, "gloo", None, current().device, ours.DEFAULT_TIMEOUT)
    return _process_group(alone)


def get_model_parallel_group(**_: Any) -> dist.ProcessGroup | None:
    """All ranks that together hold one copy of the model."""
    return _process_group(current().mp_group)


def get_embedding_group(**_: Any) -> dist.ProcessGroup | None:
    """First and last stage of the pipeline."""
    return _process_group(current().embedding_group)


def is_rank_in_embedding_group(**_: Any) -> bool:
    """Whether this rank is on the first or on the last stage."""
    return current().pp_rank in (0, current().pp_size - 1)


def get_pipeline_model_parallel_first_rank() -> int:
    """Rank of the first stage, in the world."""
    return current().pp_group.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Rank of the last stage, in the world."""
    return current().pp_group.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Rank of the next stage, in the world; behind the last comes the first."""
    return current().pp_group.ranks[(current().pp_rank + 1) % current().pp_size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Rank of the stage before, in the world; before the first comes the last."""
    return current().pp_group.ranks[current().pp_rank - 1]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Chunks a rank; None without interleaving."""
    return _State.num_chunks


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Chunks a rank."""
    _State.num_chunks = size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk that is being built, as `set_virtual_pipeline_model_parallel_rank` said."""
    return _State.chunk


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """The chunk that is being built."""
    _State.chunk = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank's stage, or its chunk, begins the model."""
    chunk = _State.chunk if vp_stage is None else vp_stage
    return current().pp_rank == 0 and (ignore_virtual or not chunk)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank's stage, or its chunk, ends the model."""
    chunk, chunks = _State.chunk if vp_stage is None else vp_stage, _State.num_chunks
    last = ignore_virtual or chunks is None or chunk in (None, chunks - 1)
    return current().pp_rank == current().pp_size - 1 and last


globals().update(_getters("tensor_model_parallel", "tp", "tp"))
globals().update(_getters("pipeline_model_parallel", "pp", "pp"))
globals().update(_getters("data_parallel", "dp", "dp"))
globals().update(_of_one("context_parallel"))
globals().update(_of_one("expert_model_parallel"))
globals().update(_of_one("expert_tensor_parallel"))
__all__ = [name for name in globals() if name.split("_")[0] in ("get", "set", "is", "initialize", "destroy")]
__all__ += ["model_parallel_is_initialized"]
