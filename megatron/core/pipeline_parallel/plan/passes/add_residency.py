"""Add gathers, reductions and sums over instances: everything that data parallelism does in a step is in the plan.

Each row is walked as its accesses (`plan/held/units.py`). The policy says which gaps between two uses are kept:
`memory` none, `step` all, `backward` a microbatch's from F to B, `budget` the shortest ones that there is room for
(`kept_gaps`). Every stay then has a gather before it, as early as the room for gathers ahead allows, and what was
gathered is freed behind its last use; a group of microbatches whose gradients stay together has its reduction right
behind the last of them. `residency_rows` makes the rows: `gather_moments` says when gathers begin,
`row_uses.reductions` when a group is complete.

[Note: search] One search chooses orders of computations, parts of trailing W's, and what of the room is left to gathers
ahead. Without a limit in bytes only parts and shares of the plan's own order are tried, each as far as that is better.
Under a limit a look tells about how good a plan is; from its best, and from other beginnings, the search then descends.
Of a small plan ranks may have the rows of different orders too; of a large one a few choices are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, are_shared
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, RawOp, Row
from megatron.core.pipeline_parallel.plan.passes import order_variants
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.passes.residency_rows import ReservedRoom, RowMaker
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.simulate import Merit
from megatron.core.pipeline_parallel.plan.verify import verify

# What is left of the room. The first three divide a budget; under a limit all are tried.
RESERVES = (
    ReservedRoom(0.0),
    ReservedRoom(0.25),
    ReservedRoom(0.5),
    ReservedRoom(ahead=False),
    ReservedRoom(under_way=False),
    ReservedRoom(ahead=False, under_way=False),
    ReservedRoom(ahead=False, under_way=False, grads_first=True),
    ReservedRoom(ahead=False, under_way=False, reduced_first=True),
)
# W's that come later by so many computations.
_DELAYS = (1, 2, 1 << 20)
# Plans that are tried: so many of at most so many operations in all, of small ones more; and so many while none fits.
_FEW, _OPERATIONS_OF_FEW = 8, 200_000
_OPERATIONS_OF_MANY = 12_000
_UNTIL_ONE_FITS = 8
_ROUNDS = 3

Choice = tuple[Plan, ReservedRoom]


@ir.without_collector()
def add_residency(
    plan: Plan,
    stages: Sequence[StageUnits],
    residency: Residency,
    costs: CostModel,
    lanes: LaneCosts | None = None,
    *,
    grouping: Grouping | None = None,
) -> Plan:
    """The plan with its operations of data parallelism; the plan itself where nothing is shared.

    plan: with transfers or without, with post-validation or without, of training or evaluation. lanes: what gathers and
    reductions take; with them a budget is divided between units that are kept and gathers ahead as it is fastest, and
    trailing W's come unit by unit where that is faster. grouping: of an earlier plan, to keep its bits. Raises
    PlanError for a policy that the plan cannot have, and where the result is wrong.
    """
    assert not plan.has_lanes, "add_residency: a second time"
    if residency.policy == "backward" and plan.placement.num_stages > 1:
        raise PlanError(
            "policy backward keeps a microbatch's weights from F to B, and in a pipeline several are under way: use "
            "policy budget"
        )
    if not are_shared(stages):
        return plan
    maker = RowMaker(plan, tuple(stages), residency, costs, lanes, grouping)
    best = maker.made(plan, RESERVES[0]) if lanes is None else PlanSearch(maker).best_of()
    verify(best, costs, stages=stages, residency=residency)
    return best


class _MadeOnce(Iterable[Plan]):
    """Plans that are made when they are first asked for, each once."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._made: dict[Plan, None] = {}
        self._source = iter(plans)

    def __iter__(self) -> Iterator[Plan]:
        yield from tuple(self._made)
        for one in self._source:
            if one not in self._made:
                self._made[one] = None
                yield one


class PlanSearch:
    """tried: merits of choices, None of what does not fit. best: of all that were tried."""

    def __init__(self, maker: RowMaker) -> None:
        asked, plan = maker.residency, maker.plan
        self.maker, self.plan, self.limited = maker, plan, asked.limit is not None
        overlaps = asked.overlap_reduce and not plan.forward_only
        self.splits = overlaps and (not asked.grads_sharded or asked.policy in ("step", "budget"))
        divides = asked.policy == "budget" and asked.weights_sharded and asked.overlap_gather
        sharded = asked.weights_sharded or asked.grads_sharded
        self.reserves = RESERVES[: (8 if sharded else 1) if self.limited else 3 if divides else 1]
        size = plan.num_ops
        self.most = self.allowed = max(min(_FEW, _OPERATIONS_OF_FEW // size), _OPERATIONS_OF_MANY // size)
        self.tried: dict[Choice, Merit | None] = {}
        self.best: tuple[Merit, Plan] | None = None
        self.refused: PlanError | None = None

    def best_of(self, tries: int | None = None) -> Plan:
        """The fastest of so many choices, not verified; None: of as many as are worth it for a plan of this size. With
        more tries it goes on where it was. Raises PlanError where nothing fits."""
        self.allowed = self.most if tries is None else min(tries, self.most)
        start = self._look()
        if self.limited and not self._is_fixed and not self.is_done:
            self._descend_from(start)
        if self.best is None:
            assert self.refused is not None, "nothing was tried"
            raise self.refused
        return self.best[1]

    @functools.cached_property
    def over(self) -> list[float]:
        """By rank, bytes that the plan's own order holds beyond the limit at least."""
        return self.maker.over(self.plan, self.reserves[-1])

    # What is tried, in order -----------------------------------------------------------------------------

    def _look(self) -> Choice:
        """At the first order that fits, with its trailing W's in parts, and what may be left of the room."""
        full, least = self.reserves[0], self.reserves[-1]
        fits = ((one, reserve) for one in self._bases for reserve in (full, least))
        first, reserve = next((one for one in fits if self._merit(one) is not None), (self.plan, full))
        start = self._best((first, reserve), ((one, reserve) for one in self._in_parts(first)))
        return self._best(start, ((start[0], one) for one in self.reserves))

    def _descend_from(self, start: Choice) -> None:
        """From the best of every order, with what a look has left of the room or little, and from the bases."""
        every, full = self._every, self.reserves[0]
        start = self._best(start, ((one, start[1]) for one in every))
        starts = [self._best(start, ((one, left) for one in every)) for left in self.reserves[-2:]]
        for one in (start, *starts, *((base, full) for base in self._bases)):
            self._descend(one)

    def _descend(self, start: Choice) -> None:
        """To what is better by one rank's row or what is left, while there is any."""
        for _ in range(_ROUNDS):
            before = start
            start = self._best(start, ((start[0], one) for one in self.reserves))
            start = self._best(start, ((one, start[1]) for one in _mixed(start[0], self._every)))
            start = self._best(start, ((one, start[1]) for one in order_variants.one_w_moved(start[0])))
            if start == before:
                return

    def _best(self, start: Choice, others: Iterable[Choice]) -> Choice:
        """Without a limit the first one that is no better than the start is the last that is tried."""

        def beats(merit: Merit | None, other: Merit | None) -> bool:
            return merit is not None and (other is None or merit < other)

        best, least, first = start, self._merit(start), self._merit(start)
        for one in itertools.takewhile(lambda _: not self.is_done, others):
            merit = self._merit(one)
            if beats(merit, least):
                best, least = one, merit
            if not self.limited and not beats(merit, first) and one != start:
                break
        return best

    @property
    def is_done(self) -> bool:
        """Whether as many as may be tried have been."""
        most = self.allowed + (_UNTIL_ONE_FITS if self.best is None else 0)
        return self.limited and len(self.tried) >= most

    def _merit(self, choice: Choice) -> Merit | None:
        if choice in self.tried or self.is_done:
            return self.tried.get(choice)
        self.tried[choice] = None
        try:
            made = self.maker.made(*choice)
            merit = self.maker.merit(made)
        except PlanError as error:
            self.refused = self.refused or error
            return None
        self.tried[choice] = merit
        if self.best is None or merit < self.best[0]:
            self.best = merit, made
        return merit

    # Orders ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _is_fixed(self) -> bool:
        """Whether computations overlap in pairs, or there are forwards only."""
        computed = (op for row in self.plan.rows for op in row if ir.IS_COMPUTE[op[0]])
        return self.plan.forward_only or any(op[7] >= 0 for op in computed)

    @functools.cached_property
    def _room(self) -> order_variants.Room:
        maker, asked = self.maker, self.maker.residency
        assert asked.limit is not None
        uses = [maker.uses(rank, row) for rank, row in enumerate(self.plan.rows)]
        return order_variants.Room(
            [limit - one.units.bytes_at_rest for limit, one in zip(asked.limit, uses, strict=True)],
            [one.most_read * asked.weights_sharded for one in uses],
            [sum(one.grad_bytes for one in stage.units) * asked.grads_sharded for stage in maker.stages],
        )

    @functools.cached_property
    def _bases(self) -> Iterable[Plan]:
        """The plan's order, and with forwards held back; both with W's as the order has them, and right behind their
        B's. The plan's alone where its order is fixed, or nothing limits it."""
        return _MadeOnce(self._based() if self.limited and not self._is_fixed else (self.plan,))

    def _based(self) -> Iterator[Plan]:
        plan, costs = self.plan, self.maker.costs
        yield plan
        found = [plan]
        rows = tuple(tuple(op for op in row if ir.IS_COMPUTE[op[0]]) for row in plan.rows)
        order = dataclasses.replace(plan, rows=rows)
        held = order_variants.hold_back(order, costs, self._room)
        if held is not None and held != order:
            steps = any(ir.IS_VALIDATION[op[0]] for row in plan.rows for op in row)
            with contextlib.suppress(PlanError):  # such an order may have no room for a step's validation
                lowered = lower(held, costs)
                found.append(post_validation(lowered, costs) if steps else lowered)
        yield from found[1:]
        yield from map(order_variants.w_behind_b, found)

    @functools.cached_property
    def _every(self) -> Iterable[Plan]:
        """The bases, with W's delayed or in one with their B's, and trailing W's in parts."""
        return _MadeOnce(part for order in _MadeOnce(self._moved()) for part in self._in_parts(order))

    def _moved(self) -> Iterator[Plan]:
        flags = itertools.product((False, True), (False, True), _DELAYS, self._bases)
        delayed = (
            order_variants.delay_w(
                one, by, self.maker.costs, self._room, together=together, before_last=before_last
            )
            for before_last, together, by, one in flags
        )
        moved = _MadeOnce(itertools.chain(self._bases, delayed))
        yield from moved
        for one, everywhere in itertools.product(moved, (False, True)):
            for count in (one.num_microbatches, 2, 1):
                yield order_variants.fuse_bw(one, max(0, one.num_microbatches - count), everywhere=everywhere)

    def _in_parts(self, plan: Plan) -> Iterator[Plan]:
        """With trailing W's whole, and in parts."""
        yield plan
        for count in order_variants.PARTS if self.splits else ():
            yield order_variants.split_trailing(plan, self.maker.stages, count)


def _mixed(plan: Plan, others: Iterable[Plan]) -> Iterator[Plan]:
    """The plan with one rank's row of another one that sends and receives the same."""

    def messages(rows: Sequence[Row]) -> list[list[RawOp]]:
        return [[op for op in row if ir.IS_TRANSFER[op[0]]] for row in rows]

    mine = messages(plan.rows)
    for one in others:
        if messages(one.rows) == mine:
            for rank, row in enumerate(one.rows):
                yield order_variants.with_row(plan, rank, row)
