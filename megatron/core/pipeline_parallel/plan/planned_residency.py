"""What plans of a run hold and move on their fullest rank, what log and record say of it, and which groups of
microbatches a resumed run keeps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from megatron.core.pipeline_parallel.plan.costs import CostModel, peak_activation
from megatron.core.pipeline_parallel.plan.held.residency_lines import HeldBytes, StepMoves
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.residency import LaneCosts, PlannedResidency
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec, plan_for

_NS_PER_S = 1e9


def peak_bytes(spec: ScheduleSpec, plan: Plan) -> tuple[float, ...]:
    """By rank, the most that it holds at once: of states at rest, activations, gathered weights and gradients."""
    assert spec.stages_units is not None, "bytes without units"
    assert spec.residency is not None, "bytes without a residency"
    peaks = []
    for rank, row in enumerate(plan.rows):
        units = RankUnits(rank, plan.placement, spec.stages_units)
        if spec.residency.moves:
            held = walk_row(row, units, spec.residency, spec.costs).peak.total
        else:
            held = peak_activation(rank, row, spec.costs)
        peaks.append(units.shard_bytes + held)
    return tuple(peaks)


def at_once_lines(spec: ScheduleSpec, num_microbatches: int, purpose: PlanPurpose) -> list[str]:
    """What the log says of a limit: how much of it the fullest rank needs."""
    if spec.residency is None or spec.residency.limit is None:
        return []
    peaks = peak_bytes(spec, plan_for(spec, num_microbatches, purpose))
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    limit = f"{spec.residency.limit[rank]:,.0f} of --rank-memory-limit"
    return [f" > at once pipeline rank {rank} holds at most {peaks[rank]:,.0f} bytes, {limit}"]


@functools.lru_cache(maxsize=4)
def planned_residency(
    spec: ScheduleSpec,
    num_microbatches: int,
    purpose: PlanPurpose,
    at_rest: tuple[int, ...],
    costs: CostModel | None = None,
    lanes: LaneCosts | None = None,
) -> tuple[int, HeldBytes, StepMoves]:
    """The fullest pipeline rank, the most that it holds of each kind, and what it moves in a step. at_rest: by pipeline
    rank, bytes that it holds between steps. costs, lanes: as measured, in ns; without, nothing is said of times."""
    assert spec.stages_units is not None, "a residency without units"
    assert spec.residency is not None, "units without a residency"
    plan, found = plan_for(spec, num_microbatches, purpose), []
    timed = None if costs is None or lanes is None else simulate(plan, costs, spec.with_lanes(lanes))
    for rank, row in enumerate(plan.rows):
        units = RankUnits(rank, plan.placement, spec.stages_units)
        walk = walk_row(row, units, spec.residency, spec.costs, boundaries=True)
        gradients = max((one.gradients + one.under_way for one in walk.boundaries), default=0)
        activations = round(walk.most.activation) if spec.estimated else None
        held = HeldBytes(at_rest[rank], walk.most.gathered, gradients, activations)
        moves = walk.moves
        told = StepMoves.of(moves.gathers, moves.reductions, moves.outer_gathers, moves.outer_sums)
        if timed is not None:
            told = dataclasses.replace(
                told,
                lane_share=timed.lane_share[rank],
                exposed_share=timed.exposed[rank] / timed.cost,
                step_s=timed.cost / _NS_PER_S,
            )
        found.append((rank, held, told))
    return max(found, key=lambda one: one[1].total)


def kept_groupings(
    spec: ScheduleSpec, saved: Mapping[int, PlannedResidency]
) -> tuple[dict[int, PlannedResidency], list[str]]:
    """A resumed run groups microbatches as the saved one did, where it is laid out and asked for alike: those that it
    takes, and a line for the log for each size where it does not, and its own groups are others."""
    if spec.residency is None or spec.stages_units is None:
        return {}, []
    own = PlannedResidency.of(spec.residency, spec.stages_units, ())
    alike = {size: one for size, one in saved.items() if dataclasses.replace(one, grouping=()) == own}
    lines = []
    for size in (one for one in saved if one not in alike):
        try:
            planned = plan_for(spec, size, PlanPurpose.TRAIN).residency
        except PlanError:
            continue  # steps of this size are not run any more
        if planned is not None and planned.grouping != saved[size].grouping:
            lines.append(
                f" > gradients of {size} microbatches are grouped otherwise than in the saved run: before each "
                "reduction others are added up, so that sums are rounded otherwise (docs/numerics.md)"
            )
    return alike, lines
