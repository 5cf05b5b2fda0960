"""Data parallel training of a GPT against a plain PyTorch loop on one process, over ten clipped AdamW steps.

The loop below sees every sample itself and uses torch.optim.AdamW and clip_grad_norm_; ours spreads the same
samples over 1, 2 or 4 ranks with 4, 2 or 1 microbatches each.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import VOCAB, reference_of, tiny_batch, tiny_config

STEPS = 10
GLOBAL_MICROBATCHES = 4
CLIP = 0.5  # below the first norms, so that it acts
FROZEN = "decoder.layers.0.mlp.linear_fc1.weight"
BUCKETS = {"ddp_bucket_size": 4000}  # about ten buckets
VARIANTS = {
    "tied": {},
    "untied": {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"},
}


def build(dtype, flags, frozen):
    model = GPTModel(tiny_config(**flags), padded_vocab_size=VOCAB, seed=5, params_dtype=dtype)
    if frozen:
        dict(model.named_parameters())[FROZEN].requires_grad_(False)
    return model


def microbatch(step, index):
    """Two global batches in turn, so that ten steps learn something."""
    return tiny_batch(seed=100 * (step % 2) + index, batch=2)


def train(ctx, dtype, flags, *, overlap=True, frozen=False, buckets=BUCKETS, steps=STEPS):
    """Ours: (this rank's loss sums by step, gradient norms, final weights, first step's gradients)."""
    ps = ctx.ps
    model = build(dtype, flags, frozen)
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, **buckets)
    ddp = DistributedDataParallel(model, ps, config, model.param_meta, model.context.grads)
    optimizer = build_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1), ddp.buffer, ps)
    num_microbatches = GLOBAL_MICROBATCHES // ps.dp_size
    losses, norms, first = [], [], {}
    for step in range(steps):
        ddp.begin_step(num_microbatches)
        total = 0.0
        for index in range(num_microbatches):
            global_index = index * ps.dp_size + ps.dp_rank
            model.context.begin_microbatch(step, index, global_index)
            tokens, labels, positions = microbatch(step, global_index)
            loss = ddp(tokens, positions, None, labels=labels).mean()
            loss.backward()
            total += loss.item()
        ddp.finish()
        if step == 0:
            first = {name: ddp.buffer.main_grad(name).clone() for name in ddp.buffer.names}
        stats = optimizer.prepare(GLOBAL_MICROBATCHES)
        optimizer.step(GLOBAL_MICROBATCHES, clip_coefficient(stats.norm, CLIP))
        losses.append(total)
        norms.append(stats.norm)
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}, first


def train_reference(dtype, flags, frozen=False):
    reference = reference_of(build(dtype, flags, frozen=False))
    parameters = dict(reference.named_parameters())
    if frozen:
        parameters.pop(FROZEN).requires_grad_(False)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2)
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        adam.zero_grad()
        total = 0.0
        for index in range(GLOBAL_MICROBATCHES):
            tokens, labels, _ = microbatch(step, index)
            loss = reference(tokens, labels=labels).mean()
            loss.backward()
            total += loss.item()
        if step == 0:
            first = {name: p.grad.clone() for name, p in parameters.items()}
        for p in parameters.values():
            p.grad /= GLOBAL_MICROBATCHES
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP).item())
        adam.step()
        losses.append(total)
    return losses, norms, {name: p.detach() for name, p in reference.named_parameters()}, first


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.grid) for world in (1, 4))])
def test_ten_clipped_steps_equal_the_plain_loop(world):
    def body(ctx):
        results = {}
        for name, flags in VARIANTS.items():
            results[name] = train(ctx, torch.float64, flags)
        results["frozen"] = train(ctx, torch.float64, VARIANTS["tied"], frozen=True)
        return results

    by_rank = run_ranks(body, world)
    for name in by_rank[0]:
        expected_losses, expected_norms, weights, grads = train_reference(
            torch.float64, VARIANTS.get(name, {}), frozen=name == "frozen"
        )
        losses = [sum(parts) for parts in zip(*(results[name][0] for results in by_rank), strict=True)]
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert expected_losses[-1] < 0.95 * expected_losses[0]
        assert max(expected_norms) > CLIP
        for results in by_rank:
            _, norms, our_weights, our_grads = results[name]
            assert norms == pytest.approx(expected_norms, rel=1e-10)
            assert our_weights.keys() == weights.keys()
            assert our_grads.keys() == grads.keys()
            for key, grad in grads.items():
                torch.testing.assert_close(our_grads[key], grad, rtol=1e-10, atol=1e-10)
            for key, weight in weights.items():
                torch.testing.assert_close(our_weights[key], weight, rtol=1e-9, atol=1e-10)
                assert torch.equal(our_weights[key], by_rank[0][name][2][key])  # replicas never drift


@pytest.mark.grid
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_when_repeated_and_overlapped_or_not(world, dtype):
    def body(ctx):
        runs = {
            "first": train(ctx, dtype, VARIANTS["tied"]),
            "again": train(ctx, dtype, VARIANTS["tied"]),
            "not overlapped": train(ctx, dtype, VARIANTS["tied"], overlap=False),
            "one bucket": train(ctx, dtype, VARIANTS["tied"], buckets={}),
        }
        return {name: (losses, norms, weights) for name, (losses, norms, weights, _) in runs.items()}

    for runs in run_ranks(body, world):
        losses, norms, weights = runs.pop("first")
        for name, (other_losses, other_norms, other_weights) in runs.items():
            assert (other_losses, other_norms) == (losses, norms), name
            for key, weight in weights.items():
                assert torch.equal(other_weights[key], weight), (name, key)
