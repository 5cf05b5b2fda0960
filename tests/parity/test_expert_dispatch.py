"""A layer of experts over two ranks computes, bit for bit, what one process does with both ranks' tokens."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.transformer.experts import experts
from megatron.core.transport.rank_grid import expert_grid
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import SWIGLU, tiny_config, tiny_stage

EXPERTS = {"num_experts": 6, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "num_layers": 1, **SWIGLU}
ROUTERS = {
    "plain": {},
    "dropping": {"moe_expert_capacity_factor": 1.0},
    "grouped, with biases": {"moe_grouped_gemm": True, "add_bias_linear": True},
}
TOKENS = 48  # of a rank; products of few rows have other bits than products of many


def computed(experts, x, dy, flags, dtype, *, undecided=False):
    """(output, input gradient, gradients of experts, of the router) of a layer's MLP. undecided: all logits are equal,
    so that every token meets the first experts."""
    config = tiny_config(**{**EXPERTS, **flags})
    model = tiny_stage(config, params_dtype=dtype, experts=experts)
    if undecided:
        model.decoder.layers["0"].mlp.router.weight.data.zero_()
    x = x.to(dtype).requires_grad_()
    model.context.begin_microbatch(0, 0, 0)
    y = model.decoder.layers["0"].mlp(x)
    y.backward(dy.to(dtype))
    grads = {
        name: model.context.grads.main_grads[name].clone() for name in model.param_meta if ".mlp." in name
    }
    of_router = {name: grads.pop(name) for name in list(grads) if "router" in name}
    return y.detach(), x.grad, grads, of_router


def tokens_by_expert(x, flags, undecided):
    """Of one process."""
    model = tiny_stage(tiny_config(**{**EXPERTS, **flags}), params_dtype=torch.float64)
    router = model.decoder.layers["0"].mlp.router
    if undecided:
        router.weight.data.zero_()
    model.context.begin_microbatch(0, 0, 0)
    return router(x.double()).of_experts.tolist()


def inputs(rank, tokens=TOKENS):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(tokens, 1, 32, generator=generator) for _ in range(2)]


def over_ranks(ctx, flags, dtype, by):
    torch.set_num_threads(1)
    ps = ctx.make_ps(dp=2, experts=expert_grid(2, ep=2))
    return computed(ExpertRanks.of(ps, by), *inputs(ctx.rank), flags, dtype)


EDGES = {  # tokens of a rank, flags, whether every token meets the first experts
    "a rank and experts without tokens": (24, {}, True),
    "fewer tokens than experts": (1, {}, False),
    "an expert a rank": (24, {"num_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}, False),
    "all experts for all": (24, {"moe_router_topk": 6}, False),
    "full experts": (24, {"moe_expert_capacity_factor": 0.25}, False),
}


def edges(ctx, by, parts):
    """parts: each expert is cut over so many ranks."""
    torch.set_num_threads(1)
    ps = ctx.make_ps(dp=2 * parts, experts=expert_grid(2 * parts, ep=2, etp=parts))
    found, moved, traffic = {}, {}, ps.ep_etp_group.traffic
    for name, (tokens, flags, undecided) in EDGES.items():
        before, ranks = traffic.moved("all_to_all"), ExpertRanks.of(ps, by)
        found[name] = computed(ranks, *inputs(ctx.rank, tokens), flags, torch.float64, undecided=undecided)
        moved[name] = (traffic.moved("all_to_all") - before).payload_bytes
    return found, moved, told_without_memory(ranks, ctx.rank)


def told_without_memory(ranks, rank):
    """Where every token meets the first experts, what is said of a forward that gets no memory."""
    full = mock.Mock(side_effect=RuntimeError("can't allocate memory"))
    with mock.patch.object(experts, "products_by_expert", full), pytest.raises(RuntimeError) as raised:
        computed(ranks, *inputs(rank, 24), {}, torch.float64, undecided=True)
    return raised.value.__notes__


def leaving(counts, rank, parts):
    """Bytes that leave a rank in F and B: of each row hidden numbers and a weight, out and back. counts: by rank."""
    peers, own = len(counts), len(counts[0]) * parts // len(counts)

    def rows(source, target):
        first = target // parts * own
        return sum(counts[source][first : first + own])

    others = [other for other in range(peers) if other != rank]
    return 8 * (2 * 32 + 1) * sum(rows(rank, other) + rows(other, rank) for other in others)


@pytest.mark.parametrize(
    ("by", "parts"), [("alltoall", 1), ("allgather", 1), ("alltoall", 2), ("allgather", 2)]
)
def test_edges_of_what_ranks_may_be_sent(by, parts):
    ranks, moved, told = zip(*run_ranks(edges, 2 * parts, by, parts), strict=True)
    every = 2 * parts * 24 * 2
    for rank, notes in enumerate(told):
        rows = every if rank < parts else 0
        name = "decoder.layers.0.mlp.experts"
        assert notes == [f"in {name} of rank {rank}, of {rows} rows; {every // 2} at even load"]
    for name, (tokens, flags, undecided) in EDGES.items():
        each = [
            computed(None, *inputs(rank, tokens), flags, torch.float64, undecided=undecided)
            for rank in range(2 * parts)
        ]
        counts = [tokens_by_expert(inputs(rank, tokens)[0], flags, undecided) for rank in range(2 * parts)]
        for rank, (y, dx, _, _) in enumerate(each):
            assert moved[rank][name] == (leaving(counts, rank, parts) if by == "alltoall" else 0)
            torch.testing.assert_close(ranks[rank][name][0], y, rtol=0, atol=1e-12)
            torch.testing.assert_close(ranks[rank][name][1], dx, rtol=0, atol=1e-12)
        if parts == 1:
            for weight in each[0][2]:
                whole = torch.cat([rank[name][2][weight] for rank in ranks])
                torch.testing.assert_close(whole, sum(one[2][weight] for one in each), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("router", ROUTERS)
def test_two_ranks_have_the_bits_of_one_process(router, dtype):
    flags = ROUTERS[router]
    if router == "dropping":
        flags = {
            **flags,
            "moe_expert_capacity_factor": 3.0,
        }  # each microbatch drops by itself: here nothing is
    both = [torch.cat(pair) for pair in zip(inputs(0), inputs(1), strict=True)]
    y, dx, grads, of_router = computed(None, *both, flags, dtype)
    exchanged = run_ranks(over_ranks, 2, flags, dtype, "alltoall")
    gathered = run_ranks(over_ranks, 2, flags, dtype, "allgather")
    for ranks in (exchanged, gathered):
        for name, whole in grads.items():
            assert torch.equal(torch.cat([rank[2][name] for rank in ranks]), whole), name
    assert torch.equal(torch.cat([rank[0] for rank in exchanged]), y)
    assert torch.equal(torch.cat([rank[1] for rank in exchanged]), dx)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for place, whole in ((0, y), (1, dx)):
        torch.testing.assert_close(
            torch.cat([rank[place] for rank in gathered]), whole, rtol=tolerance, atol=tolerance
        )
    for name, whole in of_router.items():
        total = exchanged[0][3][name] + exchanged[1][3][name]
        torch.testing.assert_close(total, whole, rtol=tolerance, atol=tolerance)
