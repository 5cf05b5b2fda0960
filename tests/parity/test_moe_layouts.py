"""Experts on layouts of ranks: fp64 to 1e-10 of one process after ten clipped steps, routes as integers; schedules bit
for bit. What one process computes is held to plain PyTorch by test_reference_moe."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from megatron.core.transformer.experts.counted import counted
from tests.harness.layouts import NO_DROPOUT, Layout, Run, assembled, train_run
from tests.harness.ranks import run_ranks

MODEL = [
    *"--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope".split(),
]
ROUTERS = {
    "mixtral": "--moe-z-loss-coeff 0.01",
    "qwen2": "--moe-router-pre-softmax --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type seq_aux_loss",
    "drops": "--moe-expert-capacity-factor 0.75 --moe-router-dtype fp64",
    "deepseek": "--moe-router-score-function sigmoid --moe-router-topk 3 --moe-router-num-groups 2 "
    "--moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05",
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk 1 "
    "--moe-input-jitter-eps 0.1",
    "first_dense": "--moe-layer-freq [0]*3+[1] --moe-router-score-function sigmoid "
    "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position --moe-shared-expert-intermediate-size 16",
}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy".split()
LAYOUTS = [
    (Layout(tp=2, sp=True), "mixtral"),
    (Layout(dp=2), "drops"),
    (Layout(pp=2, schedule="zb-1p"), "first_dense"),
    (Layout(dp=2, more=(*FSDP, "optim_grads_params")), "qwen2"),
    (Layout(tp=2, sp=True, more=tuple(FULL)), "drops"),
]
LARGER = [
    (Layout(tp=2, sp=True, pp=2, schedule="zbv"), "qwen2"),
    (Layout(pp=2, dp=2, schedule="zb-1p", more=(*FSDP, "optim_grads_params")), "mixtral"),
    (Layout(pp=2, dp=2, schedule="interleaved", chunks=2, more=(*FSDP, "optim_grads", *FULL)), "first_dense"),
    (Layout(tp=2, sp=True, dp=2, more=("--use-distributed-optimizer",)), "qwen2"),
    (Layout(tp=4, sp=True), "drops"),
    (Layout(dp=4, more=(*FSDP, "optim_grads_params", "--num-distributed-optimizer-instances", "2")), "drops"),
    (Layout(pp=4, schedule="1f1b", more=tuple(FULL)), "first_dense"),
]
STEPS = 10


def words(router, *more):
    return ["--num-layers", "4", *MODEL, *ROUTERS[router].split(), *NO_DROPOUT, *more]


class CountingRun(Run):
    """Keeps what layers have counted, by step."""

    def __init__(self, ctx, layout, words, **more):
        super().__init__(ctx, layout, words, **more)
        self.counts = []
        train = self.runner.train

        def counting(batches, task, **more):
            numbers = train(batches, task, **more)
            reduce = numbers.reduce

            def reduced(ps, flags=()):
                totals = reduce(ps, flags)
                self.counts.append(totals.layers)
                return totals

            numbers.reduce = reduced
            return numbers

        self.runner.train = counting


def train_all(ctx, cases):
    found = []
    for layout, words in cases:
        run = CountingRun(ctx, layout, words)
        found.append((train_run(run, STEPS), run.counts, counted(run.config.model)))
    return found


@functools.cache
def alone(*words):
    return run_ranks(train_all, 1, [(Layout(), words)], timeout=120)[0][0]


def compare(by_rank, words, exact):
    expected, expected_counts, names = alone(*words)
    results = [trained for trained, _, _ in by_rank]
    for trained, counts, _ in by_rank:
        assert np.allclose(trained.losses, expected.losses, rtol=0, atol=0 if exact else 1e-10)
        assert np.allclose(trained.norms, expected.norms, rtol=0, atol=0 if exact else 1e-10)
        for step, (ours, theirs) in enumerate(zip(counts, expected_counts, strict=True)):
            for one in names:
                numbers, known = ours[one.layer, one.name], theirs[one.layer, one.name]
                bound = 0 if one.name in ("tokens", "dropped") else 1e-10
                assert np.allclose(numbers, known, rtol=0, atol=bound), (step, one, numbers, known)
    for kind in ("initial", "grads", "weights"):
        ours = assembled([getattr(rank, kind) for rank in results])
        for name, values in assembled([getattr(expected, kind)]).items():
            worst = np.abs(ours[name] - values).max()
            assert worst <= (0 if exact or kind == "initial" else 1e-10), (kind, name, worst)


def check(layouts, *more, exact=False):
    cases = [(layout, words(router, *more)) for layout, router in layouts]
    by_rank = run_ranks(train_all, layouts[0][0].world_size, cases, timeout=300)
    for number, (layout, flags) in enumerate(cases):
        try:
            compare([rank[number] for rank in by_rank], flags, exact)
        except AssertionError as error:
            raise AssertionError(f"{layout}, {flags}: {error}") from error


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.grid) for n in range(1, len(LAYOUTS)))]
)
def test_a_layout_of_two_ranks_equals_one_process(number):
    check(LAYOUTS[number : number + 1], "--fp64")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_layouts_of_four_ranks_equal_one_process():
    check(LARGER, "--fp64")
