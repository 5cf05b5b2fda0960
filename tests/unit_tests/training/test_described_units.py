"""What a plan is made from, by flags, is what the engine has built; what flags do not describe is planned as built."""

import dataclasses
import math
from functools import partial

import pytest

from megatron.core.distributed.plan_inputs import units_of_all_stages
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.held.units import rank_units
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model, imagined_engines
from megatron.training.run.describe import described
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks

ZERO_3 = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
INSTANCES = "--num-distributed-optimizer-instances 2"
PP = "--pipeline-model-parallel-size 2"
TP = "--sequence-parallel --tensor-model-parallel-size 2"
WHOLE = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear --swiglu"
CASES = (
    ({"dp": 4}, ""),
    ({"dp": 4}, "--use-distributed-optimizer --ddp-num-buckets 3 --bf16"),
    ({"dp": 2, "pp": 2}, f"{PP} --use-distributed-optimizer --ddp-bucket-size 9000"),
    ({"dp": 2, "pp": 2}, f"{PP} {ZERO_3} --bf16 --megatron-fsdp-grad-comm-dtype bf16"),
    ({"dp": 2, "pp": 2}, f"{PP} {ZERO_3} --zero-bubble-v-schedule --swiglu --disable-bias-linear"),
    ({"dp": 4, "instances": 2}, f"{ZERO_3} {INSTANCES} --outer-dp-sharding-strategy optim --bf16"),
    ({"dp": 4, "instances": 2}, f"--use-distributed-optimizer {INSTANCES}"),
    ({"dp": 2, "tp": 2}, f"--tensor-model-parallel-size 2 {ZERO_3} --position-embedding-type rope --qk-layernorm"),
    ({"dp": 4}, f"{ZERO_3.removesuffix('_params')} --untie-embeddings-and-output-weights"),
    ({"dp": 4}, f"{EXPERTS} --expert-model-parallel-size 2 {ZERO_3} --bf16"),
    ({"dp": 4}, f"{EXPERTS} --expert-model-parallel-size 2 --use-distributed-optimizer --ddp-bucket-size 9000"),
    ({"dp": 4}, f"{EXPERTS} --expert-model-parallel-size 4 {ZERO_3}"),
    ({"dp": 2, "pp": 2}, f"{PP} {EXPERTS} --expert-model-parallel-size 2 {ZERO_3} --zero-bubble-v-schedule"),
    ({"dp": 2, "tp": 2}, f"{TP} {EXPERTS} {WHOLE} {ZERO_3}"),
    ({"dp": 1, "tp": 4}, f"{TP[:-1]}4 {EXPERTS} {WHOLE} {ZERO_3}"),
    ({"dp": 4, "instances": 2}, f"{EXPERTS} --expert-model-parallel-size 2 {ZERO_3} {INSTANCES} --bf16"),
)  # fmt: skip


class OwnModel(GPTModel):
    """A class of somebody's own."""


def config_of(words, ranks=4):
    flags = "--num-layers 4 --global-batch-size 16 --padded-vocab-size 386"
    return described(parse_config([*SMALL, *flags.split(), *words.split()], env=LaunchEnv(world_size=ranks)))


def built(ctx, ranks, words, provider=build_gpt_model):
    """Configuration, engine and this rank's stages."""
    config = config_of(words, ctx.world_size)
    ps = ctx.make_ps(experts=config.world_part().experts, **ranks)
    engine = build_engine(config, ps, partial(provider, config, ps))
    return config, engine, config.planner().spec.local_stages(ps.pp_rank)


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "words"), CASES)
def test_the_engine_builds_what_the_flags_describe(ranks, words):
    def body(ctx):
        config, engine, stages = built(ctx, ranks, words)
        assert engine.is_described
        by_flags = config.units_of(config.planner().spec)
        assert units_of_all_stages(engine.model, stages, by_flags) == by_flags
        as_built = units_of_all_stages(engine.model, stages)
        for mine, theirs in zip(by_flags, as_built, strict=True):
            assert [set(one.shares) for one in mine.units] == [set(one.shares) for one in theirs.units]
        held = rank_units(config.planner().spec.placement, by_flags)[engine.model.ps.pp_rank]
        of_further_uses = engine.model.buffer.persistent_bytes()["extra_grads"]
        assert held.bytes_at_rest == engine.persistent_bytes() - of_further_uses
        return True

    assert run_ranks(body, 4) == [True] * 4


@pytest.mark.grid
def test_a_difference_is_an_error_that_names_the_unit_and_both_figures_on_every_rank():
    def body(ctx):
        ps = ctx.make_ps(dp=2, pp=2)
        config = config_of(f"{PP} {ZERO_3}")
        other = dataclasses.replace(config.model, ffn_hidden_size=2 * config.model.ffn_hidden_size)
        wider = described(dataclasses.replace(config, model=other, description=None))
        engine = build_engine(config, ps, partial(build_gpt_model, config, ps))
        stages, spec = config.planner().spec.local_stages(ps.pp_rank), config.planner().spec
        with pytest.raises(ModelError) as refused:
            units_of_all_stages(engine.model, stages, wider.units_of(spec))
        whole = [
            next(one for one in units[0].units if one.name == "decoder.layers.0").shares[0].gathered
            for units in (wider.units_of(spec), config.units_of(spec))
        ]
        return str(refused.value), whole

    messages = run_ranks(body, 4)
    assert len({message for message, _ in messages}) == 1
    message, (planned, of_model) = messages[0]
    assert (
        f"unit decoder.layers.0: gathered over 2 ranks of dp is {planned} by the plan, {of_model} in the model"
        in message
    )
    assert "from the flags" in message


def frozen(config, ps, **words):
    model = build_gpt_model(config, ps, **words)
    model.decoder.layers["0"].requires_grad_(False)
    return model


def own(config, ps, **words):
    model = build_gpt_model(config, ps, **words)
    model.__class__ = OwnModel
    return model


@pytest.mark.grid
@pytest.mark.parametrize("provider", [frozen, own])
def test_what_flags_do_not_describe_is_planned_as_built_and_not_by_flags_under_a_limit(provider):
    def body(ctx):
        _, engine, stages = built(ctx, {"dp": 2}, ZERO_3, provider)
        assert not engine.is_described
        units = units_of_all_stages(engine.model, stages)
        assert units == engine.model.stage_units()
        with pytest.raises(ModelError) as refused:
            built(ctx, {"dp": 2}, f"{ZERO_3} --rank-memory-limit 1G", provider)
        return str(refused.value), [(one.name, one.grad_bytes) for one in units[0].units]

    for message, units in run_ranks(body, 2):
        assert message.startswith("--rank-memory-limit: stage 0 is another model")
        assert "let the model provider make the same model" in message
        assert (dict(units)["decoder.layers.0"] > 0) == (provider is own)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("strategy", "cut"),
    [
        ("no_shard", ()),
        ("optim", ("main_weights",)),
        ("optim_grads", ("main_weights", "main_grads")),
        ("optim_grads_params", ("main_weights", "main_grads", "weights")),
    ],
)
def test_states_of_experts_are_cut_over_the_ranks_that_hold_the_same_ones(strategy, cut):
    """16 ranks: a stage's experts over EP 2 x ETP 2, of which each part is on 2 ranks."""
    sharded = "--use-custom-fsdp" if "main_grads" in cut else "--use-distributed-optimizer" * bool(cut)
    words = f"{PP} {TP} {EXPERTS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2 {sharded}"
    config = config_of(f"{words} --data-parallel-sharding-strategy {strategy}" if cut else words, 16)
    for engine in imagined_engines(config).values():
        buffer = engine.model.buffer
        whole = sum(math.prod(one.global_shape) for one in engine.param_meta.values() if one.expert) // 4
        buckets = [one for one in buffer.buckets if buffer.arenas[one.arena].layout.expert]
        assert whole > 0
        for name in ("weights", "main_grads", "main_weights"):  # what the optimizer updates has moments
            held = sum(getattr(one, name).numel() for one in buckets) * (2 if name in cut else 1)
            assert 0 <= held - whole < 2 * 128 * len(buckets), (name, held, whole)
