"""A model that is nothing but parameters, cut over tensor parallel ranks and pipeline stages by hand: every kind of cut
that layers have, without the layers. For tests of the engines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.param_meta import ParamMeta, Region
from megatron.core.sharding_table import STRATEGIES, Sharding, ShardPlace
from megatron.core.transport.parallel_state import ParallelState
from tests.harness.units_of_size import units_of_size

# In the model's order; dims that ranks share are multiples of 4.
MODEL: dict[str, tuple[int, ...]] = {
    "embedding": (8, 6), "l0.norm": (6,), "l0.qkv": (12, 6), "l0.fc1": (16, 6), "l0.fc2": (6, 8),
    "l1.norm": (6,), "l1.fc2": (6, 8), "l2.norm": (6,), "l2.qkv": (12, 6), "l3.fc2": (6, 8), "final": (6,),
}  # fmt: skip


def region_list(name: str, tp: int, tp_rank: int) -> tuple[Region, ...]:
    """embedding by rows; norms whole everywhere; qkv: 8 query rows cut, 4 key rows on pairs of ranks; fc1: two bands
    of rows (gate and up); fc2 by columns."""
    shape = MODEL[name]
    if tp == 1:
        return ()
    if len(shape) == 1:
        return (Region((0,), (0,), shape, copies=tp, partial=True),)
    if name.endswith("qkv"):
        rows, copies = 8 // tp, 2
        keys = 4 // (tp // copies)
        return (
            Region((0, 0), (rows * tp_rank, 0), (rows, 6)),
            Region((rows, 0), (8 + keys * (tp_rank // copies), 0), (keys, 6), copies=copies, partial=True),
        )
    if name.endswith("fc1"):
        rows = 8 // tp
        return (
            Region((0, 0), (rows * tp_rank, 0), (rows, 6)),
            Region((rows, 0), (8 + rows * tp_rank, 0), (rows, 6)),
        )
    if name.endswith("fc2"):
        return (Region((0, 0), (0, 8 // tp * tp_rank), (6, 8 // tp)),)
    return (Region((0, 0), (8 // tp * tp_rank, 0), (8 // tp, 6)),)


def global_part(region: Region, tensor: Tensor) -> Tensor:
    """A region's part of the whole tensor."""
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def cut_stages(sizes: Sequence[int]) -> list[list[str]]:
    """The model's names, so many a stage."""
    assert sum(sizes) == len(MODEL), f"{sizes} of {len(MODEL)} parameters"
    names = iter(MODEL)
    return [list(itertools.islice(names, size)) for size in sizes]


def cut_buffer(
    ps: ParallelState,
    stages: Mapping[int, Sequence[str]],
    *,
    tied_on: int | None = None,
    dtype: torch.dtype = torch.float32,
    sharding: Sharding = STRATEGIES["no_shard"],
    units: bool = False,
) -> FlatBuffer:
    """What a rank holds, all zero. stages: global stage -> names. tied_on: the stage that holds the embedding too.
    units: a bucket a layer."""
    held = {stage: list(names) for stage, names in sorted(stages.items())}
    if tied_on is not None and tied_on in held:
        held[tied_on].append("embedding")
    stage_of = {name: stage for stage, names in held.items() for name in names}
    meta = {
        name: ParamMeta(
            name,
            MODEL[name],
            regions=region_list(name, ps.tp_size, ps.tp_rank),
            shared=name == "embedding" and tied_on is not None,
        )
        for name in stage_of
    }
    parameters = {name: nn.Parameter(torch.zeros(meta[name].local_shape, dtype=dtype)) for name in stage_of}
    device = ps.device.torch_device
    place = shard_place(ps)
    layers = {name: name.split(".")[0] for name in stage_of}
    if not units:
        layers = units_of_size({name: parameter.numel() for name, parameter in parameters.items()}, 50)
    config = DistributedDataParallelConfig()
    return FlatBuffer(
        parameters, meta, config, sharding=sharding, place=place, device=device, stages=stage_of, units=layers
    )


def shard_place(ps: ParallelState) -> ShardPlace:
    """Where a rank stands among the data parallel ones."""
    inner, outer = ps.dp_reduce_group, ps.dp_outer_group
    return ShardPlace(inner.rank, inner.size, outer.rank, outer.size)
