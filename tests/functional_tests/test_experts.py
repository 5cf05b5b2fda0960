"""Runs of models with experts through the entry script: what must not change a bit of weights, moments and biases."""

from __future__ import annotations

import pytest

from tests.functional_tests.test_resume import assert_bit_for_bit
from tests.harness import launch

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-input-jitter-eps 0.1 --moe-shared-expert-intermediate-size 32"
).split()
RUN = [*launch.TINY, *EXPERTS, *"--train-iters 4 --save ck --save-interval 4".split()]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STAGES = "--pipeline-model-parallel-size 2"
SAME = {
    "grouped": (1, "--moe-grouped-gemm"),
    "recomputed": (1, FULL),
    "core attention recomputed": (1, "--recompute-activations"),
    "1f1b": (2, STAGES),
    "zb-h1, recomputed, grouped": (2, f"{STAGES} --enable-zero-bubble {FULL} --moe-grouped-gemm"),
    "rerun": (1, "--nan-policy rerun-once"),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("one"), 1, "")


def saved(folder, ranks, more):
    """SHA-256 of every tensor behind four steps."""
    launch.ok(launch.run_forked([*RUN, *more.split()], ranks=ranks, cwd=folder))
    return launch.digests(folder / "ck", 4)


def test_biases_are_saved_and_have_moved(expected):
    biases = {name: digest for name, digest in expected.items() if name.endswith("router.expert_bias")}
    assert len(biases) == 2, sorted(expected)
    assert len(set(biases.values())) == 2


IN_EVERY_RUN = "zb-h1, recomputed, grouped"


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", [name if name == IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.grid) for name in SAME]
)
def test_bits_of_one_process(name, expected, tmp_path):
    digests = saved(tmp_path, *SAME[name])
    assert {tensor for tensor in expected if digests[tensor] != expected[tensor]} == set()
    assert digests.keys() == expected.keys()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(1, "--bf16", marks=pytest.mark.grid),
        (2, "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks, more, tmp_path):
    length = "--train-iters 12 --lr-decay-style cosine --lr-decay-iters 12".split()
    assert_bit_for_bit(tmp_path, ranks, [*length, *EXPERTS, *more.split()])
    straight, resumed = (
        [line for line in launch.metrics_lines(tmp_path / name / "ck") if line.get("event") == "experts"]
        for name in ("straight", "resumed")
    )
    tokens = {line["iteration"]: line["tokens"] for line in straight}
    assert {line["iteration"]: line["tokens"] for line in resumed} == {n: tokens[n] for n in tokens if n > 6}
    assert len(resumed) == 6


@pytest.mark.grid
def test_biases_that_only_the_run_or_the_checkpoint_has_are_refused(tmp_path):
    biased, name = ["--moe-router-enable-expert-bias"], "moe_router_enable_expert_bias"
    plain = [word for word in RUN if word not in biased]
    for number, (first, second) in enumerate(((RUN, plain), (plain, RUN))):
        folder, has = tmp_path / str(number), number == 0
        folder.mkdir()
        launch.ok(launch.run_forked([*first, "--train-iters", "1"], cwd=folder))
        told = launch.ended(launch.run_forked([*second, "--load", "ck"], cwd=folder), 3).output
        assert f"{name}: checkpoint {has}, this run {not has}: give the same flags" in told
        told = launch.ended(launch.run_forked([*second, "--load", "ck", "--finetune"], cwd=folder), 3).output
        missing = "tensors that this run does not have" if has else "tensors that this run needs are missing"
        assert f"{missing}: model.decoder.layers.0.mlp.router.expert_bias" in told
