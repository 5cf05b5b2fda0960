"""Recomputing changes memory, never a bit of the gradients; masks do not depend on it nor on microbatch order."""

import pytest
import torch

from tests.harness.tiny_models import ROPE, backward_microbatch, tiny_batch, tiny_config, tiny_model

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
MODES = {
    "uniform_1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform_2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block_2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}


def train(order=(0, 1, 2), dtype=torch.float32, **flags):
    """(losses, gradients) of three microbatches, forward of each followed by its backward, in this order."""
    model = tiny_model(num_layers=3, params_dtype=dtype, **flags)
    model.bind_new_grads(torch.float32)
    puts = []
    put = model.context.grads.put
    model.context.grads.put = lambda key, x, dy: (puts.append(key), put(key, x, dy))
    losses = {i: backward_microbatch(model, tiny_batch(i), iteration=5, index=i) for i in order}
    keys = [key for meta in model.param_meta.values() for key in meta.grad_keys]
    assert sorted(puts) == sorted(keys * len(order)), "every key once a microbatch"
    return losses, model.context.grads.main_grads


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


def test_masks_do_not_depend_on_the_order():
    forward, _ = train(**DROPOUT)
    backward, _ = train(order=(2, 0, 1), **DROPOUT)
    assert all(torch.equal(forward[i], backward[i]) for i in range(3))
    assert not torch.equal(forward[0], train()[0][0])


@pytest.mark.parametrize("mode", MODES)
def test_fewer_tensors_are_kept(mode):
    def kept_bytes(**flags):
        model = tiny_model(num_layers=3, attention_backend="unfused", **flags)
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

    assert kept_bytes(**MODES[mode]) < 0.8 * kept_bytes()


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
