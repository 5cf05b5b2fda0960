"""What layers count, and how biases of experts move, is the same whatever is computed again: a table of what repeats,
undoes or skips a step's forwards x counts of tokens, losses, biases."""

import itertools
from typing import NamedTuple

import pytest

from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.run.data import StepBatches
from megatron.training.run.evaluate import evaluate
from megatron.training.run.step import StepRunner
from megatron.training.state import StepTask
from tests.harness.layouts import NO_DROPOUT, Layout, Run, forward_step
from tests.harness.ranks import run_ranks
from tests.harness.validated_steps import parts_of, validated_results

RATE, STEPS, MICROBATCHES, TOKENS, K = 1 / 32, 3, 4, 16, 2
WORDS = [
    *"--num-layers 4 --moe-layer-freq [0,1,1,0] --num-experts 4 --moe-ffn-hidden-size 24 --swiglu".split(),
    *"--disable-bias-linear --position-embedding-type rope --moe-router-score-function sigmoid".split(),
    *f"--moe-router-enable-expert-bias --moe-router-bias-update-rate {RATE} --moe-z-loss-coeff 0.01".split(),
    *"--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2".split(),
    *"--moe-expert-capacity-factor 0.75 --moe-input-jitter-eps 0.1 --moe-shared-expert-intermediate-size 16".split(),
    *NO_DROPOUT,
]
NAMES = {"tokens", "dropped", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"}


class Repeat(NamedTuple):
    """more: flags. nan: the loss of the second step's second microbatch is NaN, once."""

    more: str = ""
    policy: str = "abort"
    nan: bool = False
    evaluates: bool = False


SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"
REPEATS = {
    "nothing": Repeat(),
    "layer by layer": Repeat(f"{FULL} uniform --recompute-num-layers 1"),
    "runs of layers": Repeat(f"{FULL} uniform --recompute-num-layers 2"),
    "two layers": Repeat(f"{FULL} block --recompute-num-layers 2"),
    **{
        modules: Repeat(f"{SELECTIVE} {modules}")
        for modules in (
            "core_attn",
            "layernorm",
            "mlp",
            "moe",
            "shared_experts",
            "moe shared_experts layernorm mlp",
        )
    },
    "a step": Repeat("", "rerun-once", nan=True),
    "a step and its layers": Repeat(f"{SELECTIVE} moe", "rerun-once", nan=True),
    "forwards of evaluations": Repeat(evaluates=True),
    "nothing, and a step is skipped": Repeat("", "skip", nan=True),
}


def biases_of(run):
    return {name: tuple(bias.tolist()) for name, bias in run.engine.biases.named().items()}


def trained(ctx):
    """By kind: (what layers counted, biases behind the step, whether it was skipped) of each step."""
    outcomes = {}
    for name, kind in REPEATS.items():
        run, calls, steps = (
            Run(ctx, Layout(), [*WORDS, *kind.more.split()], global_batch=MICROBATCHES),
            [],
            [],
        )

        def spoiled(iterator, model, calls=calls):
            output, loss = forward_step(iterator, model)
            calls.append(1)
            return output * float("nan") if len(calls) == MICROBATCHES + 2 else output, loss

        if kind.nan:
            run.runner.forward_step = spoiled
        runner = StepRunner(parts_of(run.config, run.ps, run.engine, run.runner, NanPolicy(kind.policy, 3)))
        for step in range(1, STEPS + 1):
            if kind.evaluates:
                held_out = StepBatches(run.microbatches(9))
                evaluate(run.runner, run.ps, held_out, StepTask(step, MICROBATCHES), MICROBATCHES)
            (result,) = runner.step(StepBatches(run.microbatches(step)), StepTask(step, MICROBATCHES))
            steps.append((dict(result.layers), biases_of(run), result.skipped))
        outcomes[name] = steps
    return outcomes


@pytest.fixture(scope="module")
def table():
    return run_ranks(trained, 1)[0]


def moved(before, counts):
    """A bias after a step with these tokens by expert: closed form, exact in fp32."""
    mean = sum(counts) / len(counts)
    return tuple(
        b + RATE * ((count < mean) - (count > mean)) for b, count in zip(before, counts, strict=True)
    )


@pytest.mark.grid
@pytest.mark.parametrize("name", REPEATS)
def test_whatever_is_repeated(name, table):
    expected, steps, biases = table["nothing"], table[name], {}
    for number, (layers, after, skipped) in enumerate(steps):
        assert skipped == (REPEATS[name].policy == "skip" and number == 1)
        assert {counted for _, counted in layers} == NAMES
        for layer, bias in itertools.product((1, 2), after):
            tokens, dropped = layers[layer, "tokens"], layers[layer, "dropped"]
            assert sum(tokens) + sum(dropped) == MICROBATCHES * TOKENS * K
            if f".{layer}." in bias:
                before = biases.get(bias, (0.0,) * 4)
                assert after[bias] == (before if skipped else moved(before, tokens))
        assert layers.keys() == expected[number][0].keys()
        biases = after
        if not any(
            one[2] for one in steps[:number]
        ):  # later weights and biases are others behind a skipped step
            assert layers == expected[number][0]
            assert skipped or after == expected[number][1]
    assert any(any(bias) for bias in biases.values())


def validated(ctx, clip):
    more = f"--enable-optimizer-post-validation --post-validation-after 0 --clip-grad {clip}".split()
    layout = Layout(pp=2, schedule="zb-1p", more=tuple(more))
    run = Run(ctx, layout, WORDS, global_batch=MICROBATCHES)
    results = validated_results(run, STEPS)
    return [dict(one.layers) for one in results], biases_of(run), sum(one.rolled_back for one in results)


def one_by_one(ctx):
    """(clip, what layers counted by step, biases at the end): clipped just below the first norm, so that the first step
    of those that step before they hear of the last rank's part is taken back."""
    clip = 0.999999 * Run(ctx, Layout(), WORDS, global_batch=MICROBATCHES).step(1)[1].norm
    run = Run(ctx, Layout(more=("--clip-grad", str(clip))), WORDS, global_batch=MICROBATCHES)
    runner = StepRunner(parts_of(run.config, run.ps, run.engine, run.runner, NanPolicy("skip", 3)))
    layers = []
    for step in range(1, STEPS + 1):
        (result,) = runner.step(StepBatches(run.microbatches(step)), StepTask(step, MICROBATCHES))
        layers.append(dict(result.layers))
    return clip, layers, biases_of(run)


@pytest.mark.grid
def test_forwards_that_post_validation_undoes():
    ((clip, expected, biases),) = run_ranks(one_by_one, 1)
    by_rank, ours = run_ranks(validated, 2, clip), {}
    for layers, own, taken_back in by_rank:
        assert taken_back > 0
        assert [one.keys() for one in layers] == [one.keys() for one in expected]
        for step, other in zip(layers, expected, strict=True):
            for key, numbers in other.items():
                exact = key[1] in ("tokens", "dropped")
                assert step[key] == (numbers if exact else pytest.approx(numbers, rel=1e-6)), key
        ours |= own
    assert ours == biases
