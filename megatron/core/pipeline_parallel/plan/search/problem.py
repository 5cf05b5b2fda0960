"""What a search has to solve: a placement, its costs and what each rank may hold; orders, and plans made of them.

An order is one list of codes a rank. A code is kind * num_stages + stage with kind F, B or W; microbatches need not
be named, because every stage takes each of the three in increasing order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, PlanError, RawOp, W
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.words import counted, plain

Order = list[list[int]]

# Sums of activations and of times are compared with this much of tolerance, relative to their size.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class OrderProblem:
    """limits: by rank, the activation that it may hold, in the costs' unit."""

    placement: Placement
    num_microbatches: int
    costs: CostModel
    limits: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """Global stages."""
        return self.placement.num_stages

    @property
    def num_ops(self) -> int:
        """Computations of all ranks."""
        return 3 * self.num_stages * self.num_microbatches

    def stages(self) -> list[list[int]]:
        """By rank: its stages, first chunk first."""
        chunks = range(self.placement.num_chunks)
        return [
            [self.placement.stage_of(rank, c) for c in chunks] for rank in range(self.placement.num_ranks)
        ]

    def latencies(self) -> list[float]:
        """By stage: what a result takes to the next stage (a gradient from there); 0 on one rank."""
        ranks = self.placement.ranks()
        return [self.costs.comm if a != b else 0.0 for a, b in itertools.pairwise(ranks)] + [0.0]

    def changes(self) -> list[float]:
        """By code, the activation that an operation takes, or frees, once it is done."""
        costs = self.costs
        after_b = [held - size for size, held in zip(costs.activation, costs.held_after_b, strict=True)]
        return [*costs.activation, *after_b, *(-held for held in costs.held_after_b)]

    def of_length(self, num_microbatches: int) -> OrderProblem:
        """The same with another number of microbatches."""
        return replace(self, num_microbatches=num_microbatches)

    @property
    def work(self) -> float:
        """What the busiest rank computes."""
        return self.num_microbatches * max(self.costs.rank_times(self.placement))


def check_limits(name: str, problem: OrderProblem) -> None:
    """Raises PlanError where a rank may hold less than one microbatch of its stages: no order can do with that.

    A rank's forwards of one microbatch all come before the first of its gradients, on any placement where each of the
    rank's stages is later in the pipeline than the one before.
    """
    for rank, (stages, limit) in enumerate(zip(problem.stages(), problem.limits, strict=True)):
        least = problem.costs.least_activation(stages)
        if limit < least - slack(least):
            raise PlanError(
                f"{name}: rank {rank} may hold {plain(limit)} of activations, and no order can do with less than "
                f"{plain(least)},"
                f" one microbatch of its {counted(len(stages), 'stage')}; raise --pipeline-memory-limit or"
                " give the rank fewer layers"
            )


def slack(size: float) -> float:
    """The tolerance of a comparison of sums of this size."""
    return TOLERANCE * max(1.0, abs(size))


def limits_of(
    request: Request,
    placement: Placement,
    costs: CostModel,
    whole_stages: float,
    *,
    most_of_1f1b: float | None = None,
) -> tuple[float, ...]:
    """The request's limits, or `whole_stages` activations of the rank that has the largest, on every rank.

    most_of_1f1b: activations as F leaves them, for a share of 1F1B's memory; see `CostModel.left_by_forwards`.
    """
    if request.memory_limit is not None:
        return request.memory_limit
    if most_of_1f1b is not None:
        return costs.left_by_forwards(placement, whole_stages, most_of_1f1b)
    return (whole_stages * costs.whole_stage(placement),) * placement.num_ranks


def peaks(problem: OrderProblem, order: Order) -> list[float]:
    """By rank: the most that it holds, in program order."""
    change = problem.changes()
    return [max(itertools.accumulate((change[code] for code in row), initial=0.0)) for row in order]


def fits(problem: OrderProblem, order: Order) -> bool:
    """Whether an order keeps to the limits of all ranks."""
    return all(
        peak <= limit + slack(limit)
        for peak, limit in zip(peaks(problem, order), problem.limits, strict=True)
    )


def order_of(plan: Plan) -> Order:
    """The order of a plan without transfers; a BW is B and W."""
    num_stages = plan.placement.num_stages
    return [
        [kind * num_stages + op[1] for op in row for kind in ((B, W) if op[0] == BW else (op[0],))]
        for row in plan.rows
    ]


def plan_of(name: str, problem: OrderProblem, order: Sequence[Sequence[int]]) -> Plan:
    """The plan, without transfers."""
    num_stages = problem.num_stages
    rows = []
    for codes in order:
        done = [0] * (3 * num_stages)
        row: list[RawOp] = []
        for code in codes:
            kind, stage = divmod(code, num_stages)
            row.append((kind, stage, done[code], 0, -1, -1, -1, -1))
            done[code] += 1
        rows.append(tuple(row))
    assert (F, B, W) == (0, 1, 2), (F, B, W)
    return Plan(name, problem.placement, problem.num_microbatches, tuple(rows))
