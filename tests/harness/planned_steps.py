"""What the plan of a run's steps says of weights and gradients, and what its engine holds at the plan's boundaries."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron.core.memory_tracker import MemoryTracker
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk, walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import Plan, op_text
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import Crossing, DataParallelLane, Placed
from megatron.core.sharding_table import ShardOver
from megatron.core.transport.traffic import Traffic
from tests.harness.layouts import Run


def plan_of(run: Run) -> Plan:
    """Of a training step."""
    return plan_for(run.runner.spec, run.num_microbatches, PlanPurpose.TRAIN)


def units_of(run: Run) -> RankUnits:
    """Of this rank."""
    stages = run.runner.spec.stages_units
    assert stages is not None, "data parallelism has nothing to do"
    return RankUnits(run.ps.pp_rank, run.runner.spec.placement, stages)


def walk_of(run: Run) -> RowWalk:
    """This rank's row of a training step."""
    residency = run.runner.spec.residency
    assert residency is not None, "data parallelism has nothing to do"
    return walk_row(plan_of(run).rows[run.ps.pp_rank], units_of(run), residency, boundaries=True)


def traffic_of_plan(run: Run) -> Traffic:
    """What this rank moves in a step, as the engine counts it."""
    moves, residency = walk_of(run).moves, run.runner.spec.residency
    assert residency is not None, "data parallelism has nothing to do"
    sums = "all_reduce" if residency.strategy == "no_shard" else "reduce_scatter"
    cuts = run.engine.model.sharding.optimizer is ShardOver.FULL
    outer = "outer_reduce_scatter" if cuts else "outer_all_reduce"
    told = {
        "all_gather": moves.gathers,
        sums: moves.reductions,
        "outer_all_gather": moves.outer_gathers,
        outer: moves.outer_sums,
    }
    return Traffic(**told)


@dataclasses.dataclass(frozen=True)
class Boundary:
    """what: has come to pass. gathered, grads: bytes of whole weights, and of whole gradients with those under way."""

    what: str
    gathered: int
    grads: int


class BoundaryLog:
    """What the engine holds at every boundary of the rows that run inside `installed`.

    Bytes are looked at right before the next boundary: gradients get memory when the first one of an access comes.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._last = ""
        self.found: list[Boundary] = []

    def begins(self, what: str) -> None:
        """A boundary; what is held belongs to the one before."""
        self.look()
        self._last = what

    def look(self) -> None:
        if self._last:
            grads = self._tracker.live("grads") + self._tracker.live("extra")
            self.found.append(Boundary(self._last, self._tracker.live("gathered"), grads))
        self._last = ""

    @contextlib.contextmanager
    def installed(self) -> Iterator[BoundaryLog]:
        """Of every executor in this process."""
        perform, drop = DataParallelLane.perform, DataParallelLane.drop
        advance, leave = Crossing._advance, Crossing.__exit__

        def performed(lane: DataParallelLane, placed: Placed) -> None:
            self.look()
            perform(lane, placed)
            self.begins(f"operation {placed[0]}")

        def dropped(lane: DataParallelLane) -> None:  # the row is through
            self.look()
            drop(lane)

        def advanced(crossing: Crossing, begun: int) -> None:
            advance(crossing, begun)
            self.begins(f"access {begun} of {op_text(crossing._op)}")

        def left(crossing: Crossing, *error: Any) -> None:
            leave(crossing, *error)
            if error[0] is None:
                self.begins(f"end of {op_text(crossing._op)}")

        with (
            mock.patch.object(DataParallelLane, "perform", performed),
            mock.patch.object(DataParallelLane, "drop", dropped),
            mock.patch.object(Crossing, "_advance", advanced),
            mock.patch.object(Crossing, "__exit__", left),
        ):
            yield self
