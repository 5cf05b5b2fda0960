"""How long a plan takes and what it holds, by the cost model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel, peak_activation
from megatron.core.pipeline_parallel.plan.held.lanes import Lanes
from megatron.core.pipeline_parallel.plan.ir import (
    IS_BESIDE,
    IS_COMPUTE,
    SEND_B,
    SEND_F,
    Plan,
    PlanError,
    op_text,
)
from megatron.core.pipeline_parallel.plan.timeline import Timeline, execute

Merit = tuple[float, float, float]
# Sums of activations, and costs of plans, are compared with this much of tolerance, relative to them.
TOLERANCE = 1e-9


def _left(whole: float, part: float) -> float:
    """whole - part, 0 where that is what is left of rounding sums of times."""
    left = whole - part
    return left if left > 1e-12 * whole else 0.0


@dataclass(frozen=True)
class Simulation:
    """One step on the clock, planned or measured; times and activations in the cost model's units.

    busy: by rank, the time of its computations. work: the time that no schedule can save, that of the busiest rank.
    """

    plan: Plan
    costs: CostModel
    timeline: Timeline
    busy: tuple[float, ...]
    work: float

    @functools.cached_property
    def spans(self) -> list[tuple[float, float]]:
        """By rank: start of its first computation, end of its last or of what it reduces last."""
        spans = []
        for rank, row in enumerate(self.plan.rows):
            places = [place for place, op in enumerate(row) if IS_COMPUTE[op[0]]]
            free = self.timeline.lanes[rank].free if self.timeline.lanes else 0.0
            spans.append(
                (self.timeline.starts[rank][places[0]], max(self.timeline.ends[rank][places[-1]], free))
            )
        return spans

    @property
    def makespan(self) -> float:
        """End of the last computation, or reduction."""
        return max(end for _, end in self.spans)

    @property
    def cost(self) -> float:
        """The most that a rank takes from its first start to its last end."""
        return max(end - start for start, end in self.spans)

    @property
    def merit(self) -> Merit:
        """Time, time exposed and time on the wire, to nine digits and one before the other; the least is best."""
        times = (self.cost, sum(self.exposed), sum(lane.busy for lane in self.timeline.lanes))
        cost, exposed, wire = (float(f"{time:.9g}") for time in times)
        return cost, exposed, wire

    @property
    def bubble_time(self) -> float:
        """cost - work, 0 where that is what rounding sums of times leaves."""
        return _left(self.cost, self.work)

    @property
    def bubble_rate(self) -> float:
        """bubble_time / cost; 0 when all takes no time."""
        return waiting_share(self.cost, self.work)

    @property
    def idle(self) -> tuple[float, ...]:
        """By rank: makespan less its computations."""
        return tuple(_left(self.makespan, one) for one in self.busy)

    @functools.cached_property
    def exposed(self) -> tuple[float, ...]:
        """By rank: what computations wait for gathers and reductions, and the row's end for the last of them. Empty
        without lanes."""
        exposed = []
        for rank, lane in enumerate(self.timeline.lanes):
            row = zip(self.plan.rows[rank], self.timeline.ends[rank], strict=True)
            computed = max(end for op, end in row if not IS_BESIDE[op[0]])
            exposed.append(lane.exposed + max(0.0, lane.free - computed))
        return tuple(exposed)

    @property
    def lane_share(self) -> tuple[float, ...]:
        """By rank: how much of the step its gathers and reductions are on the wire. Empty without lanes."""
        return tuple(lane.busy / self.cost for lane in self.timeline.lanes)

    @functools.cached_property
    def peak_activation(self) -> tuple[float, ...]:
        """By rank: the most that it holds."""
        return tuple(
            peak_activation(rank, row, self.costs, forward_only=self.plan.forward_only)
            for rank, row in enumerate(self.plan.rows)
        )

    @functools.cached_property
    def num_messages(self) -> int:
        """Transfers between ranks."""
        return sum(op[0] in (SEND_F, SEND_B) for row in self.plan.rows for op in row)


def waiting_share(step: float, work: float) -> float:
    """The bubble: the share of a step's time that the busiest rank does not compute. step: the most that a rank takes
    from its first start to its last end. 0 where all takes no time."""
    return (step - work) / step if step else 0.0


def simulate(plan: Plan, costs: CostModel, lanes: Lanes | None = None) -> Simulation:
    """Time a plan: transfers run beside computations, each `costs.comm` after both of its ends are posted.

    Its work is m * max over ranks of (F + B + W), F alone where the plan is forward_only. A plan without transfers is
    timed as if each result set off when it is there. lanes: of gathers and reductions, which take no time
    without. Raises PlanError on a deadlock.
    """
    timeline = execute(plan, costs, lanes)
    for rank, (place, what) in timeline.stopped.items():
        raise PlanError(
            f"deadlock: rank {rank} stops at place {place}, {op_text(plan.rows[rank][place])}, waiting for {what}"
        )
    durations = costs.durations()
    busy = tuple(  # of a W in parts the first stands for all
        sum(durations[op[0]][op[1]] for op in row if IS_COMPUTE[op[0]] and op[4] <= 0) for row in plan.rows
    )
    per_microbatch = costs.rank_times(plan.placement, forward_only=plan.forward_only)
    return Simulation(plan, costs, timeline, busy, plan.num_microbatches * max(per_microbatch))


def over_limit(simulation: Simulation, limits: Sequence[float] | None) -> tuple[int, float] | None:
    """(rank, its peak) of the rank that is most over its limit; None where all fit, or nothing is limited."""
    if limits is None:
        return None
    peaks = simulation.peak_activation
    over = [peak - limit - TOLERANCE * max(1.0, limit) for peak, limit in zip(peaks, limits, strict=True)]
    rank = over.index(max(over))  # of several that are as much over, the first
    return (rank, peaks[rank]) if over[rank] > 0 else None
