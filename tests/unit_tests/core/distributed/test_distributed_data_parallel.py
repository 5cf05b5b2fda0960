"""The data parallel engine on real ranks, driven by hand, against one plain process that sees every sample."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.harness.hand_driven import (
    Model,
    build,
    gradient_parts,
    joined,
    reference,
    run_step,
    sample,
    update,
    whole_weights,
)
from tests.harness.ranks import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CUT = STRATEGIES[2:]
STEPS, MICROBATCHES = 2, 4
GROUPS = {"finish": (), "once": (3,), "pairs": (1, 3), "each": (0, 1, 2, 3), "uneven": (2, 3)}
MODELS = {
    "plain": Model(),
    "tied": Model(tied=True),
    "frozen": Model(frozen=("1.fc.bias", "1.fc.weight", "1.gain")),
    "two chunks": Model((2, 1)),
}


def train(ctx, ps, model, strategy, grouping, by_unit, **config):
    engine, chains = build(ps, model, strategy, **config)
    grads = []
    for step in range(STEPS):
        numbers = [
            (step * MICROBATCHES + microbatch) * ctx.world_size + ctx.rank
            for microbatch in range(MICROBATCHES)
        ]
        inputs = [sample(number, model.dtype) for number in numbers]
        run_step(engine, chains, inputs, reduce_after=GROUPS[grouping], by_unit=by_unit)
        grads.append(gradient_parts(engine))
        update(engine)
    return grads, whole_weights(engine)


def check(world, cases, model, tolerance=1e-10, **config):
    """cases: name -> (strategy, grouping, by unit, instances, more of the config). Returns what each has found."""

    def body(ctx):
        found = {}
        for name, (strategy, grouping, by_unit, instances, more) in cases.items():
            ps = ctx.make_ps(dp=world, instances=instances)
            found[name] = train(ctx, ps, model, strategy, grouping, by_unit, **config, **more)
        return found

    by_rank = run_ranks(body, world)
    plain = reference(model, STEPS, MICROBATCHES * world)
    out = {}
    for name in cases:
        ranks = [rank[name] for rank in by_rank]
        steps = [joined([grads[step] for grads, _ in ranks]) for step in range(STEPS)]
        for grads, expected in zip(steps, plain.grads, strict=True):
            assert grads.keys() == expected.keys()
            for key, grad in grads.items():
                off = (grad.double() - expected[key].double()).abs().max()
                assert off <= tolerance * expected[key].double().abs().max(), (
                    f"{name}: gradient of {key} by {off}"
                )
        for _, weights in ranks:
            for key, weight in weights.items():
                off = (weight.double() - plain.weights[key].double()).abs().max()
                assert off <= tolerance, f"{name}: {key} by {off}"
        out[name] = steps
    return out


def assert_same_bits(steps, others):
    for grads, other in zip(steps, others, strict=True):
        assert all(torch.equal(grad, other[name]) for name, grad in grads.items())


@pytest.mark.parametrize("model", MODELS)
def test_every_strategy_and_grouping_equals_one_process(model):
    cases = {
        f"{strategy} {grouping} {by_unit}": (strategy, grouping, by_unit, 1, {})
        for strategy, grouping, by_unit in itertools.product(STRATEGIES, GROUPS, (False, True))
        if strategy in CUT or grouping in ("finish", "once")
        if strategy == "optim_grads_params" or not by_unit
    }
    found = check(2, cases, MODELS[model])
    # Only the grouping decides bits: neither the strategy nor when weights are gathered.
    for name in cases:
        strategy, grouping, _ = name.split()
        same = f"no_shard {grouping} False" if strategy not in CUT else f"optim_grads {grouping} False"
        assert_same_bits(found[name], found[same])
    assert_same_bits(found["no_shard once False"], found["optim_grads_params once True"])


def test_instances_are_summed_unit_by_unit():
    outer = {"outer_dp_sharding_strategy": "optim"}
    rows = {
        "optim": ("optim", 2, {}),
        "HSDP grads": ("optim_grads", 2, {}),
        "HSDP": ("optim_grads_params", 2, {}),
        "HFSDP": ("optim_grads_params", 2, outer),
        "HFSDP overlapped": ("optim_grads_params", 2, {**outer, "overlap_param_gather": True}),
    }
    cases = {
        f"{row} {grouping}": (strategy, grouping, strategy == "optim_grads_params", instances, more)
        for row, (strategy, instances, more) in rows.items()
        for grouping in ("finish", "once", "pairs")
        if strategy in CUT or grouping != "pairs"
    }
    found = check(4, cases, MODELS["frozen"])
    for name in cases:
        assert_same_bits(found[name], found[f"HFSDP {name.split()[-1]}"])


def test_a_rank_an_instance_sums_over_instances_only():
    check(
        2,
        {"no_shard": ("no_shard", "finish", False, 2, {}), "optim": ("optim", "once", False, 2, {})},
        Model(),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights(dtype):
    """fp32 main weights; bf16 gradients are added in fp32, fp16 ones in fp16 unless asked otherwise."""
    cases = {strategy: (strategy, "once", False, 1, {}) for strategy in STRATEGIES}
    in_fp32 = {"accumulate_allreduce_grads_in_fp32": True}
    cases |= {f"{strategy} fp32": (strategy, "once", False, 1, in_fp32) for strategy in STRATEGIES}
    found = check(3, cases, Model(dtype=dtype), tolerance=0.05)
    grad = found["optim"][0]["links.0.gain"]
    assert grad.dtype == (torch.float32 if dtype is torch.bfloat16 else torch.float16)
    assert found["optim fp32"][0]["links.0.gain"].dtype == torch.float32
    for name, steps in found.items():
        assert_same_bits(steps, found["no_shard fp32" if name.endswith("fp32") else "no_shard"])


def test_gradients_travel_in_the_type_that_is_asked_for():
    cases = {
        "fp32": ("optim_grads_params", "pairs", False, 1, {"megatron_fsdp_main_grads_dtype": "fp32"}),
        "travel in bf16": (
            "optim_grads_params",
            "pairs",
            False,
            1,
            {"megatron_fsdp_grad_comm_dtype": "bf16"},
        ),
    }
    found = check(2, cases, Model(dtype=torch.bfloat16), tolerance=0.1)
    grads, rounded = (found[name][0]["links.0.fc.weight"] for name in cases)
    assert grads.dtype == rounded.dtype == torch.float32, "what they are accumulated in"
    assert not torch.equal(grads, rounded)


def test_averages_in_collectives_are_taken_back_by_the_divisor():
    def body(ctx):
        found = []
        for average in (False, True):
            engine, chains = build(ctx.ps, Model(), "optim_grads", ddp_average_in_collective=average)
            run_step(engine, chains, [sample(ctx.rank, torch.float64)])
            found.append((engine.buffer.grads_divided_by, gradient_parts(engine)))
        return found

    by_rank = run_ranks(body, 2)
    sums, means = (joined([rank[which][1] for rank in by_rank]) for which in (0, 1))
    assert [divided for divided, _ in by_rank[0]] == [1, 2]
    assert all(torch.equal(grad, 2 * means[name]) for name, grad in sums.items())
