"""Products of experts' rows where kernels are compiled for a number of rows: few such numbers, and the same results."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core import device, weight_grad
from megatron.core.transformer.experts import products

ROWS = [0, 130, 130, 64, 1, 200]  # by expert
ENDS = tuple(itertools.accumulate(ROWS))
HIDDEN, WIDTH = 96, 80


@pytest.fixture
def with_instructions(monkeypatch):
    """A CPU that multiplies bf16, however small the product; the shapes that its kernel was asked for."""
    shapes = set()
    plain = device.product

    def recorded(a, b, out=None):
        shapes.add((*a.shape, b.shape[1]))
        return plain(a, b, out)

    monkeypatch.setitem(device.SHORT, torch.bfloat16, 0)
    for module in (products, weight_grad):
        monkeypatch.setattr(module, "product", recorded)
    return shapes


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("grouped", [False, True])
def test_kernels_are_asked_for_few_numbers_of_rows_and_results_are_those_of_each_expert(
    with_instructions, grouped
):
    x, weight, dy = random(ENDS[-1], HIDDEN), random(len(ROWS), HIDDEN, WIDTH), random(ENDS[-1], WIDTH)
    out = products.products_by_expert(x, weight, ENDS, grouped)
    grads = torch.ones(len(ROWS), WIDTH, HIDDEN)
    weight_grad.accumulate_wgrad(grads, x, dy, ENDS)
    assert {rows for rows, _, columns in with_instructions if columns == WIDTH} == {64, 192, 256}
    assert {k for _, k, columns in with_instructions if columns == HIDDEN} == {64, 192, 256}
    for expert, (end, rows) in enumerate(zip(ENDS, ROWS, strict=True)):
        of_x, of_dy = x[end - rows : end].double(), dy[end - rows : end].double()
        close = {"rtol": 2**-8, "atol": 1e-4, "check_dtype": False}
        torch.testing.assert_close(out[end - rows : end], of_x @ weight[expert].double(), **close)
        torch.testing.assert_close(
            grads[expert], 1 + of_dy.t() @ of_x, rtol=2**-7, atol=1e-2, check_dtype=False
        )
