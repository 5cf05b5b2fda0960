"""The data parallel engine on real ranks, driven by hand, against one plain process that sees every sample."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import ModelError
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import single_process
from megatron.core.transport.traffic import Moved
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
from tests.harness.tiny_models import tiny_batch, tiny_config, tiny_model, tiny_stage

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


@pytest.mark.parametrize(
    "model", [name if name == "plain" else pytest.param(name, marks=pytest.mark.grid) for name in MODELS]
)
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


@pytest.mark.grid
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


def test_with_more_than_two_ranks_sums_run_in_rank_order_whatever_the_buckets():
    model = Model((4,), frozen=(), dtype=torch.float32)

    def body(ctx):
        results = []
        for sizes in ({}, {"ddp_bucket_size": 20}, {"ddp_num_buckets": 2}):
            engine, chains = build(ctx.ps, model, "no_shard", **sizes)
            run_step(engine, chains, [sample(ctx.rank, torch.float32)])
            results.append((len(engine.units), gradient_parts(engine)))
        return results

    by_rank = run_ranks(body, 4)
    own = [reference_of_one(model, rank) for rank in range(4)]
    for name in own[0]:
        total = ((own[0][name] + own[1][name]) + own[2][name]) + own[3][name]
        for results in by_rank:
            assert all(torch.equal(grads[name][1], total) for _, grads in results), name
    assert [num_units for num_units, _ in by_rank[0]] == [1, 4, 2]


def reference_of_one(model, number):
    (chain,) = model.chains()
    chain(sample(number, model.dtype)).square().sum().backward()
    return {name: p.grad.flatten() for name, p in chain.named_parameters()}


class Branches(nn.Module):
    """Which branch is used depends on the input: gradients become ready in another order on each rank, or never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.unused = (nn.Linear(6, 6).double() for _ in range(3))
        self.frozen = nn.Linear(6, 6).double().requires_grad_(False)

    def forward(self, x, swap):
        if swap is None:
            return self.a(self.frozen(x))
        return self.a(self.b(self.frozen(x))) if swap else self.b(self.a(self.frozen(x)))


def test_unused_frozen_and_unequally_used_parameters():
    """A plain loop, in which the engine is told of nothing but the step's ends."""
    swaps = [(False, True), (False, None)]  # of each step, by rank

    def body(ctx):
        found = []
        for words in (None, ("Linear",)):
            config = DistributedDataParallelConfig(ddp_bucket_size=20, fsdp_unit_modules=words)
            ddp = DistributedDataParallel(Branches(), ctx.ps, config)
            for step in swaps:
                ddp.begin_step(1)
                ddp(sample(ctx.rank, torch.float64), step[ctx.rank]).square().sum().backward()
                ddp.finish()
                found.append({n: ddp.buffer.main_grad(n).clone() for n in ddp.buffer.names})
                assert not any(name.startswith("frozen") for name in ddp.buffer.names)
        return found

    by_rank = run_ranks(body, 2)
    for step, swap in enumerate(swaps):
        module = Branches()
        for rank in range(2):
            module(sample(rank, torch.float64), swap[rank]).square().sum().backward()
        for name, p in module.named_parameters():
            if p.requires_grad:
                expected = torch.zeros_like(p) if p.grad is None else p.grad
                for found in by_rank:
                    torch.testing.assert_close(found[step][name], expected, rtol=1e-13, atol=1e-13)
                    assert torch.equal(found[step][name], found[2 + step][name])


def test_world_of_one_neither_communicates_nor_copies(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a collective in a world of one")

    for name in ("sum_gradients", "all_reduce", "reduce_scatter_units", "all_gather_units"):
        monkeypatch.setattr(collectives, name, forbidden)
    for strategy in STRATEGIES:
        engine, chains = build(single_process(Device("cpu")), Model(), strategy)
        pointer = engine.buffer.buckets[0].main_grads.data_ptr()
        inputs = [sample(number, torch.float64) for number in range(3)]
        run_step(engine, chains, inputs, reduce_after=(2,))
        for name, grad in reference(Model(), 1, 3).grads[0].items():
            torch.testing.assert_close(engine.buffer.main_grad(name).flatten(), grad, rtol=1e-12, atol=1e-12)
        engine.weights_changed()
        assert engine.buffer.buckets[0].main_grads.data_ptr() == pointer


def backward_of(engine, chunks, batch):
    """Forward and backward of a GPT in these chunks."""
    tokens, labels, positions = batch
    hidden = None
    for chunk in chunks:
        chunk.context.begin_microbatch(0, 0, 0)
        if not chunk.pre_process:
            chunk.set_input_tensor(hidden)
        hidden = chunk(tokens, positions, labels=labels if chunk.post_process else None)
    hidden.mean().backward()


@pytest.mark.parametrize("ends_here", [True, False], ids=["V", "both ends in one chunk"])
def test_tied_embeddings_of_one_rank(ends_here):
    """On a V the first chunk's embedding is needed by the last chunk's head, as a unit of both."""
    config = tiny_config(num_layers=2)

    def chunks_of_a_rank():
        if not ends_here:
            return [tiny_stage(config)]
        first = tiny_stage(config, layers=[0], post_process=False, other_end_here=True)
        last = tiny_stage(config, layers=[1], pre_process=False, other_end_here=True)
        last.embedding.word_embeddings.weight = first.embedding.word_embeddings.weight
        return [first, last]

    def body(ctx):
        found = {}
        for strategy in STRATEGIES:
            chunks = chunks_of_a_rank()
            made = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
            engine = DistributedDataParallel(chunks, ctx.ps, made)
            engine.begin_step(2)
            with engine.gathered(range(len(engine.units))):
                for microbatch in range(2):
                    backward_of(engine, chunks, tiny_batch(10 * microbatch + ctx.rank))
            for chunk, stage in reversed(list(enumerate(engine.stage_units()))):
                for unit in reversed(range(len(stage.units))):
                    if stage.units[unit].name != "embedding" or chunk == 0:
                        engine.reductions.start(engine.unit_number(chunk, unit))
            engine.finish()
            found[strategy] = gradient_parts(engine), [len(stage.units) for stage in engine.stage_units()]
        return found

    by_rank = run_ranks(body, 2)
    model = tiny_model(num_layers=2)
    for number in (0, 1, 10, 11):
        backward_of(None, [model], tiny_batch(number))
    for strategy in STRATEGIES:
        grads = joined([rank[strategy][0] for rank in by_rank])
        for name, grad in model.summed_grads().items():
            torch.testing.assert_close(grads[name], grad.flatten(), rtol=1e-10, atol=1e-12)
    assert by_rank[0]["optim_grads_params"][1] == ([2, 3] if ends_here else [3])


def test_weights_of_models_without_memory_are_written_where_they_are_held():
    def body(ctx):
        with torch.device("meta"):
            chain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
        engine = DistributedDataParallel(chain, ctx.ps, config)
        values = {
            name: torch.full(p.shape, float(number))
            for number, (name, p) in enumerate(chain.named_parameters())
        }
        for name, value in values.items():
            engine.buffer.write_weight(name, value)
        engine.weights_changed()
        found = whole_weights(engine)
        return all(torch.equal(found[name], value) for name, value in values.items()), engine.unit_modules()[
            0
        ][0] == (chain,)

    assert run_ranks(body, 2) == [(True, True)] * 2


def test_what_a_plan_has_to_know_of_keys_and_modules():
    config = tiny_config(num_layers=2)
    first = tiny_stage(config, layers=[0], post_process=False, other_end_here=True)
    last = tiny_stage(config, layers=[1], pre_process=False, other_end_here=True)
    last.embedding.word_embeddings.weight = first.embedding.word_embeddings.weight
    made = DistributedDataParallelConfig(ddp_bucket_size=1)
    engine = DistributedDataParallel([first, last], single_process(Device("cpu")), made)
    names = [[unit.name for unit in stage.units] for stage in engine.stage_units()]
    assert names == [["embedding", "decoder.layers.0"], ["decoder.layers.1", "head", "embedding"]]
    assert engine.unit_modules() == (
        ((first.embedding,), (first.decoder.layers["0"],)),
        ((last.decoder.layers["1"],), (last.head,), ()),
    )
    in_first, in_last = engine.unit_of_key()
    assert in_first["embedding.word_embeddings.weight@lookup"] == 0
    assert in_last["embedding.word_embeddings.weight"] == 2
    assert in_last["decoder.final_layernorm.weight"] == 1
    assert not any(key.startswith("decoder.layers.0") for key in in_last)


def test_a_step_moves_what_its_units_say_and_the_gathers_of_its_weights_are_its_own():
    rows = {
        "optim": ("optim", {}),
        "HSDP": ("optim_grads_params", {}),
        "HFSDP": ("optim_grads_params", {"outer_dp_sharding_strategy": "optim"}),
    }

    def body(ctx):
        found = {}
        ps = ctx.make_ps(dp=4, instances=2)
        for row, (strategy, more) in rows.items():
            engine, chains = build(ps, Model(), strategy, ddp_bucket_size=1, **more)
            for step in range(2):
                run_step(engine, chains, [sample(step, torch.float64)], reduce_after=(0,))
                traffic = engine.traffic
                update(engine)
                whole_weights(engine)  # no part of any step
            found[row] = traffic, engine.stage_units()[0].units
        return found

    for found in run_ranks(body, 4):
        for row, (traffic, units) in found.items():
            sums = [
                Moved(3, sum(getattr(unit.shares[group], name) for unit in units))
                for group, name in ((0, "gathered"), (0, "reduced"), (1, "reduced"), (1, "gathered"))
            ]
            assert (traffic.all_gather, traffic.reduce_scatter) == (sums[0], sums[1])
            outer = (traffic.outer_reduce_scatter, traffic.outer_all_reduce, traffic.outer_all_gather)
            assert outer == ((sums[2], Moved(), sums[3]) if row == "HFSDP" else (Moved(), sums[2], Moved()))
        shards = [found[row][1][0].bytes_at_rest for row in rows]  # of a link of 48 elements in 512, fp64
        assert shards == [8 * 2 * 512, 8 * 2 * 256, 8 * 2 * 256], "weights and gradients"


def test_what_does_not_go_together_is_refused():
    def body(ctx):
        ps = ctx.make_ps(dp=2, instances=2)
        with pytest.raises(ModelError, match="an instance of one rank has nothing to shard"):
            build(ps, Model(), "optim_grads_params", outer_dp_sharding_strategy="optim")
        with pytest.raises(ModelError, match="--fsdp-debug with --fsdp-double-buffer"):
            build(ctx.ps, Model(), "optim_grads_params", fsdp_debug=True, fsdp_double_buffer=True)

    run_ranks(body, 2)
