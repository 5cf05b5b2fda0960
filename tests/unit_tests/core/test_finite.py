"""One bad element is found wherever it is, and no sum of good ones is mistaken for one."""

import math

import pytest
import torch

from megatron.core.distributed.custom_fsdp.squared_sums import all_finite, nonfinite_place
from megatron.core.param_meta import ParamMeta, Region

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_place_of_a_bad_element(dtype):
    for bad in (math.nan, math.inf, -math.inf):
        for numel in (1, 7, 64, 1000):
            for place in {0, numel // 2, numel - 1}:
                tensor = torch.linspace(-2, 2, numel).to(dtype)
                assert all_finite([tensor])
                tensor[place] = bad
                assert not all_finite([torch.ones(3), tensor, torch.ones(2, dtype=torch.float64)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(dtype):
    largest = torch.finfo(dtype).max
    assert all_finite([torch.tensor([largest, -largest] * 50, dtype=dtype)])


def test_any_shape_and_nothing():
    whole = torch.zeros(6, 8)
    whole[5, 7] = math.nan
    assert all_finite([whole[:, :7], whole[0, 0], torch.zeros(0), torch.arange(3)])
    assert not all_finite([whole.t()[4:]])
    assert all_finite([])


def test_the_place_of_a_bad_element_in_any_slice():
    """Two of six experts on this rank, of which it holds half the width, cut anywhere."""
    half = Region((0, 0, 0), (2, 3, 0), (2, 3, 4))
    meta = ParamMeta("experts.weight", (6, 6, 4), regions=(half,), expert=True)
    for place in range(24):
        flat = torch.zeros(24)
        flat[place] = math.nan
        for start in range(0, 24, 5):
            found = nonfinite_place(meta, flat[start : start + 9], start)
            held = start <= place < start + 9
            assert found == (f"expert {2 + place // 12} of experts.weight" if held else None)
    assert nonfinite_place(ParamMeta("w", (24,)), flat) == "w"
