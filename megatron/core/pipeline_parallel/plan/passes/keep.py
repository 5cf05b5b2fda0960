"""What stays over a gap between two uses: Belady's choice under a capacity that changes in time.

Keeping a unit's weights over a gap saves one gather, keeping its gradients one reduction, and a byte that is
held saves about the same bytes on the wire in either. So the most is saved by keeping the shortest gaps:
wherever all that would be kept is more than there is room for, what is used last goes (Belady 1966, IBM
Systems Journal 5). With units of one size that is the best there is, because gaps are intervals and the
capacity of each moment bounds those that cover it. With sizes that differ, what a large unit left free by
going is filled up again with the shortest gaps that fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.row_uses import Gap


def keep_gaps(gaps: Sequence[Gap], capacity: Sequence[float]) -> set[Gap]:
    """The gaps to keep. capacity: bytes by moment; gaps without a moment cost nothing and are kept."""
    kept = _furthest_goes(gaps, capacity)
    if len({gap.size for gap in gaps}) > 1:
        _fill(gaps, kept, capacity)
    return kept


def _furthest_goes(gaps: Sequence[Gap], capacity: Sequence[float]) -> set[Gap]:
    starting: list[list[Gap]] = [[] for _ in capacity]
    kept = {gap for gap in gaps if gap.start == gap.end}
    for gap in gaps:
        if gap.start < gap.end:
            starting[gap.start].append(gap)
    ending: list[list[Gap]] = [[] for _ in range(len(capacity) + 1)]
    furthest: list[
        tuple[int, int, int, Gap]
    ] = []  # the one with the latest end, of these the largest, is first
    held, count = 0, 0
    for moment, room in enumerate(capacity):
        for gap in ending[moment]:
            if gap in kept:
                held -= gap.size
        for gap in starting[moment]:
            kept.add(gap)
            ending[gap.end].append(gap)
            held += gap.size
            count += 1
            heapq.heappush(furthest, (-gap.end, -gap.size, count, gap))
        while held > room and furthest:
            gap = heapq.heappop(furthest)[3]
            if gap.end > moment:
                kept.discard(gap)
                held -= gap.size
    return kept


def _fill(gaps: Sequence[Gap], kept: set[Gap], capacity: Sequence[float]) -> None:
    room = list(capacity)
    for gap in kept:
        for moment in range(gap.start, gap.end):
            room[moment] -= gap.size
    left = [gap for gap in gaps if gap not in kept]
    for gap in sorted(left, key=lambda gap: (gap.end - gap.start, gap.start, gap.unit)):
        if room[gap.start] < gap.size or min(room[gap.start : gap.end]) < gap.size:
            continue
        kept.add(gap)
        for moment in range(gap.start, gap.end):
            room[moment] -= gap.size
