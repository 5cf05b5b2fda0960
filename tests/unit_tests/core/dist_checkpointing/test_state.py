"""Pieces of whole tensors and of flat shards are views of what they came from."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.state import part_pieces, pieces_of
from megatron.core.param_meta import ParamMeta, Region
from megatron.core.rectangles import Rectangle, fill_error


@st.composite
def cut_parameters(draw):
    """A parameter of 0 to 4 dims whose local tensor is a grid of regions, which lie anywhere in the global one; and the
    places at which its flattened elements are cut."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    cuts = [sorted(draw(st.sets(st.integers(0, size), max_size=2)) | {0, size}) for size in shape]
    regions = []
    for corner in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
        local = tuple(start for start, _ in corner)
        offset = tuple(2 * start for start in local)  # gaps between them: other ranks' parts
        regions.append(Region(local, offset, tuple(end - start for start, end in corner)))
    whole = tuple(2 * size for size in shape)
    numel = math.prod(shape)
    ends = sorted(draw(st.sets(st.integers(0, numel), max_size=4)) | {0, numel})
    return ParamMeta("w", whole, regions=tuple(regions)), shape, ends


@settings(derandomize=True, max_examples=200, deadline=None)
@given(cut_parameters())
def test_pieces_of_parts_are_those_of_the_whole(parameter):
    """Against brute force: the same elements, each in one piece, where the pieces of the whole tensor put them."""
    meta, shape, ends = parameter
    assert meta.local_shape == shape
    numel = math.prod(shape)
    local = torch.arange(1.0, numel + 1).view(shape)
    expected, found = torch.zeros(meta.global_shape), torch.zeros(meta.global_shape)
    for piece in pieces_of("model", meta, local):
        put(expected, piece)
    boxes = []
    for start, end in itertools.pairwise(ends):
        part = local.reshape(-1)[start:end].clone()
        pieces = part_pieces("model", meta, part, start, end)
        assert sum(piece.tensor.numel() for piece in pieces) == end - start
        for piece in pieces:
            assert (piece.name, piece.global_shape) == ("model.w", meta.global_shape)
            put(found, piece)
            boxes.append(Rectangle(piece.offset, tuple(piece.tensor.shape)))
            piece.tensor.zero_()
        assert not part.any()  # they are views: loading writes in place
    assert torch.equal(found, expected)
    assert sum(box.numel for box in boxes) == numel
    assert len(boxes) <= len(meta.parts) * (len(ends) - 1) * max(1, 2 * len(shape) - 1)
    error = fill_error(meta.global_shape, boxes)
    assert error is None or error.startswith("the pieces hold")  # of what is left out, nothing overlaps


def put(whole: torch.Tensor, piece) -> None:
    slices = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
    whole[slices] = piece.tensor


def test_bands_of_rows_are_cut_from_a_part():
    """Gate and up rows of a fused weight, half of it here: elements 4 to 11 of a local [4, 3]."""
    bands = (Region((0, 0), (2, 0), (2, 3)), Region((2, 0), (6, 0), (2, 3)))
    meta = ParamMeta("fc1", (8, 3), regions=bands)
    pieces = part_pieces("model", meta, torch.arange(4.0, 11.0), 4, 11)
    assert [(piece.offset, piece.tensor.tolist()) for piece in pieces] == [
        ((3, 1), [[4.0, 5.0]]),
        ((6, 0), [[6.0, 7.0, 8.0]]),
        ((7, 0), [[9.0, 10.0]]),
    ]


def test_empty_parts_and_empty_parameters():
    meta = ParamMeta("w", (4, 3))
    assert part_pieces("model", meta, torch.zeros(0), 12, 12) == []
    (piece,) = part_pieces("model", ParamMeta("w", (0, 3)), torch.zeros(0), 0, 0)
    assert (piece.global_shape, tuple(piece.tensor.shape)) == ((0, 3), (0, 3))
    with pytest.raises(AssertionError, match=r"elements \[0, 3\) in a tensor of \(2,\)"):
        part_pieces("model", meta, torch.zeros(2), 0, 3)
