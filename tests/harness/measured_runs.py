"""Figures of runs that keep to a simulation, each rank on a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import Lanes
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import Figures, RankStep, figures_of
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import (
    OpTimes,
    file_name,
    header_line,
    op_lines,
)
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate


def lowered(name: str, ranks: int, microbatches: int, comm: float = 0.0) -> Plan:
    """A plan with transfers, at equal times."""
    plan = build_plan(name, Request(ranks, microbatches))
    return lower(plan, CostModel.of_ranks(plan.placement, comm=comm))


def spans_of_run(plan: Plan, costs: CostModel, rank: int, ahead_s: float) -> list[OpTimes]:
    """When the operations of a rank ran, in seconds of a clock that is `ahead_s` ahead; inputs are waited for."""
    timeline = simulate(plan, costs).timeline
    free, spans = ahead_s, []
    for start, end in zip(timeline.starts[rank], timeline.ends[rank], strict=True):
        spans.append(OpTimes(free, ahead_s + end, ahead_s + start - free))
        free = ahead_s + end
    return spans


def figures_of_run(
    plan: Plan,
    costs: CostModel | None = None,
    *,
    ahead_s: Sequence[float] = (),
    steps: int = 1,
    pipeline: Sequence[int] | None = None,
) -> list[Figures]:
    """Of each rank. ahead_s: by rank, of its clock."""
    costs = CostModel.of_ranks(plan.placement, comm=0.25) if costs is None else costs
    world = tuple(pipeline or range(plan.placement.num_ranks))
    made = []
    for rank in range(plan.placement.num_ranks):
        ahead = ahead_s[rank] if ahead_s else 0.0
        done = [
            RankStep(n, plan, rank, spans_of_run(plan, costs, rank, ahead + 1000.0 * n)) for n in range(steps)
        ]
        made.append(figures_of(done, world, link_ns=round(1e9 * costs.comm)))
    return made


def write_timeline(folder: Path, ran: Simulation, lanes: Lanes | None = None, at_rest: int = 0) -> None:
    """Of ranks 0, 1, ..., one step as simulated. lanes: in ns. at_rest: of the first rank, a byte more of each next."""
    for rank, row in enumerate(ran.plan.rows):
        pipeline = tuple(range(len(ran.plan.rows)))
        lines = [header_line(ran.plan, rank, pipeline, 1000.0, lanes, at_rest + rank)]
        times = zip(op_lines(row), ran.timeline.starts[rank], ran.timeline.ends[rank], strict=True)
        lines += [line % (1, start, end, 0.0, 0.0)[: line.count("%")] for line, start, end in times]
        (folder / file_name(rank)).write_text("".join(lines))
