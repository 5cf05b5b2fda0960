"""Experts against plain PyTorch in fp64: routes as integers, loss, every gradient and ten clipped AdamW steps to
1e-10."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer.experts.counted import TOKENS
from megatron.core.transformer.experts.expert_bias import ExpertBiases
from tests.harness.reference_moe import ReferenceMoe
from tests.harness.tiny_models import SWIGLU, backward_microbatch, reference_of, tiny_batch, tiny_model

EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 24}
SIGMOID = {"moe_router_score_function": "sigmoid"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
ROUTERS = {
    "softmax": {},
    "softmax_biases": {"add_bias_linear": True, "swiglu": False},
    "pre_softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    "k1_pre": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "k_all": {"moe_router_topk": 8},
    "groups": {**GROUPS, "moe_router_topk": 4},
    "sigmoid": {**SIGMOID, "moe_router_topk": 3},
    "sigmoid_k1": {**SIGMOID, "moe_router_topk": 1},
    "sigmoid_groups": {**SIGMOID, **GROUPS, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5},
    "bias": {**SIGMOID, **GROUPS, "moe_router_topk": 4, "moe_router_enable_expert_bias": True},
    "shared": {"moe_shared_expert_intermediate_size": 40},
    "shared_gate": {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    "every_second": {"moe_layer_freq": "[0,1]", "moe_router_dtype": "fp64"},
}
AUX, SEQ_AUX = (
    {"moe_aux_loss_coeff": (0.3,)},
    {
        "moe_router_load_balancing_type": ("seq_aux_loss",),
        "moe_aux_loss_coeff": (0.2,),
    },
)
BOTH = {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2)}
GLOBAL = {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_aux_loss_coeff": (0.3,)}
LOSSES = {
    "none": {},
    "aux": AUX,
    "seq": SEQ_AUX,
    "z": {"moe_z_loss_coeff": 0.05},
    "all": {**BOTH, "moe_z_loss_coeff": 0.01},
}
DROPPING = {
    "dropless": {},
    "probs": {"moe_expert_capacity_factor": 1.0},
    "position": {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
}
# Every pair of a router with a loss and with a way of dropping.
SETTINGS = sorted(
    {
        (router, list(LOSSES)[(i + j) % len(LOSSES)], list(DROPPING)[j % len(DROPPING)])
        for (i, router), j in itertools.product(enumerate(ROUTERS), range(5))
    }
)
SINKHORN = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_z_loss_coeff": 0.05}
SAMPLE = SETTINGS[::6]
RATE = 1 / 32  # exact in fp32, which biases are, and in fp64


def test_enough_settings():
    assert len(SETTINGS) >= 40


def compare_steps(flags, microbatches=1):
    model = tiny_model(**{**SWIGLU, **EXPERTS, **flags})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10 if "router" in name else 4 if ".mlp." in name else 1)
    reference = reference_of(model)
    ours, theirs = (
        torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1) for one in (model, reference)
    )
    alone = SimpleNamespace(size=1)
    biases = ExpertBiases([model], RATE, alone)
    for step in range(10):
        model.context.counts.clear()
        total = Counter()
        for layer in reference.decoder.layers:
            if isinstance(layer.mlp, ReferenceMoe):
                layer.mlp.seen.clear()
        for index in range(microbatches):
            batch = tiny_batch(seed=microbatches * step + index)
            loss = backward_microbatch(model, batch, index=index)
            expected = reference(batch[0], batch[1]).mean()
            (expected + reference.added()).backward()
            assert abs(loss.item() - expected.item()) < 1e-10, step
            for number, layer in enumerate(reference.decoder.layers):
                if isinstance(layer.mlp, ReferenceMoe):
                    total.update({(number, expert): count for expert, count in enumerate(layer.mlp.counts)})
        for number, layer in enumerate(reference.decoder.layers):
            if isinstance(layer.mlp, ReferenceMoe):
                counts = model.context.counts.totals[number, TOKENS].tolist()
                assert counts == [total[number, expert] for expert in range(len(counts))]
                if layer.mlp.e.biased:
                    mean = sum(counts) / len(counts)
                    moved = [RATE * ((count < mean) - (count > mean)) for count in counts]
                    layer.mlp.router.expert_bias += torch.tensor(moved)
        for name, grad in model.summed_grads().items():
            difference = (grad - reference.get_parameter(name).grad).abs().max()
            assert difference < 1e-10, (step, name, difference)
            model.get_parameter(name).grad = grad.clone()
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (model, reference)]
        assert abs(norms[0] - norms[1]) < 1e-10
        biases.gather()
        biases.step(1.0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for buffer in model.context.grads.main_grads.values():
            buffer.zero_()
    for name, parameter in reference.named_parameters():
        assert (model.get_parameter(name) - parameter).abs().max() < 1e-10, name
    for name, bias in biases.named().items():
        assert torch.equal(bias, reference.get_buffer(name).float()), name
        assert bias.any()


def settings(names):
    return pytest.mark.parametrize(("router", "losses", "dropping"), names)


@settings(SAMPLE)
def test_ten_steps(router, losses, dropping):
    compare_steps(ROUTERS[router] | LOSSES[losses] | DROPPING[dropping])


@pytest.mark.parametrize("topk", [1, 2])
def test_ten_steps_of_sinkhorn(topk):
    compare_steps({**SINKHORN, "moe_router_topk": topk})


@pytest.mark.parametrize("router", ["softmax", "sigmoid_groups"])
def test_the_global_loss_sees_the_mean_of_the_microbatches_so_far(router):
    compare_steps({**ROUTERS[router], **GLOBAL, "moe_expert_capacity_factor": 1.0}, microbatches=3)


@pytest.mark.full
@settings([one for one in SETTINGS if one not in SAMPLE])
def test_ten_steps_of_every_setting(router, losses, dropping):
    compare_steps(ROUTERS[router] | LOSSES[losses] | DROPPING[dropping])
