"""What stays over a gap between two uses: Belady's choice under a capacity that changes in time.

Keeping a unit's weights over a gap saves one gather, keeping its gradients one reduction, and a byte that is held saves
about the same bytes on the wire in either. So the most is saved by keeping the shortest gaps: wherever all that would
be kept is more than there is room for, what is used last goes (Belady 1966, IBM Systems Journal 5). With units of one
size that is the best there is, because gaps are intervals and the capacity of each moment bounds those that cover it.
With sizes that differ, what a large unit left free by going is filled up again with the shortest gaps that fit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from megatron.core.pipeline_parallel.plan.held.row_uses import Gap, RowUses, Span, bytes_by_moment
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, PlanError
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency


def kept_gaps(
    uses: RowUses,
    residency: Residency,
    room: Sequence[float],
    grouping: Grouping | None,
    *,
    grads_alone: bool = False,
) -> set[Gap]:
    """The gaps over which weights and gradients are kept, by the policy. room: by moment, bytes for them. grouping:
    which gradients are, whatever the policy says. grads_alone: of what comes and goes. Raises PlanError where the
    row's order forbids the grouping."""
    weights, grads = uses.gaps
    if grads_alone and residency.weights_sharded:
        weights = []
    kept: set[Gap] = set()
    if not residency.weights_sharded:  # whole at rest
        kept, weights = set(weights), []
    kept |= {gap for gap in grads if not (residency.grads_sharded and gap.size)}  # these too
    grads = [gap for gap in grads if gap not in kept]
    if grouping is not None:
        kept, grads = kept | set(_grouped(uses, grads, grouping)), []
    if residency.policy == "backward":
        return kept | {gap for gap in weights if _to_backward(uses.reads[gap.unit], gap)}
    if residency.policy == "step":
        return kept | {*weights, *grads}
    if residency.policy == "memory":
        return kept
    if residency.grads_sharded:
        taken = bytes_kept(uses.num_moments, kept, weights=False)
        room = [one - used for one, used in zip(room, taken, strict=True)]
    return kept | keep_gaps(weights + grads, room)


def bytes_kept(count: int, kept: Iterable[Gap], *, weights: bool) -> list[int]:
    """By moment, of weights or of gradients."""
    return bytes_by_moment(count, ((gap.start, gap.end, gap.size) for gap in kept if gap.weights == weights))


def _to_backward(spans: Sequence[Span], gap: Gap) -> bool:
    """Whether a gap is between the F and the backward of one microbatch."""
    forward, backward = spans[gap.index].end, spans[gap.index + 1].begin
    return forward[0] == F and backward[0] in (B, BW) and forward[2] == backward[2]


def _grouped(uses: RowUses, gaps: Sequence[Gap], grouping: Grouping) -> list[Gap]:
    """Of the gaps between contributions those inside a group."""
    groups = [_groups_of(uses, unit, spans, grouping) for unit, spans in enumerate(uses.adds)]
    kept = []
    for gap in gaps:
        one, other = groups[gap.unit][gap.index : gap.index + 2]
        if one == other:
            kept.append(gap)
        elif one > other:
            raise PlanError(
                f"rank {uses.units.rank}: two of its stages share the weights of {uses.units.units[gap.unit].name}, "
                "and this order adds up their gradients in another order than the run has until now, which would "
                "change its bits"
            )
    return kept


def _groups_of(uses: RowUses, unit: int, spans: Sequence[Span], grouping: Grouping) -> list[int]:
    """For each contribution of a unit the number of its REDUCE."""
    left = {}
    for stage in {span.begin[1] for span in spans}:
        sizes = grouping[stage][uses.units.of[stage].index(unit)]
        left[stage] = itertools.chain(*([number] * size for number, size in enumerate(sizes)))
    found = [next(left[span.begin[1]], -1) for span in spans]
    if -1 in found:
        raise PlanError(
            f"rank {uses.units.rank}: the stored grouping of unit {uses.units.units[unit].name} has fewer"
            " microbatches than the plan"
        )
    return found


def keep_gaps(gaps: Sequence[Gap], capacity: Sequence[float]) -> set[Gap]:
    """The gaps to keep. capacity: bytes by moment; gaps without a moment cost nothing and are kept."""
    kept = _furthest_goes(gaps, capacity)
    if len({gap.size for gap in gaps}) > 1:
        _fill(gaps, kept, capacity)
    return {gap for gap, stays in zip(gaps, kept, strict=True) if stays}


def _furthest_goes(gaps: Sequence[Gap], capacity: Sequence[float]) -> bytearray:
    """By gap, whether it is kept."""
    starting: list[list[int]] = [[] for _ in capacity]
    ending: list[list[int]] = [[] for _ in range(len(capacity) + 1)]
    for index, gap in enumerate(gaps):
        if gap.start < gap.end:
            starting[gap.start].append(index)
            ending[gap.end].append(index)
    kept = bytearray(b"\1") * len(gaps)
    furthest: list[tuple[int, int, int, int]] = []  # the latest end, of these the largest, is first
    held, count = 0, 0
    for moment, room in enumerate(capacity):
        for index in ending[moment]:
            held -= gaps[index].size * kept[index]
        for index in starting[moment]:
            gap = gaps[index]
            held += gap.size
            count += 1
            heapq.heappush(furthest, (-gap.end, -gap.size, count, index))
        while held > room and furthest:
            end, size, _, index = heapq.heappop(furthest)
            if -end > moment:
                kept[index] = 0
                held += size
    return kept


def _fill(gaps: Sequence[Gap], kept: bytearray, capacity: Sequence[float]) -> None:
    held = bytes_by_moment(len(capacity), (gap[:3] for gap, stays in zip(gaps, kept, strict=True) if stays))
    room = [free - used for free, used in zip(capacity, held, strict=True)]
    left = [
        gap[:4] + (index,) for index, (gap, stays) in enumerate(zip(gaps, kept, strict=True)) if not stays
    ]
    for start, end, size, _, index in sorted(left, key=lambda one: (one[1] - one[0], one[0], one[3])):
        ends_fit = room[start] >= size and room[end - 1] >= size and room[(start + end) // 2] >= size
        if not ends_fit or min(room[start:end]) < size:
            continue
        kept[index] = 1
        for moment in range(start, end):
            room[moment] -= size
