"""The one function that computes weight gradients, against autograd; the sink around it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron.core.weight_grad import WeightGradAccumulator, accumulate_wgrad


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("leading", [(6,), (2, 3), (2, 3, 4)])
def test_matrix_lookup_and_bias_equal_autograd(leading):
    weight = random(5, 4).requires_grad_()
    bias = random(5).requires_grad_()
    x, dy = random(*leading, 4), random(*leading, 5)
    functional.linear(x, weight, bias).backward(dy)
    main = torch.ones(5, 4, dtype=torch.float64)
    accumulate_wgrad(main, x, dy)
    torch.testing.assert_close(main - 1, weight.grad, rtol=1e-12, atol=1e-12)
    main_bias = torch.ones(5, dtype=torch.float64)
    accumulate_wgrad(main_bias, None, dy)
    torch.testing.assert_close(main_bias - 1, bias.grad, rtol=1e-12, atol=1e-12)

    table = random(7, 5).requires_grad_()
    indices = torch.randint(7, leading, generator=torch.Generator().manual_seed(0))
    functional.embedding(indices, table).backward(dy)
    main_table = torch.ones(7, 5, dtype=torch.float64)
    accumulate_wgrad(main_table, indices, dy)
    torch.testing.assert_close(main_table - 1, table.grad, rtol=1e-12, atol=1e-12)


def test_a_finished_bias_gradient_is_added_as_it_is():
    main = torch.ones(5)
    accumulate_wgrad(main, None, torch.arange(5.0))
    assert main.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_contributions_are_added_in_fp32(dtype):
    x, dy = random(8, 4, dtype=dtype), random(8, 5, dtype=dtype)
    main = torch.zeros(5, 4)
    for _ in range(1000):
        accumulate_wgrad(main, x, dy)
    # Adding up in 16 bits would stop growing long before.
    torch.testing.assert_close(main, 1000 * (dy.t() @ x).float(), rtol=1e-4, atol=1e-2)
    table = torch.zeros(3, 5)
    accumulate_wgrad(table, torch.tensor([1] * 8), dy)
    torch.testing.assert_close(table[1], dy.float().sum(0))
    bias = torch.zeros(5)
    accumulate_wgrad(bias, None, dy)
    torch.testing.assert_close(bias, dy.float().sum(0))


def test_one_gemm_a_microbatch_is_bit_identical_however_it_is_scheduled():
    """Deferring contributions changes nothing, as long as they come in microbatch order."""
    contributions = [
        (random(8, 4, dtype=torch.float32) + i, random(8, 5, dtype=torch.float32)) for i in range(4)
    ]
    at_once, deferred = torch.zeros(5, 4), torch.zeros(5, 4)
    queue = []
    for x, dy in contributions:
        accumulate_wgrad(at_once, x, dy)
        queue.append((x, dy))
    for x, dy in queue:
        accumulate_wgrad(deferred, x, dy)
    assert torch.equal(at_once, deferred)


def test_sink_accumulates_and_tells_its_listener():
    heard = []

    class Listener:
        def grad_ready(self, key, microbatch):
            heard.append((key, microbatch))

    sink = WeightGradAccumulator()
    buffer = torch.zeros(5, 4)
    sink.bind({"w": buffer}, Listener())
    sink.microbatch = 3
    sink.put("w", torch.ones(2, 4), torch.ones(2, 5))
    assert buffer.unique().tolist() == [2.0]
    assert heard == [("w", 3)]
    with pytest.raises(AssertionError, match=r"no gradient buffer bound for 'other'; bound: \['w'\]"):
        sink.put("other", None, torch.ones(5))


def test_sink_can_allocate_its_own_buffers():
    sink = WeightGradAccumulator()
    sink.bind_new({"b": (3,)}, torch.float64, torch.device("cpu"))
    sink.put("b", None, torch.ones(4, 3, dtype=torch.float64))
    assert sink.main_grads["b"].tolist() == [4.0, 4.0, 4.0]


def test_shapes_that_do_not_fit_show_both():
    with pytest.raises(AssertionError, match=r"main_grad torch.Size\(\[4, 5\]\), dy torch.Size\(\[8, 5\]\)"):
        accumulate_wgrad(torch.zeros(4, 5), torch.zeros(8, 4), torch.zeros(8, 5))
