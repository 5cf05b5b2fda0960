"""Buckets under way: only reductions that hold memory of their own are bounded. (The order: test_ddp_chunks.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core import collectives
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.reduction_queue import MAX_TEMPORARIES, ReductionQueue
from megatron.core.distributed.sharding import ShardPlace, sharding_of
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.param_meta import ParamMeta
from tests.harness.ranks import run_ranks

NAMES = tuple(f"w{i}" for i in range(6))


def a_bucket_each(dp_size: int) -> FlatBuffer:
    config = DistributedDataParallelConfig(ddp_bucket_size=1)
    meta = {name: ParamMeta(name, (8,)) for name in NAMES}
    parameters = {name: nn.Parameter(torch.zeros(8)) for name in NAMES}
    return FlatBuffer(
        parameters,
        meta,
        config,
        sharding=sharding_of("no_shard"),
        place=ShardPlace(inner_size=dp_size),
        device=torch.device("cpu"),
    )


def launch(ctx):
    """(reductions under way, those of them with a temporary) after each launch; gradients at the end."""
    buffer = a_bucket_each(ctx.world_size)
    bucket_bytes = 4 * buffer.buckets[0].bucket.numel
    for name in NAMES:
        buffer.main_grad(name).fill_(10.0**ctx.rank)
    ledger = Ledger()
    queue = ReductionQueue(buffer, ctx.ps.dp_reduce_group, TrafficCounter(), ledger)
    assert len(queue._reducers) == len(NAMES)
    counts = []
    for name in reversed(NAMES):
        queue.complete([name])
        queue.launch_complete()
        under_way = [one.pending for one in queue._in_flight]
        beside = sum(pending.holds_temporary for pending in under_way)
        counts.append((len(under_way), beside))
        received = bucket_bytes * (ctx.world_size - 1) // ctx.world_size  # the other ranks' slices
        assert ledger.live("exchange") == ledger.transient_bytes == beside * received
    queue.wait()
    assert ledger.transient_bytes == 0
    return counts, {value for name in NAMES for value in buffer.main_grad(name).tolist()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_place_sums_are_not_waited_for_and_exchanges_beside_the_buffer_are_bounded(world_size):
    bounded = [(1, 1), *[(MAX_TEMPORARIES,) * 2] * 5]
    in_place = [(count, 0) for count in range(1, 7)]
    total = sum(10.0**rank for rank in range(world_size))
    for counts, values in run_ranks(launch, world_size):
        assert counts == (in_place if world_size == 2 else bounded)
        assert values == {total}


def test_in_place_sums_between_exchanges(monkeypatch):
    """Oldest first, until there is room: the order of waits is the order of launches."""
    waited = []

    class Fake:
        def __init__(self, number):
            self.number, self.temporary_bytes = number, 8 if number % 2 == 0 else 0
            self.holds_temporary = self.temporary_bytes > 0

        def wait(self):
            waited.append(self.number)

    def body(ctx):
        numbers = iter(range(6))
        monkeypatch.setattr(collectives, "sum_gradients", lambda bucket, group: Fake(next(numbers)))
        queue = ReductionQueue(a_bucket_each(2), ctx.ps.dp_reduce_group, TrafficCounter())
        queue.launch_all()
        in_flight = list(waited)
        queue.wait()
        return in_flight, waited

    # before 3 there are 0 and 2: 0 goes; before 5 there are 2 and 4: 1 and 2 go
    assert run_ranks(body, 2) == [([0, 1, 2], [0, 1, 2, 3, 4, 5])] * 2


def test_a_cut_optimizer_exchanges_too():
    """optim on gloo: what the other rank sends lies beside the buffer, for at most two buckets at once."""

    def body(ctx):
        parameters = {name: nn.Parameter(torch.zeros(8)) for name in NAMES}
        buffer = FlatBuffer(
            parameters,
            {name: ParamMeta(name, (8,)) for name in NAMES},
            DistributedDataParallelConfig(ddp_bucket_size=1),
            sharding=sharding_of("optim"),
            place=ShardPlace(ctx.rank, 2),
            device=torch.device("cpu"),
        )
        ledger = Ledger()
        queue = ReductionQueue(buffer, ctx.ps.dp_reduce_group, TrafficCounter(), ledger)
        queue.launch_all()
        live = ledger.live("exchange")
        queue.wait()
        half = buffer.buckets[0].bucket.numel * 4 // 2
        return live == ledger.peak("exchange") == MAX_TEMPORARIES * half, ledger.transient_bytes

    assert run_ranks(body, 2) == [(True, 0)] * 2
