"""Norms against torch's own, every reduced precision included."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.device import current_device
from megatron.core.param_meta import GradRoute, InitKind, Region
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.norm import Norm
from megatron.core.transport.parallel_state import DEFAULT_TIMEOUT, Group
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.tiny_models import tiny_config

SIZE = 24


def make(dtype=torch.float64, **flags):
    sink = WeightGradAccumulator()
    factory = LayerFactory(sink=sink, dtype=dtype, device=torch.device("cpu"))
    norm = Norm(tiny_config(**flags), SIZE, factory.at("n"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    wide = torch.promote_types(dtype, torch.float32)
    sink.bind_new({name: meta.global_shape for name, meta in norm.meta.items()}, wide, torch.device("cpu"))
    return norm, sink.main_grads


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.bfloat16, 0.05)])
def test_against_torch(kind, one_plus, dtype, tolerance):
    norm, grads = make(dtype, normalization=kind, apply_layernorm_1p=one_plus)
    x = torch.randn(5, 3, SIZE).to(dtype).requires_grad_()
    y = norm(x)
    dy = torch.randn(5, 3, SIZE).to(dtype)
    y.backward(dy)
    rx = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    scale = weight + 1 if one_plus else weight
    if kind == "RMSNorm":
        ry = F.rms_norm(rx, (SIZE,), scale, norm.eps)
    else:
        bias = norm.bias.detach().double().requires_grad_()
        ry = F.layer_norm(rx, (SIZE,), scale, bias, norm.eps)
    ry.backward(dy.double())
    assert y.dtype == dtype
    for ours, theirs in ((y, ry), (x.grad, rx.grad), (grads["n.weight"], weight.grad)):
        assert (ours.double() - theirs).abs().max() < tolerance * theirs.abs().max()
    if kind == "LayerNorm":
        assert (grads["n.bias"].double() - bias.grad).abs().max() < tolerance * bias.grad.abs().max()
    assert norm.weight.grad is None


def test_meta():
    plain, _ = make()
    meta = plain.meta["n.weight"]
    assert (meta.init, meta.route, meta.decay) == (InitKind.ONES, GradRoute.SINK, False)
    shifted, _ = make(apply_layernorm_1p=True)
    assert shifted.meta["n.weight"].init is InitKind.ZEROS
    rms, _ = make(normalization="RMSNorm")
    assert set(rms.meta) == {"n.weight"}


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_wide_residual_narrow_weights(kind):
    norm, _ = make(torch.bfloat16, normalization=kind)
    x = torch.randn(4, 2, SIZE, requires_grad=True)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    # The fp32 input is not rounded before it is normalised.
    shifted = norm(x.detach() + 1000.0) if kind == "LayerNorm" else y
    assert (shifted.float() - y.float()).abs().max() < 0.05


@pytest.mark.parametrize(("sp", "over_heads", "partial"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_regions_over_tensor_ranks(sp, over_heads, partial):
    """Whole on every rank; each has a part of the gradient where ranks see other rows."""
    group = Group("tp", (4, 5), 1, "gloo", None, current_device(kind="cpu"), DEFAULT_TIMEOUT)
    factory = LayerFactory(
        sink=WeightGradAccumulator(),
        dtype=torch.float64,
        device=torch.device("cpu"),
        tp=TensorParallel(group, bool(sp)),
    )
    norm = Norm(tiny_config(), SIZE, factory.at("n"), over_heads=bool(over_heads))
    for meta in norm.meta.values():
        assert meta.regions == (Region((0,), (0,), (SIZE,), copies=2, partial=partial),)
