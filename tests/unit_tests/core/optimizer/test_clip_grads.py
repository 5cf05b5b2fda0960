"""Norms in fp64 from fp32 and 16-bit gradients, clipping, zeros."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.distributed.custom_fsdp.squared_sums import BLOCK, squared_sums, squared_sums_of_parts
from megatron.core.optimizer.clip_grads import clip_coefficient, norm_of, zero_counts_of_parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_squared_sums_are_fp64_of_every_element(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(n).to(dtype) for n in (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)]
    tensors.append(torch.randn(30, 40).to(dtype).t())
    sums = squared_sums(tensors)
    assert sums.dtype == torch.float64
    for got, tensor in zip(sums.tolist(), tensors, strict=True):
        assert got == pytest.approx(math.fsum(x * x for x in tensor.double().flatten().tolist()), rel=1e-13)


def test_large_fp32_gradients_do_not_overflow():
    grad = torch.full((10,), 1e30)
    assert norm_of(squared_sums([grad]).tolist()) == pytest.approx(1e30 * math.sqrt(10), rel=1e-7)


def test_sum_is_not_finite_exactly_if_an_element_is_not():
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.zeros(BLOCK + 3)
        tensor[-1] = bad
        assert not math.isfinite(squared_sums([tensor]).item())


def test_nothing_has_norm_zero():
    assert norm_of(squared_sums([]).tolist()) == 0.0
    assert zero_counts_of_parts([]).tolist() == []


def test_clip_coefficient():
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(1e9, 0.0) == 1.0  # off


def test_clipping_agrees_with_torch():
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.zeros(100, dtype=torch.float64))
    parameter.grad = torch.randn(100, dtype=torch.float64) * 5
    ours = parameter.grad * clip_coefficient(norm_of(squared_sums([parameter.grad]).tolist()), 1.0)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(parameter.grad, ours, rtol=1e-12, atol=0)


def test_zero_counts():
    zeros = torch.zeros(2, 3, dtype=torch.bfloat16)
    counts = zero_counts_of_parts([[torch.tensor([0.0, 1.0, -0.0])], [zeros], [], [zeros, zeros[:, :1]]])
    assert counts.dtype == torch.float64
    assert counts.tolist() == [2.0, 6.0, 0.0, 8.0]


def test_parts_of_one_parameter_are_added():
    torch.manual_seed(2)
    whole = torch.randn(BLOCK + 77)
    parts = [[whole[:5], whole[5:1000], whole[1000:]], [], [whole]]
    sums = squared_sums_of_parts(parts).tolist()
    assert sums[1] == 0.0
    assert sums[0] == pytest.approx(sums[2], rel=1e-14)
    assert sums[2] == squared_sums([whole]).item()
