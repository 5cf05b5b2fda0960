"""Whole weights after a step of a sharded optimizer: gathered in the order of the forward, waited for unit by unit."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core import collectives
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import ShardPlace, sharding_of
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.distributed.whole_weights import WholeWeights
from megatron.core.param_meta import ParamMeta
from tests.harness.ranks import run_ranks

NAMES = ("w0", "w1", "w2")
BUCKETS_OF = {0: [2], 1: [1], 2: [0]}  # laid in the order of the backward


def built(place: ShardPlace, strategy: str = "optim") -> FlatBuffer:
    return FlatBuffer(
        {name: nn.Parameter(torch.zeros(256)) for name in NAMES},
        {name: ParamMeta(name, (256,)) for name in NAMES},
        DistributedDataParallelConfig(ddp_bucket_size=1),
        sharding=sharding_of(strategy),
        place=place,
        device=torch.device("cpu"),
    )


class Two:
    size = 2


def noted(monkeypatch, *, overlap: bool):
    """As rank 0 of two, with collectives that are only noted."""
    log: list[str] = []
    buffer = built(ShardPlace(0, 2))
    place_of = {id(bucket.weights): place for place, bucket in enumerate(buffer.buckets)}

    class Waits:
        def __init__(self, place: int) -> None:
            self.place = place

        def wait(self) -> None:
            log.append(f"wait {self.place}")

    def gather(pairs, group, *, async_op):
        [(output, part)] = pairs
        assert part.data_ptr() == output.data_ptr(), "in place: rank 0's part comes first"
        assert (part.numel(), async_op) == (128, True)
        log.append(f"gather {place_of[id(output)]}")
        return Waits(place_of[id(output)])

    monkeypatch.setattr(collectives, "all_gather_units", gather)
    traffic = TrafficCounter()
    weights = WholeWeights(buffer, Two(), traffic, overlap=overlap, buckets_of=BUCKETS_OF)
    return weights, log, traffic


def test_without_overlap_weights_are_there_when_the_step_is_over(monkeypatch):
    weights, log, traffic = noted(monkeypatch, overlap=False)
    weights.need(0)
    assert log == [], "nothing is under way before the first step"
    weights.weights_changed()
    assert log == ["gather 2", "gather 1", "gather 0", "wait 2", "wait 1", "wait 0"]
    assert traffic.as_dict() == {"all_gather": (3, 3 * 1024)}


def test_with_overlap_each_unit_waits_for_its_own_buckets(monkeypatch):
    weights, log, _ = noted(monkeypatch, overlap=True)
    weights.weights_changed()
    assert log == ["gather 2", "gather 1", "gather 0"], "in the order of the forward"
    log.clear()
    weights.need(0)
    assert log == ["wait 2"]
    weights.need(0)
    weights.need(2)
    assert log == ["wait 2", "wait 0"]
    weights.settle()
    assert log == ["wait 2", "wait 0", "wait 1"]
    weights.settle()
    weights.need(1)
    assert len(log) == 3
    weights.weights_changed()
    log.clear()
    weights.weights_changed()
    assert log[:3] == ["wait 2", "wait 1", "wait 0"], "those of a step before are over first"


def gathered(ctx):
    buffer = built(ShardPlace(ctx.rank, 2))
    weights = WholeWeights(
        buffer, ctx.ps.dp_gather_group, TrafficCounter(), overlap=True, buckets_of=BUCKETS_OF
    )
    for number, name in enumerate(NAMES):
        buffer.main_weight_part(name).fill_(10.0 * number + ctx.rank)
    weights.weights_changed()
    out = []
    for unit, name in enumerate(NAMES):
        weights.need(unit)
        out.append([sorted(set(half.tolist())) for half in buffer.weight(name).view(2, -1)])
    whole, traffic = built(ShardPlace(ctx.rank, 2), "no_shard"), TrafficCounter()
    WholeWeights(
        whole, ctx.ps.dp_gather_group, traffic, overlap=False, buckets_of=BUCKETS_OF
    ).weights_changed()
    assert traffic.as_dict() == {}, "an optimizer that is whole has written them"
    return out


def test_every_rank_has_what_the_others_have_written():
    assert run_ranks(gathered, 2) == [[[[10.0 * n], [10.0 * n + 1]] for n in range(3)]] * 2
