"""Recomputing changes memory, never a bit of the gradients; masks do not depend on it nor on microbatch order."""

import pytest
import torch

from megatron.estimate.observe import ObservedPart, observe
from tests.harness.tiny_models import (
    GQA,
    ROPE,
    SWIGLU,
    backward_microbatch,
    tiny_batch,
    tiny_config,
    tiny_model,
)

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
MODES = {
    "uniform_1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform_2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block_2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "moe_act")},
}
ALL = ("core_attn", "layernorm", "mlp", "moe", "shared_experts")
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_layer_freq": "[0,1,1]",
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2),
    "moe_z_loss_coeff": 0.1,
    "moe_input_jitter_eps": 0.1,
}


def train(order=(0, 1, 2), dtype=torch.float32, **flags):
    """(losses, gradients) of three microbatches, forward of each followed by its backward, in this order."""
    model = tiny_model(num_layers=3, params_dtype=dtype, **flags)
    model.bind_new_grads(torch.float32)
    puts = []
    put = model.context.grads.put
    model.context.grads.put = lambda key, *of: (puts.append(key), put(key, *of))
    losses = {i: backward_microbatch(model, tiny_batch(i), iteration=5, index=i) for i in order}
    keys = [key for meta in model.param_meta.values() for key in meta.grad_keys]
    assert sorted(puts) == sorted(keys * len(order)), "every key once a microbatch"
    return losses, model.context.grads.main_grads


def kept_bytes(**flags):
    """What a forward leaves in the hands of its graph."""
    model = tiny_model(**{"num_layers": 3, "attention_backend": "unfused", **flags})
    tokens, labels, positions = tiny_batch()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens, positions, labels=labels)
    return sum(seen.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {**DROPOUT, **ROPE},
        {**DROPOUT, "attention_backend": "unfused"},
        {"dtype": torch.bfloat16, **DROPOUT},
    ],
    ids=["plain", "dropout", "exact_dropout", "bf16_dropout"],
)
def test_bit_identical(mode, flags):
    losses, grads = train(**flags)
    again_losses, again = train(**flags, **MODES[mode])
    assert all(torch.equal(losses[i], again_losses[i]) for i in losses)
    for key in grads:
        assert torch.equal(grads[key], again[key]), key


@pytest.mark.parametrize("mode", [{}, MODES["uniform_1"], MODES["selective"]])
def test_backward_after_other_forwards(mode):
    """As a pipeline runs: all forwards, then backwards, the context's clock having moved on."""
    expected_losses, expected = train(**DROPOUT)
    model = tiny_model(num_layers=3, params_dtype=torch.float32, **DROPOUT, **mode)
    losses = []
    for i in range(3):
        tokens, labels, positions = tiny_batch(i)
        model.context.begin_microbatch(5, i, i)
        losses.append(model(tokens, positions, labels=labels).mean())
    model.context.begin_microbatch(99, 99, 99)
    for loss in losses:
        loss.backward()
    assert (model.context.iteration, model.context.microbatch) == (99, 99)
    for i, loss in enumerate(losses):
        assert torch.equal(loss, expected_losses[i])
    for key, grad in model.context.grads.main_grads.items():
        assert torch.equal(grad, expected[key]), key


@pytest.mark.parametrize("modules", [*((one,) for one in ALL), ALL], ids=" ".join)
@pytest.mark.parametrize(
    "more", [{}, {**SWIGLU, **ROPE, **GQA, "dtype": torch.bfloat16}], ids=["gpt", "llama"]
)
def test_modules_of_layers_with_experts(modules, more):
    """Split or not, with the same bits; what layers count is counted once."""
    flags = {**EXPERTS, **DROPOUT, **more}
    dtype = flags.pop("dtype", torch.float32)
    found = []
    for mode in ({}, {"recompute_granularity": "selective", "recompute_modules": modules}):
        for split in (False, True):
            model = tiny_model(num_layers=3, params_dtype=dtype, **flags, **mode)
            model.bind_new_grads(torch.float32)
            sink = model.context.grads
            for index in range(2):
                with sink.backward(index, split=split):
                    backward_microbatch(model, tiny_batch(index), iteration=5, index=index)
            for index in range(2 if split else 0):
                sink.flush(index)
            found.append(model.summed_grads() | model.context.counts.totals)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, value in found[0].items():
            assert torch.equal(value, other[key]), key


def kept_by_experts(*modules):
    """Bytes between forward and backward, whoever keeps them."""
    mode = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    model = tiny_model(num_layers=3, **{**EXPERTS, "moe_input_jitter_eps": None}, **mode)
    tokens, labels, positions = tiny_batch()
    part = ObservedPart(
        model, lambda _: model(tokens, positions, labels=labels).mean(), None, True, torch.float64
    )
    return observe(part).kept_bytes


def test_each_module_drops_what_it_says():
    """By what is there: fp64, 48 tokens, three layers of width 32."""
    everything, token = kept_by_experts(), 48 * 8
    copies = 2 * 2 * 32 * 8  # of weights and biases of the norms before experts
    assert everything - kept_by_experts("layernorm") == 6 * 32 * token - copies
    assert everything - kept_by_experts("mlp") == 64 * token
    shared = 2 * (40 + 32 + 1) * token  # two layers: into the activation, out of it, the gate
    assert everything - kept_by_experts("shared_experts") == shared
    assert everything - kept_by_experts("moe") > shared + 2 * 2 * 48 * token  # two experts a token
    assert kept_by_experts("moe", "shared_experts") == kept_by_experts("moe")


def test_somebodys_hook_on_a_norm_is_kept():
    """What a hook has made of a norm's output is not what the norm would give again."""
    grads = []
    for mode in ({}, {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}):
        model = tiny_model(**mode)
        norm = model.decoder.layers["0"].pre_mlp_layernorm
        norm.register_forward_hook(lambda module, args, y: y * 2.0)
        backward_microbatch(model, tiny_batch())
        grads.append(model.summed_grads())
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_masks_do_not_depend_on_the_order():
    forward, _ = train(**DROPOUT)
    backward, _ = train(order=(2, 0, 1), **DROPOUT)
    assert all(torch.equal(forward[i], backward[i]) for i in range(3))
    assert not torch.equal(forward[0], train()[0][0])


@pytest.mark.parametrize("mode", MODES)
def test_fewer_tensors_are_kept(mode):
    assert kept_bytes(**MODES[mode]) < (0.95 if mode in ("layernorm", "mlp") else 0.8) * kept_bytes()


def test_frozen_embedding_still_trains_recomputed_layers():
    model = tiny_model(untie_embeddings_and_output_weights=True, **MODES["uniform_1"])
    model.embedding.requires_grad_(False)
    backward_microbatch(model, tiny_batch())
    assert model.context.grads.main_grads["decoder.layers.0.mlp.linear_fc1.weight"].abs().max() > 0


def test_chunks():
    def of(layers, **mode):
        return tiny_config(recompute_granularity="full", **mode).recompute_chunks(layers)

    assert of(5, recompute_method="uniform", recompute_num_layers=2) == [
        (0, 2, True),
        (2, 4, True),
        (4, 5, True),
    ]
    assert of(3, recompute_method="block", recompute_num_layers=2) == [
        (0, 1, True),
        (1, 2, True),
        (2, 3, False),
    ]
    assert of(1, recompute_method="block", recompute_num_layers=4) == [(0, 1, True), (1, 1, False)]
    assert tiny_config().recompute_chunks(3) == [(0, 3, False)]


def test_a_frozen_model_below_a_trained_head_can_be_recomputed():
    flags = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    grads = []
    for more in ({}, flags):
        model = tiny_model(untie_embeddings_and_output_weights=True, **more)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("decoder.layers.1"))
        backward_microbatch(model, tiny_batch())
        grads.append({name: grad.clone() for name, grad in model.summed_grads().items()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
    assert grads[0]["decoder.layers.0.mlp.linear_fc1.weight"].any()
    assert not grads[0]["decoder.layers.1.mlp.linear_fc1.weight"].any()
