"""Edges of models with experts, against plain PyTorch in fp64 (1e-10) or in closed form, and what was reported of other
frameworks (threads of NVIDIA/Megatron-LM, by number): how much losses that balance experts weigh, and what
recomputation does to them.

| edge | where |
|---|---|
| k = all experts, k = 1 | test_reference_moe |
| evaluations, skipped steps, steps taken back | test_counted_once |
| a stage without experts in a pipeline (#3401: it hung) | test_moe_layouts, `first_dense` |
| the global loss on data parallel ranks (#3672) | here, and ten steps of it in test_moe_recompute |
| norms with experts counted by one rank alone (#5916) | test_moe_layouts, test_expert_faults |
| what is not finite | test_expert_faults |
| a rank and experts without tokens, over ranks (#1877) | test_expert_dispatch |
| gradients as many times too large as experts have ranks (#5656, #5956) | test_experts_array |
| experts cut otherwise than dense layers (#6080), sizes lost under FSDP (#1781) | test_experts_array |
| experts loaded behind another split (#924) | test_checkpoint_matrix |
| a router of another dtype in sharded pipelines (#1643) | here |
| all others | here |
"""

import math

import numpy as np
import pytest
import torch

from megatron.core.transformer.experts.counted import DROPPED, TOKENS
from megatron.core.transformer.experts.routing import chosen_experts
from tests.harness.layouts import NO_DROPOUT, Layout, Run, assembled, train_run
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import (
    SWIGLU,
    backward_microbatch,
    reference_of,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from tests.parity.test_moe_recompute import Joined

EXPERTS = {**SWIGLU, "num_experts": 8, "moe_ffn_hidden_size": 24}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SHARDED = tuple("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params".split())
ROUTER_DTYPE = [
    *"--num-layers 4 --bf16 --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-dtype fp32 --swiglu".split(),
    *("--disable-bias-linear", *NO_DROPOUT),
]
BATCH, TOKENS_OF_IT = tiny_batch(), 48


def model_of(bias=None, spread=10.0, **flags):
    """bias: of every router's experts. spread: what routers' weights are multiplied by."""
    model = tiny_model(**EXPERTS, **flags)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(spread if "router" in name else 4 if ".mlp." in name else 1)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.tensor(bias))
    return model


def counts_of(model, name=TOKENS):
    return [total.tolist() for (_, counted), total in model.context.counts.totals.items() if counted == name]


def agrees(model, batch=BATCH):
    """Loss and every gradient are those of plain PyTorch. Returns the gradients."""
    reference = reference_of(model)
    loss, expected = backward_microbatch(model, batch), reference(batch[0], batch[1]).mean()
    (expected + reference.added()).backward()
    assert abs(loss.item() - expected.item()) < 1e-10
    grads = model.summed_grads()
    for name, grad in grads.items():
        assert (grad - reference.get_parameter(name).grad).abs().max() < 1e-10, name
    return grads


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    model = model_of([-9.0, *[0.0] * 7], **BIASED)
    grads = agrees(model)
    assert [counts[0] for counts in counts_of(model)] == [0.0, 0.0]
    for name, grad in grads.items():
        if ".experts." in name:
            assert grad.flatten(1).any(1).tolist() == [False, *[True] * 7]


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_all_tokens_to_one_expert(capacity):
    more = {"moe_expert_capacity_factor": capacity, "moe_router_topk": 1}
    model = model_of([*[0.0] * 5, 9.0, 0.0, 0.0], **BIASED, **more)
    agrees(model)
    room = TOKENS_OF_IT if capacity is None else math.ceil(TOKENS_OF_IT / 8)
    assert counts_of(model) == [[0.0] * 5 + [room, 0.0, 0.0]] * 2
    dropped = [] if capacity is None else [[0.0] * 5 + [TOKENS_OF_IT - room, 0.0, 0.0]] * 2
    assert counts_of(model, DROPPED) == dropped


def test_fewer_tokens_than_experts_and_one_sequence():
    model = model_of(moe_aux_loss_coeff=(0.3,))
    agrees(model, tiny_batch(batch=1, seq=3))
    assert [sum(counts) for counts in counts_of(model)] == [6, 6]
    assert min(map(min, counts_of(model))) == 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_room_for_one_token(policy):
    model = model_of(moe_expert_capacity_factor=0.01, moe_token_drop_policy=policy)
    agrees(model)
    assert max(map(max, counts_of(model))) == 1


def test_room_for_more_than_all_tokens_is_room_for_all():
    plain, roomy = model_of(), model_of(moe_expert_capacity_factor=1000.0)
    for model in (plain, roomy):
        backward_microbatch(model, BATCH)
    assert counts_of(roomy) == counts_of(plain)
    assert not any(map(any, counts_of(roomy, DROPPED)))
    assert all(map(torch.equal, plain.summed_grads().values(), roomy.summed_grads().values()))


@pytest.mark.parametrize(
    "more", [{}, {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"}]
)
def test_equal_logits_go_to_the_lowest_experts(more):
    model = model_of(spread=0.0, **more)
    agrees(model)
    assert counts_of(model) == [[TOKENS_OF_IT] * 2 + [0.0] * 6] * 2


def test_equal_logits_drop_the_latest_tokens():
    model = model_of(spread=0.0, moe_expert_capacity_factor=1.0)
    agrees(model)
    assert counts_of(model) == [[12] * 2 + [0.0] * 6] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "more", [{}, {"moe_expert_capacity_factor": 1.0}, {"moe_router_load_balancing_type": ("sinkhorn",)}]
)
def test_logits_that_are_not_finite_end_in_a_loss_that_is_not(bad, more):
    """No crash, no endless loop, and nothing that hides them: each token has its k experts, and the step is refused."""
    model = model_of(**more)
    with torch.no_grad():
        model.get_parameter("decoder.layers.0.mlp.router.weight")[3, 5] = bad
    assert not torch.isfinite(backward_microbatch(model, BATCH))
    wanted = [*counts_of(model), *counts_of(model, DROPPED)]
    assert sum(map(sum, wanted)) == 2 * 2 * TOKENS_OF_IT


@pytest.mark.parametrize("score", [{}, {"moe_router_score_function": "sigmoid"}])
def test_all_groups_are_no_groups(score):
    grouped = tiny_config(**EXPERTS, **score, moe_router_num_groups=2, moe_router_group_topk=2)
    logits = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(
        chosen_experts(grouped, logits, None),
        chosen_experts(tiny_config(**EXPERTS, **score), logits, None),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_a_bias_that_makes_chosen_scores_negative():
    """Experts are chosen by scores of which all are below 0, and weighed by those without the bias."""
    model = model_of([-3.0, -2.5, -2.0, -2.5, -3.0, -2.2, -2.8, -2.1], **BIASED, moe_router_topk=3)
    agrees(model)
    grouped = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
    agrees(model_of([-3.0, -2.5, -2.0, -2.5, -3.0, -2.2, -2.8, -2.1], **BIASED, **grouped))


def test_logits_in_fp32_choose_as_fp32_does_and_16_bits_do_not():
    x = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    chosen = {}
    for dtype in (None, "fp32"):
        model = tiny_model(
            **{**EXPERTS, "num_experts": 64}, moe_router_dtype=dtype, params_dtype=torch.bfloat16
        )
        router = model.decoder.layers["0"].mlp.router
        chosen[dtype] = router(x).experts
    logits = (x.double() @ router.weight.double().t()).flatten(0, 1)
    exact = chosen_experts(model.config, logits, None)[0]
    assert torch.equal(chosen["fp32"], exact)
    flipped = (chosen[None] != exact).any(1).sum().item()
    assert 0 < flipped < len(exact) / 4


def test_thread_5798_losses_of_several_sequences_weigh_all_tokens():
    """--calculate-per-token-loss: a microbatch's losses count once for each of its tokens, also by sequence."""
    both = {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.3, 0.2)}
    model = model_of(calculate_per_token_loss=True, moe_z_loss_coeff=0.05, **both)
    reference = reference_of(model)
    tokens, labels, positions = BATCH
    model(tokens, positions, None, labels=labels).sum().backward()
    (reference(tokens, labels).sum() + TOKENS_OF_IT * reference.added()).backward()
    for name, grad in model.summed_grads().items():
        assert (grad - reference.get_parameter(name).grad).abs().max() < 1e-10, name


@pytest.mark.parametrize("more", [{"recompute_granularity": "selective", "recompute_modules": ("moe",)},
                                  {"recompute_granularity": "full", "recompute_method": "uniform"}])  # fmt: skip
def test_threads_1478_and_1585_recomputation_doubles_no_loss(more):
    """Neither what is logged (#1478) nor what is differentiated (#1585)."""
    losses = {
        "moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.3, 0.2),
    }
    plain, again = (
        model_of(**losses, moe_z_loss_coeff=0.05),
        model_of(**losses, moe_z_loss_coeff=0.05, **more),
    )
    for model in (plain, again):
        agrees(model)
    ours, theirs = again.context.counts.totals, plain.context.counts.totals
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(map(torch.equal, again.summed_grads().values(), plain.summed_grads().values()))


# --- what losses weigh on ranks

WORDS = [
    *"--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24 --swiglu --disable-bias-linear --fp64".split(),
    *"--position-embedding-type rope --moe-router-load-balancing-type".split(),
]
ROUTER = "decoder.layers.1.mlp.router.weight"
PER_TOKEN = "--calculate-per-token-loss"
TP = Layout(tp=2, sp=True)
CASES = {
    "3672": ("global_aux_loss", Layout(dp=2), (), False),
    "3672, of a mean over tokens": ("global_aux_loss", Layout(dp=2), (PER_TOKEN,), False),
    "5047": ("aux_loss", TP, (PER_TOKEN,), False),
    "5047, by sequence": ("seq_aux_loss", TP, (PER_TOKEN,), True),
    "7452": ("aux_loss", TP, (), True),
    "7452, of a mean over tokens": ("aux_loss", TP, (PER_TOKEN,), True),
}


def added(ctx):
    """By case: what the loss adds to the router's gradient, divided as the step is."""
    found = {}
    for name, (loss, layout, more, masked) in CASES.items():
        grads, alone = [], ctx.world_size == 1
        for coefficient in ("0.4", "0"):
            words = [*WORDS, loss, "--moe-aux-loss-coeff", coefficient, *more, *NO_DROPOUT]
            if alone and "global" in loss:  # one microbatch that has the sequences of both ranks
                run = Joined(ctx, Layout(), words)
            else:
                run = Run(ctx, Layout() if alone else layout, words, masked=masked)
            kept = {}
            run.step(1, look=lambda run=run, kept=kept: kept.update(run.main_grads()))
            tokens = 8 * 16 if more else run.global_batch
            grads.append([(at, values / tokens) for at, values in kept[ROUTER]])
        pairs = zip(*grads, strict=True)
        found[name] = {ROUTER: [(at, values - other) for (at, values), (_, other) in pairs]}
    return found


@pytest.fixture(scope="module")
def additions():
    return run_ranks(added, 1)[0], run_ranks(added, 2)


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_thread_losses_weigh_on_two_ranks_what_they_do_on_one(name, additions):
    alone, ranks = additions
    expected = assembled([alone[name]])[ROUTER]
    assert np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(
        assembled([rank[name] for rank in ranks])[ROUTER], expected, rtol=1e-9, atol=1e-14
    )


def of_router(ctx, flags):
    """Losses of three steps, and the dtypes that the router computed in and has its weight in."""
    found = []
    for words in flags:
        run, dtypes = Run(ctx, Layout(pp=2, dp=2, schedule="zb-1p", more=words), ROUTER_DTYPE), set()
        for chunk in run.engine.chunks:
            for layer in chunk.module.decoder.layers.values():
                layer.mlp.router.register_forward_hook(
                    lambda router, _, choices, seen=dtypes: seen.add(
                        (choices.weights.dtype, router.weight.dtype)
                    )
                )
        found.append((train_run(run, 3).losses, dtypes))
    return found


@pytest.mark.grid
def test_a_router_in_fp32_of_sharded_bf16_weights_in_a_pipeline():
    """#1643: it failed where pipelines were sharded. Weights that are gathered are cast for each product, and losses
    are those of ranks that have them whole, bit for bit."""
    over = tuple("--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split())
    flags = [(), ("--use-distributed-optimizer",), SHARDED, (*SHARDED, *over)]
    for whole, *others in run_ranks(of_router, 4, flags, timeout=120):
        assert whole[1] == {(torch.float32, torch.bfloat16)}
        assert [other[0] for other in others[:2]] == [whole[0]] * 2
        assert np.allclose(others[2][0], whole[0], rtol=0, atol=0.02)  # products of other rows
        assert [other[1] for other in others] == [whole[1]] * len(others)
