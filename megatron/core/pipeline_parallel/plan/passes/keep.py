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
import itertools
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.row_uses import Gap


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
            if kept[index]:
                held -= gaps[index].size
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
    change = [0] * (len(capacity) + 1)
    for gap, stays in zip(gaps, kept, strict=True):
        if stays:
            change[gap.start] += gap.size
            change[gap.end] -= gap.size
    room = [free - held for free, held in zip(capacity, itertools.accumulate(change), strict=False)]
    left = [index for index, stays in enumerate(kept) if not stays]
    for index in sorted(
        left, key=lambda one: (gaps[one].end - gaps[one].start, gaps[one].start, gaps[one].unit)
    ):
        start, end, size = gaps[index][:3]
        ends_fit = room[start] >= size and room[end - 1] >= size and room[(start + end) // 2] >= size
        if not ends_fit or min(room[start:end]) < size:
            continue
        kept[index] = 1
        for moment in range(start, end):
            room[moment] -= size
