"""A layer's halves and the model's ends as few Functions: how many nodes of autograd, and the bits of their modules."""

import copy

import pytest
import torch
from torch import nn

from tests.harness.tiny_models import GQA, ROPE, SEQ, VARIANTS, backward_microbatch, tiny_batch, tiny_model
from tools.host_time import nodes_behind

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
# By variant: nodes of a layer's graph, Functions in Python among them. Each node costs a step a few microseconds a
# layer and microbatch, each Function ten.
GRAPHS = {
    "gpt": ({}, 1, 1),
    "bf16 and dropout": ({"params_dtype": torch.bfloat16, "hidden_dropout": 0.2}, 1, 1),
    "gqa": (GQA, 4, 3),
    "gated, RMSNorm": ({"swiglu": True, "normalization": "RMSNorm"}, 1, 1),
    "rope": (ROPE, 12, 5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_nodes_and_functions_of_a_layer(name):
    flags, nodes, functions = GRAPHS[name]
    model = tiny_model(**{"params_dtype": torch.float32, **flags})
    layer = model.decoder.layers["0"]
    x = torch.randn(SEQ, 2, 32).to(next(layer.parameters()).dtype).requires_grad_()
    angles = model.rotary(SEQ, x) if model.rotary is not None else None
    assert nodes_behind(layer(x, None, angles), x) == (nodes, functions)


@pytest.mark.parametrize(
    "flags", [{}, {"untie_embeddings_and_output_weights": True, "embedding_multiplier": 3.0}]
)
def test_a_model_is_a_function_each_layer_and_each_end(flags):
    model = tiny_model(params_dtype=torch.float32, **flags)
    tokens = torch.zeros(2, SEQ, dtype=torch.int64)
    positions = torch.arange(SEQ).expand(2, -1)
    losses = model(tokens, positions, labels=tokens)
    assert losses.shape == (2, SEQ)
    assert nodes_behind(losses, tokens) == (2 + len(model.decoder.layers),) * 2


def test_a_second_backward_through_one_loss_is_an_error():
    model, tokens = tiny_model(params_dtype=torch.float32), torch.zeros(2, SEQ, dtype=torch.int64)
    model.bind_new_grads()
    loss = model(tokens, torch.arange(SEQ).expand(2, -1), labels=tokens).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def gradients(model, split=False):
    """(loss, all gradients) of a microbatch in `backward` mode or split into B and W."""
    sink = model.context.grads
    model.bind_new_grads()
    with sink.backward(0, split=split):
        loss = backward_microbatch(model, tiny_batch())
    if split:
        sink.flush(0)
    return loss, model.summed_grads()


def same(first, second):
    loss, grads = first
    other_loss, others = second
    assert torch.equal(loss, other_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, others[name]), name


LAYER = "decoder.layers.1"
PARTS = (
    f"{LAYER}.input_layernorm",
    f"{LAYER}.self_attention",
    f"{LAYER}.self_attention.linear_qkv",
    f"{LAYER}.self_attention.core_attention",
    f"{LAYER}.mlp.linear_fc2",
    "embedding.word_embeddings",
    "decoder.final_layernorm",
)
# Those whose kernels, casts or masks differ.
MODELS = {
    "gpt": DROPOUT,
    "one Function": {"hidden_dropout": 0.2},
    "llama": VARIANTS["llama"],
    "qk_rmsnorm": VARIANTS["qk_rmsnorm_gqa_rope"],
    "bf16": {"params_dtype": torch.bfloat16, "fp32_residual_connection": True, **DROPOUT},
    "keeps output": {"keep_activation_output": True},
}


@pytest.mark.parametrize("model_name", MODELS)
def test_a_part_that_somebody_listens_to_runs_as_a_module_with_the_same_bits(model_name):
    model = tiny_model(**{"params_dtype": torch.float32, **MODELS[model_name]})
    expected = gradients(model)
    same(expected, gradients(model, split=True))
    for name in PARTS:
        heard = []
        part = model.get_submodule(name)
        for listen in (part.register_forward_pre_hook, part.register_forward_hook):
            handle = listen(lambda *_, heard=heard: heard.append(1))
            same(expected, gradients(model))
            handle.remove()
        assert len(heard) == 2, name
    heard = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: heard.append(module) if module is model.decoder.layers["0"].mlp else None
    )
    same(expected, gradients(model))
    handle.remove()
    assert len(heard) == 1


@pytest.mark.parametrize("flags", [{}, VARIANTS["llama"]])
def test_the_output_of_an_activation_kept_or_computed_again(flags):
    """The same bits; kept, it is computed once a layer."""
    found, calls = [], []
    for keeps in (False, True):
        model = tiny_model(params_dtype=torch.float32, keep_activation_output=keeps, **flags)
        count = len(calls)
        for layer in model.decoder.layers.values():
            inner = layer.mlp.activation
            listened = inner._replace(forward=lambda x, inner=inner: (calls.append(1), inner.forward(x))[1])
            layer.mlp.activation = layer._halves.mlp.activation = listened
        found.append(gradients(model))
        assert len(calls) - count == len(model.decoder.layers) * (1 if keeps else 2)
    same(*found)


class Doubled(nn.Module):
    """Somebody's layer in the place of ours."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs) * 2.0


@pytest.mark.parametrize("name", [*PARTS, "output_layer"])
def test_a_replaced_part_is_called(name):
    model = tiny_model(params_dtype=torch.float32, untie_embeddings_and_output_weights=True)
    plain, _ = gradients(model)
    owner, _, child = name.rpartition(".")
    part = Doubled(model.get_submodule(name))
    setattr(model.get_submodule(owner), child, part)
    if child == "linear_fc2":
        part.forward = lambda *args, **kwargs: Doubled.forward(part, *args, **kwargs)
    loss, _ = gradients(model)
    assert part.calls == 1
    assert not torch.equal(loss, plain)


def test_a_forward_of_its_own_and_a_copied_layer_are_noticed():
    model = tiny_model(params_dtype=torch.float32)
    expected = gradients(model)
    layer = copy.deepcopy(model.decoder.layers["0"])
    x = torch.randn(SEQ, 1, 32)
    with torch.no_grad():
        before = layer(x)
        layer.mlp.forward = lambda x: torch.zeros_like(x)
        assert not torch.equal(layer(x), before)
        assert torch.equal(model.decoder.layers["0"](x), before)
    same(expected, gradients(model))


@pytest.mark.parametrize(
    "kept", ["linear_fc1.weight", "linear_fc2.bias", "linear_qkv", "input_layernorm", "nothing"]
)
def test_frozen_parameters_put_nothing(kept):
    """What is trained has the gradient that it has in modules, also where no input needs one."""
    found = []
    for hooked in (False, True):
        model = tiny_model(params_dtype=torch.float32, untie_embeddings_and_output_weights=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(kept in name or "output_layer" in name)
        if hooked:
            for layer in model.decoder.layers.values():
                layer.mlp.register_forward_hook(lambda *_: None)
        puts, sink = [], model.context.grads
        model.bind_new_grads()
        put = sink.put
        sink.put = lambda key, x, dy, puts=puts, put=put: (puts.append(key), put(key, x, dy))
        loss = backward_microbatch(model, tiny_batch())
        found.append((loss, model.summed_grads(), puts))
    (loss, grads, puts), (other_loss, others, other_puts) = found
    assert puts == other_puts
    assert all(kept in key or "output_layer" in key for key in puts)
    same((loss, grads), (other_loss, others))


def test_a_layer_within_a_transform_of_torch_func_is_an_error():
    """Functions are entered below torch's own `apply`, which asks whether a transform is under way."""
    layer = tiny_model(params_dtype=torch.float32).decoder.layers["0"]
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: layer(x).sum())(torch.randn(SEQ, 1, 32))
