"""Linear layers on the sink: dgrad by autograd, wgrad by the sink, separable."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.protocols import WeightGradSink
from megatron.core.tensor_parallel.parallel_layers import column_linear, row_linear
from megatron.core.transformer.activations import GELU
from megatron.core.weight_grad import accumulate_wgrad


class RecordingSink:
    """Keeps what is put, computes nothing: a deferring pipeline's view."""

    deferring = True

    def __init__(self):
        self.puts = []

    def put(self, key, x, dy):
        self.puts.append((key, x, dy))

    def done(self, key, microbatch): ...


def make(bias=True):
    torch.manual_seed(0)
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True) if bias else None
    return x, weight, b


@pytest.mark.parametrize("linear", [column_linear, row_linear])
def test_input_gradient_first_weight_gradient_later(linear):
    x, weight, bias = make()
    sink: WeightGradSink = RecordingSink()
    out = linear(x, weight, bias, sink=sink, key="w", bias_key="b")
    dy = torch.randn_like(out)
    out.backward(dy)
    rx, rw, rb = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    F.linear(rx, rw, rb).backward(dy)
    assert torch.equal(out, F.linear(rx, rw, rb))
    torch.testing.assert_close(x.grad, rx.grad, rtol=0, atol=1e-12)
    assert weight.grad is None
    assert bias.grad is None
    assert [key for key, _, _ in sink.puts] == ["w", "b"]
    grads = {"w": torch.zeros_like(weight), "b": torch.zeros_like(bias)}
    for key, put_x, put_dy in sink.puts:
        accumulate_wgrad(grads[key], put_x, put_dy)
    torch.testing.assert_close(grads["w"], rw.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads["b"], rb.grad, rtol=0, atol=1e-12)


def test_activation_is_recomputed_not_kept():
    x, weight, _ = make(bias=False)
    sink = RecordingSink()
    out = row_linear(x, weight, sink=sink, key="w", activation=GELU)
    kept = list(out.grad_fn.saved_tensors)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}
    dy = torch.randn_like(out)
    out.backward(dy)
    rx, rw = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    F.linear(F.gelu(rx), rw).backward(dy)
    torch.testing.assert_close(x.grad, rx.grad, rtol=0, atol=1e-12)
    grad = torch.zeros_like(weight)
    accumulate_wgrad(grad, *sink.puts[0][1:])
    torch.testing.assert_close(grad, rw.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("linear", [column_linear, row_linear])
def test_frozen_weight_reports_nothing(linear):
    x, weight, bias = make()
    weight.requires_grad_(False)
    sink = RecordingSink()
    linear(x, weight, bias, sink=sink, key="w", bias_key="b").sum().backward()
    assert [key for key, _, _ in sink.puts] == ["b"]
    assert x.grad is not None
