"""Flat slices of row-major tensors as rectangles, and checks over sets of rectangles (floor 0, pure).

Sharded data parallelism holds a tensor as an arbitrary slice [start, end) of its flattened elements;
checkpoints store rectangles, which any other layout can read a part of. A slice of a tensor with n dims is at
most 2n - 1 rectangles: a ragged head, whole rows, a ragged tail, and the ragged ones cut again one dim
further in.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A box of a global tensor: its first element and its extent, one index a dim."""

    offset: Dims
    shape: Dims

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Rectangle) -> Rectangle | None:
        """The elements that both have, if any."""
        first = tuple(map(max, self.offset, other.offset))
        ends = ([a + n for a, n in zip(one.offset, one.shape, strict=True)] for one in (self, other))
        shape = tuple(end - begin for begin, end in zip(first, map(min, *ends), strict=True))
        return Rectangle(first, shape) if all(size > 0 for size in shape) else None

    def seen_from(self, origin: Dims) -> Rectangle:
        """The same elements, their place counted from `origin`."""
        return Rectangle(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What picks it out of an array of the tensor."""
        return tuple(slice(first, first + n) for first, n in zip(self.offset, self.shape, strict=True))


def cut_flat_slice(global_shape: Dims, start: int, end: int) -> list[Rectangle]:
    """The fewest rectangles, in flat order, that make up elements [start, end) of a row-major tensor. The elements of
    each are neighbours.

    A tensor without dims has one element; an empty slice has no rectangle.
    """
    numel = math.prod(global_shape)
    assert 0 <= start <= end <= numel, f"slice [{start}, {end}) of {numel} elements, shape {global_shape}"
    return [] if start == end else _cut(global_shape, start, end, prefix=())


def _cut(shape: Dims, start: int, end: int, prefix: Dims) -> list[Rectangle]:
    """prefix: indices of the dims already fixed; start, end: inside this sub-tensor."""
    ones = (1,) * len(prefix)
    if start == 0 and end == math.prod(shape):
        return [Rectangle(prefix + (0,) * len(shape), ones + shape)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows are [first, last)
    if first > last:  # inside one row
        return _cut(shape[1:], start - last * row, end - last * row, (*prefix, last))
    out: list[Rectangle] = []
    if start < first * row:
        out += _cut(shape[1:], start - (first - 1) * row, row, (*prefix, first - 1))
    if first < last:
        offset = (*prefix, first) + (0,) * (len(shape) - 1)
        out.append(Rectangle(offset, (*ones, last - first, *shape[1:])))
    if last * row < end:
        out += _cut(shape[1:], 0, end - last * row, (*prefix, last))
    return out


def flat_range(global_shape: Dims, rectangle: Rectangle) -> tuple[int, int] | None:
    """The slice [start, end) that a rectangle covers, or None when its elements are not neighbours.

    The inverse of `cut_flat_slice`, one rectangle at a time.
    """
    assert len(global_shape) == len(rectangle.offset) == len(rectangle.shape), (
        f"shape {global_shape}, rectangle {rectangle}"
    )
    start, stride, open_dim = 0, 1, True  # open_dim: every dim so far (from the last) is covered whole
    for size, offset, extent in zip(
        reversed(global_shape), reversed(rectangle.offset), reversed(rectangle.shape), strict=True
    ):
        if not open_dim and extent != 1:
            return None
        open_dim = open_dim and extent == size
        start += offset * stride
        stride *= size
    return start, start + rectangle.numel


def in_bounds(global_shape: Dims, rectangle: Rectangle) -> bool:
    """Whether the rectangle lies inside the tensor."""
    return len(rectangle.offset) == len(rectangle.shape) == len(global_shape) and all(
        offset >= 0 and extent >= 0 and offset + extent <= size
        for size, offset, extent in zip(global_shape, rectangle.offset, rectangle.shape, strict=True)
    )


def find_overlap(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Two rectangles of one tensor that share an element, or None. Empty ones share nothing.

    A sweep along the dim with the most distinct beginnings: few rectangles are open at once in any layout in use.
    """
    boxes = [box for box in rectangles if box.numel > 0]
    if len(boxes) < 2:
        return None
    if not boxes[0].offset:
        return boxes[0], boxes[1]
    dim = max(range(len(boxes[0].offset)), key=lambda d: len({box.offset[d] for box in boxes}))
    boxes.sort(key=lambda box: box.offset)
    boxes.sort(key=lambda box: box.offset[dim])
    open_boxes: list[tuple[int, int]] = []  # (end along dim, index), sorted
    for index, box in enumerate(boxes):
        begin = box.offset[dim]
        del open_boxes[: bisect.bisect_right(open_boxes, (begin, len(boxes)))]
        for _, other in open_boxes:
            if box.common(boxes[other]) is not None:
                return boxes[other], box
        bisect.insort(open_boxes, (begin + box.shape[dim], index))
    return None


def fill_error(global_shape: Dims, rectangles: Sequence[Rectangle]) -> str | None:
    """Why the rectangles do not make up the tensor exactly once, or None when they do."""
    for rectangle in rectangles:
        if not in_bounds(global_shape, rectangle):
            return f"the piece at {rectangle.offset} of shape {rectangle.shape} is not inside {global_shape}"
    numel, covered = math.prod(global_shape), sum(rectangle.numel for rectangle in rectangles)
    if covered != numel:
        return f"the pieces hold {covered} elements, shape {global_shape} has {numel}"
    if (pair := find_overlap(rectangles)) is not None:
        return f"pieces overlap: {pair[0].offset} + {pair[0].shape} and {pair[1].offset} + {pair[1].shape}"
    return None


def even_share(total: int, parts: int) -> int:
    """Rows of each of `parts` consecutive bands of `total` rows; the last band has what is left, which may be fewer."""
    return -(-total // parts)
