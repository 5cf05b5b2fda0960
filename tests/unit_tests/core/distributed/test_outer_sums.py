"""Sums over instances: the same everywhere (HSDP), or each instance its part (HFSDP); one call a dtype."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.outer_sums import OuterSums
from megatron.core.distributed.sharding import sharding_of
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.param_meta import ParamMeta
from tests.harness.cut_models import shard_place
from tests.harness.ranks import run_ranks

SHAPES = {"a": (300,), "b": (5, 7), "frozen": (9,), "half": (40,)}
UNITS = {"a": "first", "b": "second", "frozen": "second", "half": "second"}


def built(ps, strategy: str, outer: str) -> FlatBuffer:
    parameters = {
        name: nn.Parameter(
            torch.zeros(shape, dtype=torch.bfloat16 if name == "half" else torch.float64),
            requires_grad=name != "frozen",
        )
        for name, shape in SHAPES.items()
    }
    return FlatBuffer(
        parameters,
        {name: ParamMeta(name, shape) for name, shape in SHAPES.items()},
        DistributedDataParallelConfig(),
        sharding=sharding_of(strategy, outer),
        place=shard_place(ps),
        device=torch.device("cpu"),
        units=UNITS,
    )


def fill(buffer: FlatBuffer, value: float) -> None:
    for number, bucket in enumerate(bucket for bucket in buffer.buckets if bucket.trained):
        bucket.main_grads.copy_(torch.arange(bucket.main_grads.numel()) * value + number)


def sums(ctx):
    """Rank r = inner + 2 * outer where there are four; each instance holds 10 ** its number."""
    found = {}
    instances = 2
    ps = ctx.make_ps(dp=ctx.world_size, instances=instances)
    outer_rank = ps.dp_outer_group.rank
    for strategy, outer in (
        ("optim", "no_shard"),
        ("optim_grads", "no_shard"),
        ("optim_grads_params", "no_shard"),
        ("optim_grads_params", "optim"),
    ):
        if ctx.world_size == instances and outer == "optim":
            continue  # instances of one rank have nothing to cut
        buffer, traffic = built(ps, strategy, outer), TrafficCounter()
        ledger = Ledger()
        outers = OuterSums(buffer, ps.dp_outer_group, traffic, ledger)
        fill(buffer, 10.0**outer_rank)
        outers.add()
        parts = []
        for number, bucket in enumerate(bucket for bucket in buffer.buckets if bucket.trained):
            whole = torch.arange(bucket.main_grads.numel(), dtype=torch.float64) * 11.0 + 2 * number
            start = bucket.optimizer_grads.storage_offset() - bucket.main_grads.storage_offset()
            expected = whole[start : start + bucket.optimizer_grads.numel()]
            assert torch.equal(bucket.optimizer_grads.double(), expected), (strategy, outer)
            parts.append(bucket.optimizer_grads)
        by_dtype = {}
        for bucket in (bucket for bucket in buffer.buckets if bucket.trained):
            tensor = bucket.main_grads if outer == "optim" else bucket.optimizer_grads
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
        kind = "outer_reduce_scatter" if outer == "optim" else "outer_all_reduce"
        assert ledger.transient_bytes == 0
        if outer == "optim":  # a reduce-scatter: the other rank's slice beside the buffer
            peaks = 0, max(by_dtype.values()) // 2
        else:  # packed; in place for two ranks, but for 16-bit values, of which there are none
            peaks = max(by_dtype.values()), 0
        assert (ledger.peak("outer"), ledger.peak("exchange")) == peaks, (strategy, outer, ledger.lines())
        assert traffic.as_dict() == {kind: (2, sum(by_dtype.values()))}, "one call a dtype"
        found[strategy, outer] = sum(part.numel() for part in parts)
    return found


def test_two_instances_of_two_ranks_and_of_one():
    for found in run_ranks(sums, 4):
        hsdp, hfsdp = found["optim_grads_params", "no_shard"], found["optim_grads_params", "optim"]
        assert hsdp == 2 * hfsdp, "HFSDP's optimizer has half of HSDP's part"
        assert found["optim_grads", "no_shard"] == hsdp == found["optim", "no_shard"]
    assert len(run_ranks(sums, 2)) == 2


def test_one_instance_sums_nothing():
    def alone(ctx):
        buffer, traffic = built(ctx.ps, "optim_grads", "no_shard"), TrafficCounter()
        fill(buffer, 3.0)
        before = [bucket.optimizer_grads.clone() for bucket in buffer.buckets if bucket.trained]
        OuterSums(buffer, ctx.ps.dp_outer_group, traffic).add()
        after = [bucket.optimizer_grads for bucket in buffer.buckets if bucket.trained]
        return all(map(torch.equal, before, after)), traffic.as_dict()

    assert run_ranks(alone, 2) == [(True, {})] * 2
