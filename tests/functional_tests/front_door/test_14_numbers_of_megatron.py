"""Numbers as Megatron has them (decoupled learning rate, warm-up fraction), and models that its flags cannot say."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.optimizer.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    RateSchedule,
    build_schedule,
)
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.training.config.config import flops_per_token
from megatron.training.run.arguments import ConfigurationError, parse_config
from tests.harness import launch
from tests.harness.described import costs_of_model, whole
from tests.harness.launch_lines import SMALL

PLAIN = [word for word in launch.TINY if word != "constant" and word != "--lr-decay-style"]
GEMMA = (
    "--geglu-tanh --embedding-multiplier sqrt_hidden --disable-bias-linear --add-qkv-bias --add-attention-output-bias "
    "--normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope --num-layers 4"
).split()


@pytest.mark.parametrize("tied", [True, False])
def test_decoupled_lr_moves_words_and_output_layer_but_not_the_position_table(tied, tmp_path):
    """An ordinary rate of 0 leaves what it applies to where it was; --decoupled-lr moves the rest."""
    words = [*launch.TINY, "--save-interval", "1", "--weight-decay", "0", "--lr", "0", "--train-iters", "1"]
    words += [] if tied else ["--untie-embeddings-and-output-weights"]
    before, after = (
        {
            name.removeprefix("model."): digest
            for name, digest in launch.digests(tmp_path / rate, 1).items()
            if name.startswith("model.")
        }
        for rate in ("0", "1e-2")
        if launch.ok(launch.run_forked([*words, "--decoupled-lr", rate, "--save", str(tmp_path / rate)]))
    )
    moved = {name for name in before if before[name] != after[name]}
    assert "embedding.position_embeddings.weight" in before
    assert moved == {"embedding.word_embeddings.weight", *(() if tied else ("output_layer.weight",))}


def test_a_model_that_marks_no_words_is_told_that_decoupled_lr_has_no_effect():
    words = [*launch.TINY, "--decoupled-lr", "1e-3", "--train-iters", "1"]
    run = launch.ok(launch.run_forked(words, script="examples/custom_trainer/pretrain_small_mlp_lm.py"))
    assert run.output.count("WARNING: --decoupled-lr 0.001 has no effect: the model marks no parameter") == 1


def schedule(**flags):
    return build_schedule(
        OptimizerConfig(lr=1e-3, **flags), train_iters=None, train_samples=100, global_batch_size=1
    )


def rates(given, steps):
    scheduler = OptimizerParamScheduler([], given)
    found = []
    for _ in range(steps):
        scheduler.step(1)
        found.append(scheduler.lr)
    return found


def test_a_warmup_fraction_of_0_025_of_100_samples_gives_4e_4_then_8e_4():
    assert rates(schedule(lr_warmup_fraction=0.025), 2) == pytest.approx([4e-4, 8e-4], rel=1e-15)


def test_the_log_of_a_run_says_these_rates():
    words = [*PLAIN, "--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-3"]
    words += ["--train-samples", "100", "--lr-warmup-fraction", "0.025", "--exit-interval", "2"]
    output = launch.ok(launch.run_forked(words)).output
    assert [f"learning rate: {rate}" in output for rate in ("4.000000E-04", "8.000000E-04")] == [True, True]


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "WSD", "constant"])
def test_every_style_follows_the_published_formulas_with_a_fractional_warmup(style):
    """t samples of 100, 2.5 of warm-up, in plain Python."""
    import math

    found = rates(schedule(lr_warmup_fraction=0.025, lr_decay_style=style, lr_wsd_decay_samples=40,
                           lr_wsd_decay_style="linear", min_lr=1e-5), 100)  # fmt: skip
    for t, rate in enumerate(found, 1):
        done = (t - 2.5) / 97.5
        height = {
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "WSD": min(1.0, (100 - t) / 40),
            "constant": 1.0,
        }.get(style)
        expected = 1e-3 * t / 2.5
        if t > 2.5 and height is None:
            expected = max(1e-5, 1e-3 * math.sqrt(2.5) / math.sqrt(t))
        elif t > 2.5:
            expected = 1e-5 + height * (1e-3 - 1e-5) if style != "constant" else 1e-3
        assert rate == pytest.approx(expected, rel=1e-12), t


def test_iterations_times_the_batch_are_not_cut_either():
    found = build_schedule(
        OptimizerConfig(lr=1.0, lr_warmup_fraction=0.0125, lr_decay_iters=50),
        train_iters=60, train_samples=None, global_batch_size=4,
    )  # fmt: skip
    assert (found.warmup_samples, found.decay_samples) == (2.5, 200)


def resumed(saved: RateSchedule, **flags):
    own = schedule(lr_warmup_fraction=0.025, **flags)
    scheduler = OptimizerParamScheduler([], own)
    state = json.loads(json.dumps({"samples": 1, "schedule": dataclasses.asdict(saved)}))
    return scheduler, scheduler.load_state(state)


def test_a_checkpoint_with_a_cut_warmup_goes_on_with_it_and_says_so():
    own = schedule(lr_warmup_fraction=0.025)
    scheduler, told = resumed(dataclasses.replace(own, warmup_samples=2))
    assert scheduler.lr == 5e-4
    assert "2 samples" in told
    assert "2.5" in told
    scheduler, told = resumed(own)
    assert (scheduler.lr, told) == (pytest.approx(4e-4), None)
    for other in (3, 2.0):  # of other flags
        with pytest.raises(ValueError, match="warmup_samples: checkpoint"):
            resumed(dataclasses.replace(own, warmup_samples=other))


# --- flags of our own


@pytest.mark.parametrize("first", ["--geglu", "--geglu-tanh"])
@pytest.mark.parametrize(
    "second", ["--swiglu", "--quick-geglu", "--squared-relu", "--openai-gelu", "--geglu-tanh"]
)
def test_activations_exclude_each_other_and_both_are_named(first, second):
    if first == second:
        return
    with pytest.raises(ConfigurationError) as refused:
        parse_config([*SMALL, first, second])
    (problem,) = refused.value.problems
    assert problem.rule == "activation"
    assert first in problem.message
    assert second in problem.message


def test_the_multiplier_is_a_number_or_sqrt_hidden_from_flags_and_files(tmp_path):
    for word, value in (("3.5", 3.5), ("-2", -2.0), ("sqrt_hidden", "sqrt_hidden")):
        config = parse_config([*SMALL, "--embedding-multiplier", word])
        assert config.model.embedding_multiplier == value
        (tmp_path / "run.yaml").write_text(config.to_yaml())
        assert parse_config(["--yaml-cfg", str(tmp_path / "run.yaml")]).model.embedding_multiplier == value
    for word in ("0", "nan", "inf", "sqrt", ""):
        with pytest.raises(ConfigurationError, match="finite number that is not 0, or sqrt_hidden"):
            parse_config([*SMALL, "--embedding-multiplier", word])


@pytest.mark.grid
def test_a_gemma_trains_alike_in_a_pipeline_and_on_one_rank_and_its_shape_is_in_the_checkpoint(tmp_path):
    """The bits of one rank: zero-bubble V, tied matrix on both ends of it, dropout, recomputation."""
    words = [*launch.TINY, *GEMMA, "--train-iters", "3"]
    saving = ["--save", str(tmp_path / "ck"), "--save-interval", "2"]
    alone = launch.ok(launch.run_forked([*words, *saving])).losses()
    split = "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --recompute-granularity full "
    split += "--recompute-method uniform --recompute-num-layers 1"
    assert launch.ok(launch.run_forked([*words, *split.split()], ranks=2)).losses() == alone
    loading = [*launch.TINY, "--num-layers", "4", "--load", str(tmp_path / "ck"), "--ckpt-step", "2"]
    loading += ["--train-iters", "3"]
    other = launch.ended(launch.run_forked(loading), 3)
    for field in ("geglu_tanh", "add_bias_linear", "embedding_multiplier"):
        assert field in other.output
    taken = launch.ok(launch.run_forked([*loading, "--use-checkpoint-args"])).losses()
    assert taken == {3: alone[3]}


@pytest.mark.full
@pytest.mark.parametrize(
    "cut",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2",
        "--use-custom-fsdp",
    ],
)
def test_a_gemma_in_tensor_parallel_and_sharded_runs(cut):
    words = [*launch.TINY, *GEMMA, "--train-iters", "2", "--hidden-dropout", "0", "--attention-dropout", "0"]
    words += ["--fp64", "--make-vocab-size-divisible-by", "64"]
    alone = launch.ok(launch.run_forked(words)).losses()
    assert launch.ok(launch.run_forked([*words, *cut.split()], ranks=2)).losses() == alone


def test_flops_and_parameters_count_the_gate_and_the_bias():
    def of(*words):
        return parse_config([*SMALL, *words]).model

    def layer(*words):
        units = costs_of_model(of(*words), 128).unit_weights(whole(of()), Placement(LINEAR, 1))
        return sum(units["decoder.layers.0"])

    for flag in ("--geglu", "--geglu-tanh"):
        assert flops_per_token(of(flag), 128, 32) == flops_per_token(of("--quick-geglu"), 128, 32)
        assert layer(flag) == layer("--quick-geglu")
    plain = layer("--disable-bias-linear")
    assert layer("--disable-bias-linear", "--add-attention-output-bias") - plain == of().hidden_size


def test_cached_generation_of_a_gemma_equals_that_without_a_cache():
    from megatron.core.models.gpt.generate import generate
    from tests.harness.tiny_models import VARIANTS, tiny_batch, tiny_model, written_without_cache

    model = tiny_model(**VARIANTS["gemma"])
    prompts = tiny_batch()[0][:, :5].tolist()
    assert [made.ids for made in generate(model, prompts, 6)] == written_without_cache(model, prompts, 6)
