"""The fastest plan under a limit in bytes, searched over orders of computations, parts of trailing W's, and how the
room is divided between what is kept and gathers ahead.

Of a small plan ranks may have the rows of different orders too, and the search starts from every order; of a large one
a few are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, Row
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER, IS_VALIDATION
from megatron.core.pipeline_parallel.plan.passes.fit_limit import Left
from megatron.core.pipeline_parallel.plan.passes.hold_back import hold_back
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.move_w import at_once, fused, later, one_w_moved
from megatron.core.pipeline_parallel.plan.passes.trailing_w import PARTS, split_trailing
from megatron.core.pipeline_parallel.plan.simulate import Merit
from megatron.core.pipeline_parallel.plan.units import StageUnits
from megatron.core.pipeline_parallel.post_validation.insert import post_validation

LEFTS = (
    Left(0.0),
    Left(0.25),
    Left(0.5),
    Left(ahead=False),
    Left(under_way=False),
    Left(ahead=False, under_way=False),
    Left(ahead=False, under_way=False, grads_first=True),
    Left(ahead=False, under_way=False, reduced_first=True),
)
# W's that come later by so many computations.
_LATER = (1, 2, 1 << 20)
# Plans that are tried: so many of at most so many operations in all, of small ones more; and so many while none fits.
_FEW, _OPERATIONS_OF_FEW = 8, 200_000
_OPERATIONS_OF_MANY = 12_000
_UNTIL_ONE_FITS = 8
_ROUNDS = 3

Choice = tuple[Plan, Left]


@dataclass(frozen=True)
class Orders:
    """What orders follow from. room: by rank, bytes for activations, gradients and what is read. read: the most that
    one access reads. whole: by stage, bytes of gradients from its first W on, 0 where they are whole at rest. parts:
    whether trailing W's may come unit by unit. lefts: what may be left of the room."""

    stages: Sequence[StageUnits]
    costs: CostModel
    room: Sequence[float]
    read: Sequence[float]
    whole: Sequence[float]
    parts: bool
    lefts: Sequence[Left]

    def bases(self, plan: Plan) -> list[Plan]:
        """The plan's, and with forwards held back; both with W's as the order has them, and at once. The plan's alone
        where its order is fixed."""
        found = [plan]
        rows = tuple(tuple(op for op in row if IS_COMPUTE[op[0]]) for row in plan.rows)
        if _is_fixed(plan):
            return found
        order = dataclasses.replace(plan, rows=rows)
        held = hold_back(order, self.costs, self.room, self.read, self.whole)
        if held is not None and held != order:
            steps = any(IS_VALIDATION[op[0]] for row in plan.rows for op in row)
            with contextlib.suppress(PlanError):  # such an order may have no room for a step's validation
                lowered = lower(held, self.costs)
                found.append(post_validation(lowered, self.costs) if steps else lowered)
        return list(dict.fromkeys([*found, *map(at_once, found)]))

    def one_by_one(self, plan: Plan) -> Iterator[Plan]:
        """The bases, of which all but the first are made when they are asked for."""
        yield plan
        yield from self.bases(plan)[1:]

    def of(self, bases: Sequence[Plan]) -> list[Plan]:
        """The bases, with W's later or in one with their B's, and trailing W's in parts."""
        moved = [*bases]
        room = [one - read for one, read in zip(self.room, self.read, strict=True)]
        for before_last, together, by, one in itertools.product((False, True), (False, True), _LATER, bases):
            moved.append(
                later(one, by, self.costs, room, self.whole, together=together, before_last=before_last)
            )
        joined = (
            fused(one, max(0, one.num_microbatches - count), everywhere=everywhere)
            for one in dict.fromkeys(moved)
            for everywhere in (False, True)
            for count in (one.num_microbatches, 2, 1)
        )
        every = dict.fromkeys([*moved, *joined])
        return list(dict.fromkeys(one for order in every for one in self.in_parts(order)))

    def in_parts(self, plan: Plan) -> Iterator[Plan]:
        """With trailing W's whole, and in parts."""
        yield plan
        for count in PARTS if self.parts else ():
            yield split_trailing(plan, self.stages, count)


class WithinLimit:
    """make: of an order and what is left of the room, the plan and how good it is; raises PlanError where it does not
    fit."""

    def __init__(self, make: Callable[[Plan, Left], tuple[Merit, Plan]], plan: Plan) -> None:
        self.make = make
        self.most = max(min(_FEW, _OPERATIONS_OF_FEW // plan.num_ops), _OPERATIONS_OF_MANY // plan.num_ops)
        self.tried: dict[Choice, Merit | None] = {}
        self.best: tuple[Merit, Plan] | None = None
        self.refused: PlanError | None = None

    def fastest(self, plan: Plan, orders: Orders) -> Plan:
        """Raises PlanError where nothing fits."""
        self._search(plan, orders)
        if self.best is None:
            assert self.refused is not None, "nothing was tried"
            raise self.refused
        return self.best[1]

    @property
    def is_done(self) -> bool:
        """Whether as many as may be tried have been."""
        return len(self.tried) >= self.most + (_UNTIL_ONE_FITS if self.best is None else 0)

    def _search(self, plan: Plan, orders: Orders) -> None:
        full, least = orders.lefts[0], orders.lefts[-1]
        fits = ((one, left) for one in orders.one_by_one(plan) for left in (full, least))
        first, left = next((one for one in fits if self._merit(one) is not None), (plan, full))
        start = self._best((first, left), ((one, left) for one in orders.in_parts(first)))
        start = self._best(start, ((start[0], left) for left in orders.lefts))
        if self.is_done or _is_fixed(plan):
            return
        bases = orders.bases(plan)
        every = orders.of(bases)
        start = self._best(start, ((one, start[1]) for one in every))
        starts = [start, *(self._best(start, ((one, left) for one in every)) for left in orders.lefts[-2:])]
        for one in (*starts, *((base, full) for base in bases)):
            self._descend(one, every, orders.lefts)

    def _descend(self, start: Choice, every: Sequence[Plan], lefts: Sequence[Left]) -> None:
        """To what is better by one rank's row or what is left, while there is any."""
        for _ in range(_ROUNDS):
            before = start
            start = self._best(start, ((start[0], left) for left in lefts))
            start = self._best(start, ((one, start[1]) for one in _mixed(start[0], every)))
            start = self._best(start, ((one, start[1]) for one in one_w_moved(start[0])))
            if start == before:
                return

    def _best(self, start: Choice, others: Iterable[Choice]) -> Choice:
        best, least = start, self._merit(start)
        for one in others:
            if self.is_done:
                break
            merit = self._merit(one)
            if merit is not None and (least is None or merit < least):
                best, least = one, merit
        return best

    def _merit(self, choice: Choice) -> Merit | None:
        if choice in self.tried or self.is_done:
            return self.tried.get(choice)
        self.tried[choice] = None
        try:
            merit, made = self.make(*choice)
        except PlanError as error:
            self.refused = self.refused or error
            return None
        self.tried[choice] = merit
        if self.best is None or merit < self.best[0]:
            self.best = merit, made
        return merit


def _is_fixed(plan: Plan) -> bool:
    """Whether computations overlap in pairs, or there are forwards only."""
    return plan.forward_only or any(op[7] >= 0 for row in plan.rows for op in row if IS_COMPUTE[op[0]])


def _mixed(plan: Plan, others: Sequence[Plan]) -> list[Plan]:
    """The plan with one rank's row of another one that sends and receives the same."""
    messages = [_messages(row) for row in plan.rows]
    found = []
    for other in others:
        if messages == [_messages(row) for row in other.rows]:
            for rank, row in enumerate(other.rows):
                rows = (*plan.rows[:rank], row, *plan.rows[rank + 1 :])
                found.append(dataclasses.replace(plan, rows=rows))
    return list(dict.fromkeys(found))


def _messages(row: Row) -> Row:
    return tuple(op for op in row if IS_TRANSFER[op[0]])
