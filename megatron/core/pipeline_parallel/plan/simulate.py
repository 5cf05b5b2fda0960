"""How long a plan takes and what it holds, by the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import LAST_COMPUTE, SEND_B, SEND_F, Plan, PlanError, op_text
from megatron.core.pipeline_parallel.plan.timeline import Timeline, execute
from megatron.core.pipeline_parallel.plan.verify import peak_activation


@dataclass(frozen=True)
class Simulation:
    """Figures of one step; times and activations in the cost model's units.

    makespan: end of the last operation. cost: the most that a rank takes from its first start to its last end.
    bubble_time: cost - m * max over ranks of (F + B + W), F alone where the plan is forward_only. bubble_rate:
    bubble_time / cost (0 when all takes no time). idle: by rank, makespan less its computations. peak_activation: by
    rank. num_messages: transfers between ranks.
    """

    plan: Plan
    costs: CostModel
    timeline: Timeline
    makespan: float
    cost: float
    bubble_time: float
    bubble_rate: float
    idle: tuple[float, ...]
    peak_activation: tuple[float, ...]
    num_messages: int


def simulate(plan: Plan, costs: CostModel) -> Simulation:
    """Time a plan: transfers run beside computations, each `costs.comm` after both of its ends are posted.

    A plan without transfers is timed as if each result set off when it is there. Raises PlanError on a deadlock.
    """
    timeline = execute(plan, costs)
    for rank, (place, what) in timeline.stopped.items():
        raise PlanError(
            f"deadlock: rank {rank} stops at place {place}, {op_text(plan.rows[rank][place])}, waiting for {what}"
        )
    durations = costs.durations()
    spans, busy = [], []
    for rank, row in enumerate(plan.rows):
        places = [place for place, op in enumerate(row) if op[0] <= LAST_COMPUTE]
        starts, ends = timeline.starts[rank], timeline.ends[rank]
        spans.append(ends[places[-1]] - starts[places[0]])
        busy.append(sum(durations[row[place][0]][row[place][1]] for place in places))
    makespan = max(ends[-1] for ends in timeline.ends)
    cost = max(spans)
    per_microbatch = costs.rank_times(plan.placement, forward_only=plan.forward_only)
    bubble_time = cost - plan.num_microbatches * max(per_microbatch)
    return Simulation(
        plan,
        costs,
        timeline,
        makespan,
        cost,
        bubble_time,
        bubble_time / cost if cost else 0.0,
        tuple(makespan - one for one in busy),
        tuple(
            peak_activation(rank, row, costs, forward_only=plan.forward_only)
            for rank, row in enumerate(plan.rows)
        ),
        sum(op[0] in (SEND_F, SEND_B) for row in plan.rows for op in row),
    )
