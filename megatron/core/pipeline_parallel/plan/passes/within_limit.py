"""The fastest plan under a limit in bytes, searched over orders of computations, parts of trailing W's, and how the
room is divided between what is kept and gathers ahead.

Of a small plan ranks may have the rows of different orders too, and the search starts from every order; of a large one
a few are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, RawOp
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER, IS_VALIDATION
from megatron.core.pipeline_parallel.plan.passes import orders as other
from megatron.core.pipeline_parallel.plan.passes.keep import Reserve
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.simulate import Merit

RESERVES = (
    Reserve(0.0),
    Reserve(0.25),
    Reserve(0.5),
    Reserve(ahead=False),
    Reserve(under_way=False),
    Reserve(ahead=False, under_way=False),
    Reserve(ahead=False, under_way=False, grads_first=True),
    Reserve(ahead=False, under_way=False, reduced_first=True),
)
# W's that come later by so many computations.
_DELAYS = (1, 2, 1 << 20)
# Plans that are tried: so many of at most so many operations in all, of small ones more; and so many while none fits.
_FEW, _OPERATIONS_OF_FEW = 8, 200_000
_OPERATIONS_OF_MANY = 12_000
_UNTIL_ONE_FITS = 8
_ROUNDS = 3

Choice = tuple[Plan, Reserve]


class _Once(Iterable[Plan]):
    """Plans that are made when they are first asked for, each once."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._made: list[Plan] = []
        self._known: set[Plan] = set()
        self._source = iter(plans)

    def __iter__(self) -> Iterator[Plan]:
        yield from self._made
        for one in self._source:
            if one not in self._known:
                self._known.add(one)
                self._made.append(one)
                yield one


@dataclass(frozen=True)
class Orders:
    """The orders that follow from a plan's. room: by rank, bytes for activations, gradients and what is read.
    most_read: the most that one access reads. whole_grads: by stage, bytes of gradients from its first W on, 0 where
    they are whole at rest. parts: whether trailing W's may come unit by unit. reserves: what may be left of room."""

    plan: Plan
    stages: Sequence[StageUnits]
    costs: CostModel
    room: Sequence[float]
    most_read: Sequence[float]
    whole_grads: Sequence[float]
    parts: bool
    reserves: Sequence[Reserve]

    @functools.cached_property
    def is_fixed(self) -> bool:
        """Whether computations overlap in pairs, or there are forwards only."""
        computed = (op for row in self.plan.rows for op in row if IS_COMPUTE[op[0]])
        return self.plan.forward_only or any(op[7] >= 0 for op in computed)

    @functools.cached_property
    def bases(self) -> Iterable[Plan]:
        """The plan's, and with forwards held back; both with W's as the order has them, and right behind their B's. The
        plan's alone where its order is fixed."""
        return _Once(self._bases())

    def _bases(self) -> Iterator[Plan]:
        yield self.plan
        if self.is_fixed:
            return
        found, plan = [self.plan], self.plan
        rows = tuple(tuple(op for op in row if IS_COMPUTE[op[0]]) for row in plan.rows)
        order = dataclasses.replace(plan, rows=rows)
        held = other.hold_back(order, self.costs, self.room, self.most_read, self.whole_grads)
        if held is not None and held != order:
            steps = any(IS_VALIDATION[op[0]] for row in plan.rows for op in row)
            with contextlib.suppress(PlanError):  # such an order may have no room for a step's validation
                lowered = lower(held, self.costs)
                found.append(post_validation(lowered, self.costs) if steps else lowered)
        yield from found[1:]
        yield from map(other.w_behind_b, found)

    @functools.cached_property
    def every(self) -> Iterable[Plan]:
        """The bases, with W's delayed or in one with their B's, and trailing W's in parts."""
        return _Once(part for order in _Once(self._moved()) for part in self.in_parts(order))

    def _moved(self) -> Iterator[Plan]:
        room = [one - read for one, read in zip(self.room, self.most_read, strict=True)]
        flags = itertools.product((False, True), (False, True), _DELAYS, self.bases)
        delayed = (
            other.delay_w(
                one, by, self.costs, room, self.whole_grads, together=together, before_last=before_last
            )
            for before_last, together, by, one in flags
        )
        moved = _Once(itertools.chain(self.bases, delayed))
        yield from moved
        for one, everywhere in itertools.product(moved, (False, True)):
            for count in (one.num_microbatches, 2, 1):
                yield other.fuse_bw(one, max(0, one.num_microbatches - count), everywhere=everywhere)

    def in_parts(self, plan: Plan) -> Iterator[Plan]:
        """With trailing W's whole, and in parts."""
        yield plan
        for count in other.PARTS if self.parts else ():
            yield other.split_trailing(plan, self.stages, count)


class WithinLimit:
    """make: of an order and what is left of the room, the plan and how good it is; raises PlanError where it does not
    fit."""

    def __init__(self, make: Callable[[Plan, Reserve], tuple[Merit, Plan]], orders: Orders) -> None:
        self.make, self.orders = make, orders
        size = orders.plan.num_ops
        self.most = max(min(_FEW, _OPERATIONS_OF_FEW // size), _OPERATIONS_OF_MANY // size)
        self.tried: dict[Choice, Merit | None] = {}
        self.best: tuple[Merit, Plan] | None = None
        self.refused: PlanError | None = None

    def fastest(self) -> Plan:
        """Raises PlanError where nothing fits."""
        self._search()
        if self.best is None:
            assert self.refused is not None, "nothing was tried"
            raise self.refused
        return self.best[1]

    @property
    def is_done(self) -> bool:
        """Whether as many as may be tried have been."""
        return len(self.tried) >= self.most + (_UNTIL_ONE_FITS if self.best is None else 0)

    def _search(self) -> None:
        orders, reserves = self.orders, self.orders.reserves
        full, least = reserves[0], reserves[-1]
        fits = ((one, reserve) for one in orders.bases for reserve in (full, least))
        first, reserve = next((one for one in fits if self._merit(one) is not None), (orders.plan, full))
        start = self._best((first, reserve), ((one, reserve) for one in orders.in_parts(first)))
        start = self._best(start, ((start[0], one) for one in reserves))
        if self.is_done or orders.is_fixed:
            return
        start = self._best(start, ((one, start[1]) for one in orders.every))
        starts = [self._best(start, ((one, left) for one in orders.every)) for left in reserves[-2:]]
        for one in (start, *starts, *((base, full) for base in orders.bases)):
            self._descend(one)

    def _descend(self, start: Choice) -> None:
        """To what is better by one rank's row or what is left, while there is any."""
        for _ in range(_ROUNDS):
            before = start
            start = self._best(start, ((start[0], one) for one in self.orders.reserves))
            start = self._best(start, ((one, start[1]) for one in _mixed(start[0], self.orders.every)))
            start = self._best(start, ((one, start[1]) for one in other.one_w_moved(start[0])))
            if start == before:
                return

    def _best(self, start: Choice, others: Iterable[Choice]) -> Choice:
        best, least = start, self._merit(start)
        for one in itertools.takewhile(lambda _: not self.is_done, others):
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


def _mixed(plan: Plan, others: Iterable[Plan]) -> Iterator[Plan]:
    """The plan with one rank's row of another one that sends and receives the same."""

    def messages(one: Plan) -> list[list[RawOp]]:
        return [[op for op in row if IS_TRANSFER[op[0]]] for row in one.rows]

    mine = messages(plan)
    for one in others:
        if messages(one) == mine:
            for rank, row in enumerate(one.rows):
                yield other.with_row(plan, rank, row)
