"""What a row keeps under a limit in bytes: room is known at every moment, and the row keeps to it by construction.

A rank holds states at rest, activations, the weights that an access reads, gradients that are added to or under way.
What gradients take follows from those that are kept over gaps; what they leave is for weights, kept and gathered ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.costs import CostModel, activations
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.passes.keep import bytes_by_moment, bytes_kept, keep_gaps, kept_gaps
from megatron.core.pipeline_parallel.plan.passes.lane_rows import LaneRow, stays
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.row_uses import Gap, RowUses, Span
from megatron.core.pipeline_parallel.plan.sizes import size_text

# Choices of gradients that are made until one fits; each looks for room in so many more moments ahead of a full one.
_TRIES, _BEFORE = 8, 4


class Reserve(NamedTuple):
    """What is left of the room when gaps are chosen.

    share: to gathers ahead alone. ahead: besides, as many bytes as bind gathers ahead elsewhere. under_way: to
    reductions, as much as where no gradients are kept. grads_first: weights are kept in what gradients leave.
    reduced_first: as in `LaneRow`.
    """

    share: float = 0.0
    ahead: bool = True
    under_way: bool = True
    grads_first: bool = False
    reduced_first: bool = False


def fit_limit(
    uses: RowUses,
    residency: Residency,
    costs: CostModel,
    grouping: Grouping | None,
    reserve: Reserve,
    *,
    forward_only: bool,
) -> tuple[set[Gap], list[float]]:
    """The gaps that are kept, and by moment the bytes that whole weights may take in all. Raises PlanError where even
    the least is too much."""
    count = uses.num_moments
    free = _room_beside_activations(uses, residency, costs, forward_only=forward_only)
    reads = _in_use(uses.reads, uses.units.weight_bytes, count) if residency.weights_cut else [0] * count
    ahead = residency.ahead_of(uses.units) if residency.weights_cut else 0
    spare = [max(0, ahead - one) if reserve.ahead and residency.overlap_gather else 0 for one in reads]
    most = float("inf") if residency.budget is None else float(residency.budget[uses.units.rank])

    def to_keep(room: Sequence[float]) -> list[float]:
        left = zip(room, spare, strict=True)
        return [(1 - reserve.share) * max(0.0, min(most, one - more)) for one, more in left]

    def over(held: Sequence[int]) -> list[float]:
        """By moment, what is read and whole gradients are beyond the room."""
        return [read + more - one for one, read, more in zip(free, reads, held, strict=True)]

    least = kept_gaps(uses, residency, [0.0] * count, grouping)
    kept, held = least, _gradients(uses, residency, least, reserve)
    if residency.grads_cut:
        other = held if reserve.under_way else _in_use(uses.adds, uses.units.grad_bytes, count)
        room = [one - read - more for one, read, more in zip(free, reads, other, strict=True)]
        for attempt in range(_TRIES):
            kept = kept_gaps(uses, residency, to_keep(room), grouping, grads_alone=reserve.grads_first)
            held = _gradients(uses, residency, kept, reserve)
            if max(over(held), default=0) <= 0:
                break
            taken = bytes_by_moment(count, (gap[:3] for gap in kept))
            for moment, more in enumerate(over(held)):
                for one in range(max(0, moment - attempt * _BEFORE), moment + 1) if more > 0 else ():
                    room[one] = min(room[one], spare[one] + taken[one]) - more
        else:
            kept, held = least, _gradients(uses, residency, least, reserve)
    beyond = max(over(held), default=0.0)
    if beyond > 0:
        assert residency.limit is not None
        rank, limit = uses.units.rank, residency.limit[uses.units.rank]
        raise PlanError(f"rank {rank} holds {size_text(limit + beyond)}, the limit is {size_text(limit)}")
    bound = [one - more for one, more in zip(free, held, strict=True)]
    if residency.budget is not None:
        grads = bytes_kept(count, kept, weights=False)
        bound = [min(one, ahead + most - more) for one, more in zip(bound, grads, strict=True)]
    if residency.weights_cut:
        room = [one - read for one, read in zip(bound, reads, strict=True)]
        kept = {gap for gap in kept if not gap.weights} | keep_gaps(uses.gaps[0], to_keep(room))
    return kept, bound


def _room_beside_activations(
    uses: RowUses, residency: Residency, costs: CostModel, *, forward_only: bool
) -> list[float]:
    """By moment, bytes of a limit that states at rest and activations leave: C(t) of docs/design/007-one-plan.md."""
    assert residency.limit is not None, residency
    free = residency.limit[uses.units.rank] - uses.units.shard_bytes
    ends = [first for _, first in uses.computations[1:]] + [uses.num_moments]
    held = activations(uses.row, costs, forward_only=forward_only)
    room: list[float] = []
    for (_, used, _), (_, first), end in zip(held, uses.computations, ends, strict=True):
        room += [free - used] * (end - first)
    return room


def _gradients(uses: RowUses, residency: Residency, kept: set[Gap], reserve: Reserve) -> list[int]:
    """By moment, what whole gradients and those under way take."""
    if not residency.grads_cut:
        return [0] * uses.num_moments
    lanes = LaneRow(uses, residency, reduced_first=reserve.reduced_first)
    lanes.reduce(sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last))
    return lanes.gradients_held()


def _in_use(spans: Sequence[Sequence[Span]], sizes: Sequence[int], count: int) -> list[int]:
    """By moment, bytes of what is used."""
    every = zip(spans, sizes, strict=True)
    return bytes_by_moment(count, ((one.first, one.last + 1, size) for mine, size in every for one in mine))
