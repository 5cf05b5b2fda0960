"""A layer's experts against DeepSeek-V3's of transformers: sigmoid, groups, a bias where experts are chosen, a shared
expert; outputs and every gradient in fp64 to 1e-10, with transformers' casts to fp32 replaced."""

import pytest
import torch

from tests.harness.tiny_models import SWIGLU, tiny_model
from tests.parity.test_hugging_face_folders import EverythingInFp64

transformers = pytest.importorskip("transformers")
EXPERTS, WIDTH, SHARED, SEED = 32, 24, 2, 5
OURS = {
    "num_experts": EXPERTS,
    "moe_ffn_hidden_size": WIDTH,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": SHARED * WIDTH,
}


def their_layer():
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        n_shared_experts=SHARED,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    module = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config).double()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        bias = torch.randint(-32, 32, (EXPERTS,), generator=generator)
        module.gate.e_score_correction_bias.copy_(bias / 64)  # exact in fp32, which ours is in
    return module


def pairs(theirs):
    """Our names -> their tensors (gradients likewise), a gated matrix as gate, then up."""
    shared = theirs.shared_experts
    return {
        "router.weight": [theirs.gate.weight],
        "experts.linear_fc1.weight": [theirs.experts.gate_up_proj],
        "experts.linear_fc2.weight": [theirs.experts.down_proj],
        "shared_experts.linear_fc1.weight": [shared.gate_proj.weight, shared.up_proj.weight],
        "shared_experts.linear_fc2.weight": [shared.down_proj.weight],
    }


def test_outputs_and_gradients_are_those_of_deepseek_v3():
    theirs, model = their_layer(), tiny_model(num_layers=1, **SWIGLU, **OURS)
    layer = model.decoder.layers["0"].mlp
    with torch.no_grad():
        layer.router.expert_bias.copy_(theirs.gate.e_score_correction_bias)
        for name, tensors in pairs(theirs).items():
            layer.get_parameter(name).copy_(torch.cat(tensors))
    x = torch.randn(16, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    ours_x, their_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = layer(ours_x)
    with EverythingInFp64():
        expected = theirs(their_x)
        expected.square().sum().backward()
    found.square().sum().backward()
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
    assert (ours_x.grad - their_x.grad).abs().max() < 1e-10 * their_x.grad.abs().max()
    grads = model.summed_grads()
    for name, tensors in pairs(theirs).items():
        wanted = torch.cat([tensor.grad for tensor in tensors])
        assert wanted.any(), name
        difference = (grads[f"decoder.layers.0.mlp.{name}"] - wanted).abs().max()
        assert difference < 1e-10 * wanted.abs().max(), name
