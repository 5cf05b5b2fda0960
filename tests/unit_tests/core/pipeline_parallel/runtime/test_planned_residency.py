"""Ranks do what `add_residency` has planned, on stages that only begin their units."""

from __future__ import annotations

import pytest
import torch

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.ir import Kind, op_text
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor
from tests.harness.telling_stages import Log, NoChannel, TellingStage
from tests.harness.toy_pipeline import lowered
from tests.harness.unit_stages import shares


class Weights(Log):
    """Of one rank: which units are whole, by name, and what was contributed to their gradients since their last sum.
    units: by chunk."""

    def __init__(self, units, cut):
        super().__init__()
        self.units, self.cut = units, cut
        self.state, self.fresh = {}, {}

    def append(self, line):
        super().append(line)
        word, _, where = line.partition(" ")
        changes = {
            "unshard": ("sharded", "gathering"),
            "wait": ("gathering", "whole"),
            "reshard": ("whole", "sharded"),
        }
        if word != "reduce" and word not in changes:
            return
        chunk, unit = map(int, where.split("."))
        name = self.units[chunk].units[unit].name
        if word == "reduce":
            assert self.fresh.pop(name, 0), f"{line}: nothing was contributed"
            return
        before, after = changes[word]
        assert self.state.get(name, "sharded") == before, line
        self.state[name] = after

    def access(self, kind, chunk, unit):
        one = self.units[chunk].units[unit]
        if self.cut and (kind == "F" or (kind != "W" and one.backward_reads)):
            assert self.state.get(one.name) == "whole", f"{kind} reads {one.name}"
        if kind in ("W", "BW"):
            self.fresh[one.name] = self.fresh.get(one.name, 0) + 1


class AccessingStage(TellingStage):
    """Begins the units of every access in turn."""

    def __init__(self, weights, boundaries, chunk, stage):
        units = weights.units[chunk]
        forward, backward = (
            [unit for access in one for unit in access] for one in (units.forward, units.backward)
        )
        super().__init__(weights, boundaries, chunk, F=forward, B=backward, W=backward)
        self.stage = stage

    def backward_weight(self, microbatch, units=None):
        assert units is None
        self._run(f"W{microbatch}", self.orders["W"])

    def _run(self, name, order):
        self.log.append(f"{self.stage}{name}")
        for unit in order:
            self.boundaries.unit_begins(self.chunk, unit)
            self.log.access(name.rstrip("0123456789"), self.chunk, unit)
            self.log.append(f"{self.stage}{name} in {unit}")


class EchoChannel(NoChannel):
    """Everything arrives at once."""

    def post(self, messages):
        class Arrival:
            def wait(self):
                return torch.zeros(1)

        return [Arrival() for _, tensor in messages if tensor is None]

    def release(self, sends):
        pass


def expected_calls(row, units, placement):
    """To the letter: what stands in the row, and when k accesses have begun. units: by stage."""
    words = {Kind.UNSHARD: "unshard", Kind.RESHARD: "reshard", Kind.REDUCE: "reduce"}
    words[Kind.HSDP_ALL_REDUCE] = "sum_outer"
    lines, within = [], []

    def calls(ops):
        return [f"{words[op[0]]} {placement.chunk_of(op[1])}.{u}" for op in ops for u in range(op[4], op[5])]

    for op in row:
        if op[0] in words and op[3]:
            within.append(op)
        elif op[0] in words:
            lines += calls([op])
        elif op[0] <= Kind.BW:
            text = op_text(op)
            lines += [*calls([one for one in within if one[3] == 1]), text]
            for begun, use in enumerate(units[op[1]].uses(op), 1):
                if begun > 1:
                    lines += calls([one for one in within if one[3] == begun])
                lines += [f"{text} in {unit}" for unit in use.units]
            within = []
    return lines


def tied_units(placement):
    """By stage: two layers that are recomputed together, the embedding in the first stage, the head in the last one,
    which on a V reads the embedding too."""
    last = placement.num_stages - 1
    tied = placement.ranks()[0] == placement.ranks()[last]
    units = []
    for stage in range(last + 1):
        names, forward, backward = [f"layers.{2 * stage}", f"layers.{2 * stage + 1}"], [(0,), (1,)], [(0, 1)]
        if stage == 0:
            names, forward, backward = [*names, "embedding"], [(2,), *forward], [*backward, (2,)]
        if stage == last:
            head = (2, 3) if tied else (2,)
            names, forward, backward = (
                [*names, *("head", "embedding")[: len(head)]],
                [*forward, head],
                [head, *backward],
            )
        costs = tuple(
            UnitCosts(
                name,
                shares=shares(2, 4, ways=2, outer=2, instances=(2, 0)),
                backward_reads=name != "embedding" or stage > 0,
            )
            for name in names
        )
        units.append(StageUnits(costs, tuple(forward), tuple(backward)))
    return units


@pytest.mark.parametrize("policy", ["memory", "step"])
@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [
        *(("zbv", strategy) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
        ("1f1b", "optim_grads_params"),
        ("interleaved", "optim_grads_params"),
        ("dualpipe-v", "optim_grads_params"),
    ],
)
def test_ranks_do_to_the_letter_what_add_residency_has_planned(schedule, strategy, policy):
    chunks = None if schedule == "1f1b" else 2
    plan = lowered(build_plan(schedule, Request(2, 6, chunks)))
    place = plan.placement
    units = tied_units(place)
    residency = Residency(strategy, policy=policy)
    planned = add_residency(plan, units, residency, CostModel.of_ranks(place))
    for rank, row in enumerate(planned.rows):
        mine = [place.stage_of(rank, chunk) for chunk in range(place.num_chunks)]
        weights = Weights([units[stage] for stage in mine], cut=strategy == "optim_grads_params")
        boundaries = UnitBoundaries()
        stages = {
            stage: AccessingStage(weights, boundaries, chunk, stage) for chunk, stage in enumerate(mine)
        }
        executor = Executor(
            planned, rank, stages, EchoChannel(), weights, units=dict(enumerate(units)), boundaries=boundaries
        )
        executor.run()
        assert [line for line in weights if not line.startswith("wait")] == expected_calls(row, units, place)
        assert any(line.startswith("reduce") for line in weights)
        assert not weights.fresh  # all was summed
        if weights.cut:
            assert set(weights.state.values()) == {"sharded"}  # nothing is left
