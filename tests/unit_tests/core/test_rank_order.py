"""Sums in rank order, against the sum written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transport import gloo_pairs
from megatron.core.transport.gloo_pairs import add_in_rank_order

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def part(seed, n, dtype):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(1, 16),
)
def test_bits_are_those_of_adding_from_the_first_to_the_last(ranks, n, dtype, into, accumulate, block):
    parts = [part(seed, n, dtype) for seed in range(ranks)]
    output = part(99, n, into)
    wide = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide)
    for one in parts[1:]:
        total = total + one.to(wide)
    expected = (output + total if accumulate else total).to(into)
    before, gloo_pairs.BLOCK = gloo_pairs.BLOCK, block
    try:
        add_in_rank_order(parts, output, accumulate=accumulate)
    finally:
        gloo_pairs.BLOCK = before
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", range(4))
def test_the_sum_may_end_in_one_of_its_parts(own, dtype):
    parts = [part(seed, 11, dtype) for seed in range(4)]
    expected = torch.zeros(11, dtype=dtype)
    add_in_rank_order(parts, expected)
    add_in_rank_order(parts, parts[own])
    assert torch.equal(parts[own], expected)


def test_parts_must_fit():
    with pytest.raises(AssertionError, match=r"parts \[\(3,\), \(4,\)\], output \(3,\)"):
        add_in_rank_order([torch.ones(3), torch.ones(4)], torch.ones(3))
    with pytest.raises(AssertionError, match=r"parts \[\]"):
        add_in_rank_order([], torch.ones(3))
