"""Regions in flat parts: the same elements, in as few tensors as can be."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.param_meta import Region, region_parts, region_slices


@st.composite
def regions_and_parts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    local, extent = [], []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        local.append(start)
        extent.append(draw(st.integers(1, size - start)))
    ends = sorted(draw(st.sets(st.integers(0, math.prod(shape)), max_size=3)) | {0, math.prod(shape)})
    return Region(tuple(local), tuple(local), tuple(extent)), shape, ends


@settings(derandomize=True, max_examples=200, deadline=None)
@given(regions_and_parts())
def test_all_parts_together_are_the_region_once(case):
    region, shape, ends = case
    whole = torch.arange(math.prod(shape)).view(shape)
    sliced, parted = [], []
    for start, end in itertools.pairwise(ends):
        part = whole.view(-1)[start:end]
        slices = region_slices(region, shape, part, start, end)
        sliced += [value for tensor in slices for value in tensor.flatten().tolist()]
        for offset, held in region_parts(region, shape, part, start, end):
            parted += held.flatten().tolist()
            slot = tuple(slice(o, o + n) for o, n in zip(offset, held.shape, strict=True))
            assert torch.equal(whole[slot], held)
    expected = region.view(whole).flatten().tolist()
    assert sliced == parted == expected


def test_neighbours_are_one_slice():
    part = torch.arange(40.0)[5:35]
    (rows,) = region_slices(Region((1, 0), (0, 0), (2, 10)), (4, 10), part, 5, 35)
    assert rows.tolist() == list(range(10, 30))
    assert region_slices(Region((0, 0), (0, 0), (1, 5)), (4, 10), part, 5, 35) == []
    assert len(region_slices(Region((0, 2), (0, 0), (4, 3)), (4, 10), part, 5, 35)) == 2
