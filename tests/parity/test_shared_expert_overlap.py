"""Shared experts beside the exchange of tokens: the same outputs and weight gradients bit for bit, gradients of tokens
but for the order of one sum; and the exchange is under way while shared experts run."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transport import collectives
from megatron.core.transport.pending import Pending
from megatron.core.transport.rank_grid import expert_grid
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from tests.harness.launch_lines import SMALL
from tests.harness.layouts import Layout
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import SWIGLU, tiny_config, tiny_stage
from tests.parity.test_expert_parallel import ZERO3, ep
from tests.parity.test_moe_layouts import check

EXPERTS = {
    "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "num_layers": 1,
    "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True, **SWIGLU,
}  # fmt: skip
SHARED = "--num-experts 4 --moe-shared-expert-intermediate-size 32"
SELECTIVE = {"recompute_granularity": "selective"}
CASES = {
    "data": ({"dp": 2}, {}),
    "sequence": ({"dp": 1, "tp": 2}, {}),
    "parts": ({"dp": 2}, {"etp": 2}),
    "shared again": ({"dp": 2}, {**SELECTIVE, "recompute_modules": ("shared_experts",)}),
    "all again": ({"dp": 1, "tp": 2}, {**SELECTIVE, "recompute_modules": ("moe",)}),
}


def layer(ctx, ranks, flags, *, overlaps, frozen=()):
    flags = dict(flags)
    etp = flags.pop("etp", 1)
    ps = ctx.make_ps(**ranks, experts=expert_grid(2, ep=2 // etp, etp=etp))
    sequence = ranks.get("tp", 1) > 1
    config = tiny_config(**EXPERTS, **flags, moe_shared_expert_overlap=overlaps)
    model = tiny_stage(
        config,
        params_dtype=torch.float64,
        experts=ExpertRanks.of(ps, "alltoall"),
        tp=TensorParallel.of(ps, sequence),
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    model.context.begin_microbatch(0, 0, 0)
    return model, model.decoder.layers["0"].mlp


def through(ctx, ranks, flags, *, overlaps):
    """Output, gradient of the tokens, gradients of weights."""
    model, mlp = layer(ctx, ranks, flags, overlaps=overlaps)
    generator = torch.Generator().manual_seed(ctx.rank)
    x, dy = (torch.randn(8, 2, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    y = mlp(x)
    y.backward(dy)
    grads = model.context.grads.main_grads
    return y.detach(), x.grad, {name: grads[name].clone() for name in model.param_meta if ".mlp." in name}


@pytest.mark.parametrize("case", CASES)
def test_all_but_the_gradient_of_tokens_has_the_same_bits(case):
    def body(ctx):
        torch.set_num_threads(1)
        plain, beside = (through(ctx, *CASES[case], overlaps=overlaps) for overlaps in (False, True))
        assert torch.equal(plain[0], beside[0])
        assert plain[2].keys() == beside[2].keys()
        assert all(torch.equal(plain[2][name], grad) and grad.any() for name, grad in beside[2].items())
        torch.testing.assert_close(beside[1], plain[1], rtol=1e-12, atol=1e-12)
        return True

    assert run_ranks(body, 2) == [True, True]


def test_the_exchange_is_under_way_while_shared_experts_run(monkeypatch):
    """In the forward tokens and weights go out; in the backward gradients of tokens come back."""

    def body(ctx):
        model, mlp = layer(ctx, {"dp": 2}, {}, overlaps=True)
        calls, exchange, wait = [], collectives.all_to_all, Pending.wait
        reported = model.context.grads.put

        def start(*args, **options):
            calls.append("start")
            return exchange(*args, **options)

        def waited(pending):
            calls.extend(["wait"] * (pending.op == "all_to_all" and pending.work is not None))
            wait(pending)

        def put(key, *args):
            calls.append("shared" if "shared" in key else "experts" if "experts" in key else "router")
            reported(key, *args)

        shared = mlp.shared_experts.register_forward_hook(lambda *_: calls.append("shared"))
        with monkeypatch.context() as patch:
            patch.setattr(collectives, "all_to_all", start)
            patch.setattr(Pending, "wait", waited)
            patch.setattr(model.context.grads, "put", put)
            y = mlp(torch.randn(8, 2, 32, dtype=torch.float64).requires_grad_())
            forward = list(calls)
            calls.clear()
            y.sum().backward()
        shared.remove()
        return forward, [call for at, call in enumerate(calls) if calls[at - 1 : at] != [call]]

    for forward, backward in run_ranks(body, 2):
        assert forward == ["start", "start", "shared", "wait", "wait", "start", "wait"]
        assert backward == [
            *("start", "wait", "experts"),  # the output's gradient goes out
            *("start", "experts", "shared", "wait"),
            *("start", "wait", "router"),  # gradients of weights come back
        ]


def test_nothing_waits_where_nobody_wants_gradients_of_tokens_and_nothing_outlives_its_backward():
    def body(ctx):
        model, mlp = layer(ctx, {"dp": 2}, {}, overlaps=True, frozen=("router", "shared"))
        gc.collect()
        gc.disable()
        y = mlp(torch.randn(8, 2, 32, dtype=torch.float64))
        y.sum().backward()
        assert model.context.grads.main_grads["decoder.layers.0.mlp.experts.linear_fc1.weight"].any()
        model, mlp = layer(ctx, {"dp": 2}, {}, overlaps=True)
        x = torch.randn(8, 2, 32, dtype=torch.float64).requires_grad_()
        y = mlp(x)
        tokens = weakref.ref(x)  # which the graph has
        y.sum().backward()
        del x, y
        gone = tokens() is None
        gc.enable()
        return gone

    assert run_ranks(body, 2) == [True, True]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--num-experts 4", "without --moe-shared-expert-intermediate-size"),
        (f"{SHARED} --moe-token-dispatcher-type alltoall", "where tokens are not exchanged"),
        (f"{SHARED} --expert-model-parallel-size 2", "where tokens are not exchanged"),
        (f"{SHARED} --expert-model-parallel-size 2 --moe-token-dispatcher-type flex", ""),
    ],
)
def test_a_line_says_where_nothing_is_exchanged(words, reason):
    flags = f"--global-batch-size 8 --swiglu --disable-bias-linear --moe-shared-expert-overlap {words}"
    config = parse_config([*SMALL, *flags.split()], env=LaunchEnv(world_size=2))
    told = [one for one in (*config.warnings, *config.notes) if "--moe-shared-expert-overlap" in one]
    assert len(told) == bool(reason)
    assert all(reason in one for one in told)


@pytest.mark.full
def test_layouts_equal_one_process():
    overlap = "--moe-shared-expert-overlap"
    check([(Layout(dp=2, more=ep(2, overlap)), "qwen2")], "--fp64")
    cases = [
        Layout(dp=4, more=ep(2, overlap, *ZERO3)),
        Layout(tp=2, sp=True, dp=2, more=ep(2, overlap, "--use-distributed-optimizer")),
        Layout(pp=2, dp=2, schedule="zb-1p", more=ep(2, overlap, *ZERO3)),
        Layout(tp=2, sp=True, pp=2, schedule="zbv", more=ep(2, overlap)),
    ]
    check([(one, "qwen2") for one in cases], "--fp64")
