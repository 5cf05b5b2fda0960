"""The best schedule of a small pipeline, proved by HiGHS: the oracle that searched schedules are held against.

A mixed-integer programme in the style of the Zero Bubble paper's appendix G (arXiv 2401.10241): a start for each
computation and, for two computations of one rank whose order is open, a binary that says which is first. It minimises
`Simulation.cost` itself: the first computation of rank r is the forward of microbatch 0 by stage r in every order, so
the first start of each rank is a constant, and starts as early as an order permits end no later than any others.
What keeps it small, all of it lossless: orders that an upper bound on the cost leaves no choice for are fixed first;
sums over what is before (behind) a computation bound its start (the cost); orders are made transitive, which ties of
computations that take no time need anyway; W's of stages that cost alike follow their B's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import B, Plan, PlanError, W, compute
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.schedule_problem import (
    SLACK,
    TOLERANCE,
    Problem,
    Rows,
    Windows,
    as_start,
    find_windows,
    list_schedules,
    one_by_one,
)


@dataclass(frozen=True)
class Optimum:
    """cost: `simulate(plan, costs).cost`; no order under the limits has less. plan: computations only."""

    cost: float
    plan: Plan


def optimum(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    memory_limit: Sequence[float] | None,
    fused: bool = False,
    *,
    start: Plan | None = None,
    time_limit_s: float = 100.0,
) -> Optimum:
    """The least cost of any plan whose stages run their F, their B and their W in microbatch order.

    memory_limit: by rank, what `peak_activation` may be; None: no limit. fused: BW in place of B and W. start: a plan
    under the same rules, an upper bound that makes the proof faster (its BWs are split unless `fused`).
    Raises PlanError for a limit that no order meets, and for a problem not solved within time_limit_s.
    """
    problem = Problem(placement, num_microbatches, costs, memory_limit, fused)
    candidates = [*list_schedules(problem), one_by_one(problem)]
    if start is not None:
        candidates.append(as_start(problem, start))
    rows = min(candidates, key=problem.cost_of)
    bound = problem.cost_of(rows)
    # Costs are sums of durations: where these are multiples of one step, so is the next better cost.
    cutoff = bound - max(problem.step, TOLERANCE * bound)
    windows = find_windows(problem, cutoff)
    if windows is not None:
        found = _Programme(problem, windows, cutoff).solve(time_limit_s)
        if found is not None:
            objective, rows = found
            reached = problem.cost_of(rows)
            assert math.isclose(reached, objective, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (
                reached,
                objective,
            )
    plan = problem.plan(rows)
    verify(plan, costs)
    peaks = simulate(plan, costs).peak_activation
    assert all(map(problem.fits, range(len(peaks)), peaks)), (peaks, memory_limit)
    return Optimum(simulate(plan, costs).cost, plan)


class _Programme:
    """The programme in HiGHS. Columns: the cost, the starts, then the open orders."""

    def __init__(self, problem: Problem, windows: Windows, cutoff: float) -> None:
        self.problem, self.windows = problem, windows
        self.solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 1),
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", TOLERANCE / 10),
            ("mip_feasibility_tolerance", 1e-7),
            ("primal_feasibility_tolerance", 1e-8),
        ):
            self.solver.setOptionValue(option, value)
        self.columns = 0
        self.impossible = False  # a row of constants is wrong
        slack = SLACK * max(cutoff, 1.0)
        self.cost = self._column(0.0, cutoff + slack)
        self.solver.changeColCost(self.cost, 1.0)
        self.start = [self._column(*span) for span in zip(windows.earliest, windows.latest, strict=True)]
        # (a, b) -> the column that is 1 when a is before b; of two computations, one direction has it.
        self.open: dict[tuple[int, int], int] = {}
        for ops in problem.of_rank:
            self._open_orders(ops)
        self._rows()

    def _column(self, lower: float, upper: float, *, integer: bool = False) -> int:
        self.solver.addVar(lower, max(lower, upper))
        if integer:
            self.solver.changeColIntegrality(self.columns, highspy.HighsVarType.kInteger)
        self.columns += 1
        return self.columns - 1

    def _open_orders(self, ops: list[int]) -> None:
        problem, before = self.problem, self.windows.before
        follow: list[tuple[int, int, int, int]] = []
        of_w = {
            (problem.costs.w[problem.ops[at][1]], problem.costs.held_after_b[problem.ops[at][1]])
            for at in ops
        }
        for one, other in itertools.combinations(ops, 2):
            if before[one] >> other & 1 or before[other] >> one & 1:
                continue
            a, b = problem.ops[one], problem.ops[other]
            if a[0] == b[0] == W and len(of_w) == 1:
                # W's that are alike can change places until they are in the order of their B's.
                its, others = (problem.number[compute(B, op[1], op[2])] for op in (a, b))
                follow.append((one, other, its, others))
            self.open[one, other] = self._column(0.0, 1.0, integer=True)
        for one, other, its, others in follow:
            self._at_most([(1.0, one, other), (-1.0, its, others)], 0.0)
            self._at_most([(-1.0, one, other), (1.0, its, others)], 0.0)

    def _is_before(self, one: int, other: int) -> tuple[float, int, float]:
        """Whether one is before the other: factor and column (-1: none) and constant."""
        if (one, other) in self.open:
            return 1.0, self.open[one, other], 0.0
        if (other, one) in self.open:
            return -1.0, self.open[other, one], 1.0
        return 0.0, -1, float(self.windows.before[other] >> one & 1)

    def _at_most(
        self, orders: Sequence[tuple[float, int, int]], limit: float, *others: tuple[float, int]
    ) -> None:
        """A row: sum of factor x (one before other), plus factor x column, is at most the limit."""
        terms: dict[int, float] = {}
        for factor, one, other in orders:
            sign, column, constant = self._is_before(one, other)
            limit -= factor * constant
            if column >= 0:
                terms[column] = terms.get(column, 0.0) + factor * sign
        for factor, column in others:
            terms[column] = terms.get(column, 0.0) + factor
        columns = [column for column, factor in terms.items() if factor]
        if not columns:
            self.impossible |= limit < -SLACK * max(1.0, self.problem.total)
            return
        values = [terms[column] for column in columns]
        self.solver.addRow(-highspy.kHighsInf, limit, len(columns), columns, values)

    def _rows(self) -> None:
        for before, after, lag in self.problem.links:
            self._at_most([], -lag, (1.0, self.start[before]), (-1.0, self.start[after]))
        for ops in self.problem.of_rank:
            self._one_at_a_time(ops)
            self._transitive(ops)
            self._memory(ops)
        if not all((*self.problem.costs.f, *self.problem.costs.b)):
            self._no_circle()

    def _one_at_a_time(self, ops: list[int]) -> None:
        problem, windows = self.problem, self.windows
        first = problem.first[problem.rank[ops[0]]]
        for at in ops:
            rest = [one for one in ops if one != at]
            takes = problem.duration[at]
            self._at_most([(problem.duration[one], one, at) for one in rest], -first, (-1.0, self.start[at]))
            self._at_most(
                [(problem.duration[one], at, one) for one in rest],
                first - takes,
                (1.0, self.start[at]),
                (-1.0, self.cost),
            )
            for one in rest:
                if windows.before[one] >> at & 1:
                    self._at_most([], -takes, (1.0, self.start[at]), (-1.0, self.start[one]))
                elif not windows.before[at] >> one & 1:
                    most = max(0.0, windows.latest[at] + takes - windows.earliest[one])
                    self._at_most(
                        [(most, at, one)], most - takes, (1.0, self.start[at]), (-1.0, self.start[one])
                    )

    def _transitive(self, ops: list[int]) -> None:
        for a, b, c in itertools.combinations(ops, 3):
            if any(self._is_before(*pair)[1] >= 0 for pair in ((a, b), (b, c), (a, c))):
                self._at_most([(1.0, a, b), (1.0, b, c), (-1.0, a, c)], 1.0)
                self._at_most([(-1.0, a, b), (-1.0, b, c), (1.0, a, c)], 0.0)

    def _memory(self, ops: list[int]) -> None:
        """Only what takes memory can make a new peak: an F, and a B that leaves more than its F did."""
        problem = self.problem
        limit = problem.limit[problem.rank[ops[0]]]
        largest = max(map(problem.memory, ops))
        if limit == math.inf or not largest:
            return
        for at in ops:
            if problem.memory(at) > 0:
                held = [(problem.memory(one) / largest, one, at) for one in ops if one != at]
                self._at_most(held, (limit * (1 + SLACK) - problem.memory(at)) / largest)

    def _no_circle(self) -> None:
        """Where F or B takes no time, starts alone do not rule out orders that wait for each other over several
        ranks: places in one order of all computations do."""
        number = len(self.problem.ops)
        place = [self._column(0.0, number) for _ in range(number)]
        for before, after, _ in self.problem.links:
            self._at_most([], -1.0, (1.0, place[before]), (-1.0, place[after]))
        for ops in self.problem.of_rank:
            for one, other in itertools.permutations(ops, 2):
                self._at_most(
                    [(number + 1.0, one, other)], float(number), (1.0, place[one]), (-1.0, place[other])
                )

    def solve(self, time_limit_s: float) -> tuple[float, Rows] | None:
        """Cost and rows of the best order; None: none is within the cutoff."""
        if self.impossible:
            return None
        self.solver.setOptionValue("time_limit", time_limit_s)
        self.solver.run()
        status = self.solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise PlanError(
                f"no proof within {time_limit_s} s ({self.solver.modelStatusToString(status)}): give a better start, a"
                " smaller problem or more time_limit_s"
            )
        values = list(self.solver.getSolution().col_value)

        def leads(one: int, other: int) -> bool:
            factor, column, constant = self._is_before(one, other)
            return (factor * values[column] if column >= 0 else 0.0) + constant > 0.5

        rows = []
        for ops in self.problem.of_rank:
            places = {at: sum(leads(one, at) for one in ops if one != at) for at in ops}
            assert sorted(places.values()) == list(range(len(ops))), places
            rows.append(tuple(self.problem.ops[at] for at in sorted(ops, key=places.__getitem__)))
        return values[self.cost], tuple(rows)
