"""Flat slices as rectangles, against naive enumeration of elements."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.rectangles import (
    Rectangle,
    cut_flat_slice,
    fill_error,
    find_overlap,
    flat_range,
    in_bounds,
)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def slices(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def flat_indices(shape, box):
    """Flat index of every element of a box, in row-major order of the box: the naive way."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*ranges)]


def fewest_boxes(shape, start, end):
    """Least number of boxes of neighbouring elements for [start, end): dynamic programming over all boxes."""
    boxes = set()
    per_dim = [[(o, n) for o in range(size) for n in range(1, size - o + 1)] for size in shape]
    for choice in itertools.product(*per_dim):
        box = Rectangle(tuple(o for o, _ in choice), tuple(n for _, n in choice))
        covered = flat_indices(shape, box)
        if covered == list(range(covered[0], covered[0] + len(covered))):
            boxes.add((covered[0], covered[-1] + 1))
    best = {start: 0}
    for position in range(start, end):
        for stop in range(position + 1, end + 1):
            if position in best and (position, stop) in boxes:
                best[stop] = min(best.get(stop, math.inf), best[position] + 1)
    return best[end]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(slices())
def test_rectangles_are_the_slice_in_order_each_element_once(case):
    shape, start, end = case
    boxes = cut_flat_slice(shape, start, end)
    covered = [index for box in boxes for index in flat_indices(shape, box)]
    assert covered == list(range(start, end))
    for box in boxes:
        assert flat_indices(shape, box)[0] == flat_range(shape, box)[0]
        assert in_bounds(shape, Rectangle(box.offset, box.shape))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(slices().filter(lambda case: math.prod(case[0]) <= 40))
def test_no_other_cut_needs_fewer_rectangles(case):
    shape, start, end = case
    assert len(cut_flat_slice(shape, start, end)) == fewest_boxes(shape, start, end)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(slices())
def test_flat_range_is_the_inverse(case):
    shape, start, end = case
    position = start
    for box in cut_flat_slice(shape, start, end):
        assert flat_range(shape, Rectangle(box.offset, box.shape)) == (position, position + box.numel)
        position += box.numel
    assert position == end


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_flat_range_refuses_exactly_the_boxes_whose_elements_are_no_neighbours(data):
    shape = data.draw(shapes)
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(shape, offset, strict=True))
    box = Rectangle(offset, extent)
    covered = flat_indices(shape, box)
    neighbours = covered == list(range(covered[0], covered[0] + len(covered)))
    assert flat_range(shape, box) == ((covered[0], covered[-1] + 1) if neighbours else None)


def test_scalars_and_empty_slices():
    (box,) = cut_flat_slice((), 0, 1)
    assert (box.offset, box.shape, flat_range((), box)) == ((), (), (0, 1))
    assert cut_flat_slice((), 1, 1) == cut_flat_slice((3, 0), 0, 0) == cut_flat_slice((3, 4), 5, 5) == []


def test_head_rows_tail():
    boxes = [(b.offset, b.shape, flat_range((4, 3), b)[0]) for b in cut_flat_slice((4, 3), 1, 11)]
    assert boxes == [((0, 1), (1, 2), 1), ((1, 0), (2, 3), 3), ((3, 0), (1, 2), 9)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_overlap_is_found_exactly_when_two_boxes_share_an_element(data):
    shape = data.draw(shapes)
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        extent = tuple(data.draw(st.integers(0, size - o)) for size, o in zip(shape, offset, strict=True))
        boxes.append(Rectangle(offset, extent))
    counts = [index for box in boxes for index in flat_indices(shape, box)]
    assert (find_overlap(boxes) is not None) == (len(counts) != len(set(counts)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_slices_that_partition_a_tensor_fill_it_and_any_missing_one_shows(data):
    shape = data.draw(shapes)
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    boxes = [
        Rectangle(box.offset, box.shape)
        for start, end in itertools.pairwise(cuts)
        for box in cut_flat_slice(shape, start, end)
    ]
    assert fill_error(shape, boxes) is None
    assert "elements" in fill_error(shape, boxes[:-1])
    assert fill_error(shape, [*boxes[:-1], boxes[0], boxes[0]]) is not None


def test_a_piece_outside_the_tensor_is_told():
    assert "not inside" in fill_error((4,), [Rectangle((2,), (4,))])
    assert "not inside" in fill_error((4,), [Rectangle((0, 0), (2, 2))])
