"""Whole runs over every sharding strategy: they print, compute and save what the run that shards nothing does.

With two microbatches a step, strategies that sum gradients over ranks once a step (no_shard, optim) have the same bits,
and so have those that reduce each microbatch (optim_grads, optim_grads_params); between the two only rounding differs.
"""

import re

import pytest

from tests.harness import launch
from tests.harness.runs import (
    assert_same_bits,
    assert_same_but_for_rounding,
    refused_before_torch,
    runs_of,
)

PLAIN = "tests/functional_tests/trainers/plain_pipeline.py"
SIZE = [*launch.TINY, *"--num-layers 4 --padded-vocab-size 128".split()]
BASE = [*SIZE, *"--train-iters 4 --save ck --save-interval 4".split()]
LOGGED = "--eval-interval 2 --eval-iters 2 --log-num-zeros-in-grad --log-params-norm"
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"
ZERO2, ZERO3 = f"{FSDP} optim_grads", f"{FSDP} optim_grads_params"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
# --use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params, as the documentation of Megatron has it.
DOCUMENTED = f"{ZERO3} --no-gradient-accumulation-fusion"
TABLE_ROW = re.compile(r"^   (\w+) +([\d,]+)(?: +([\d,]+))?$", re.MULTILINE)
full = pytest.mark.full


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs_of(BASE, tmp_path_factory.mktemp)


# --- the documentation's line


@pytest.mark.grid
def test_the_documented_line_simply_runs(run):
    """As a user types it: no_shard's losses, and the plan says what is sharded."""
    documented = run(2, f"{LOGGED} {DOCUMENTED}")
    assert_same_but_for_rounding(run(2, LOGGED), documented)
    plan = documented.plan
    assert plan["sharding"] == "optim_grads_params"
    assert plan["units_per_rank"] == [5, 5]  # four layers; embedding and head are tied
    # Half of 16 bytes (weights, gradients, two moments) for each of the 56000 parameters, but for padding.
    assert all(56000 * 8 <= held <= 56000 * 8 * 1.05 for held in plan["persistent_bytes_per_rank"])
    assert "--no-gradient-accumulation-fusion has no effect here" in documented.output
    assert "Traceback" not in documented.output


# --- strategies


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        f"--use-distributed-optimizer {OVERLAP} --ddp-bucket-size 3000",
        pytest.param(f"{FSDP} optim", marks=full),
        pytest.param(f"{FSDP} no_shard", marks=full),
        pytest.param("--use-distributed-optimizer --overlap-grad-reduce --ddp-num-buckets 5", marks=full),
    ],
)
def test_strategies_that_sum_once_have_the_bits_of_no_shard(run, flags):
    assert_same_bits(run(2, LOGGED), run(2, f"{LOGGED} {flags}"))


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        f"{ZERO3} --fsdp-double-buffer --init-model-with-meta-device --suggested-communication-unit-size 1",
        pytest.param(ZERO2, marks=full),
        pytest.param("--use-megatron-fsdp --suggested-communication-unit-size 100000000000", marks=full),
        pytest.param(f"{ZERO3} --fsdp-reshard-policy backward --fsdp-debug", marks=full),
    ],
)
def test_strategies_that_reduce_each_microbatch_have_the_same_bits(run, flags):
    zero3 = run(2, f"{LOGGED} {ZERO3}")
    assert_same_but_for_rounding(run(2, LOGGED), zero3)
    assert_same_bits(zero3, run(2, f"{LOGGED} {flags}"))


@pytest.mark.grid
def test_policies_that_reduce_once_have_the_bits_of_no_shard(run):
    """Also with evaluations between steps, which find units that are kept gathered."""
    flags = f"{ZERO3} --fsdp-reshard-policy step"
    assert_same_bits(run(2, LOGGED), run(2, f"{LOGGED} {flags}"))


RECOMPUTE = "--recompute-granularity full --recompute-num-layers 2 --recompute-method"


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        f"{RECOMPUTE} block --fsdp-double-buffer",
        pytest.param(f"{RECOMPUTE} uniform", marks=full),
        pytest.param(f"{RECOMPUTE} uniform --suggested-communication-unit-size 1", marks=full),
        pytest.param("--recompute-granularity selective", marks=full),
    ],
)
def test_recomputed_layers(run, flags):
    """Dropout included: the second forward draws what the first one drew."""
    assert_same_bits(run(2, f"{LOGGED} {ZERO3}"), run(2, f"{LOGGED} {ZERO3} {flags}"))


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        "--outer-dp-sharding-strategy optim --init-model-with-meta-device",
        pytest.param("", marks=full),
        pytest.param("--enable-full-sharding-in-hsdp --fsdp-double-buffer", marks=full),
        pytest.param("--check-weight-hash-across-dp-replicas-interval 1", marks=full),
    ],
)
def test_instances(run, flags):
    """Two instances of two ranks each (HSDP), and with the optimizer cut over both (HFSDP)."""
    flags = f"{LOGGED} {ZERO3} --num-distributed-optimizer-instances 2 {flags}"
    assert_same_but_for_rounding(run(4, LOGGED), run(4, flags))


@pytest.mark.grid
@full
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", f"{ZERO3} --init-model-with-meta-device"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
         f"{FSDP} optim {OVERLAP}"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
         f"{FSDP} no_shard --overlap-grad-reduce"),
        ("--pipeline-model-parallel-size 2", f"--use-distributed-optimizer {OVERLAP}"),
    ],
)  # fmt: skip
def test_beside_tensor_and_pipeline_parallel_ranks(run, layout, flags):
    assert_same_but_for_rounding(run(4, f"{LOGGED} {layout}"), run(4, f"{LOGGED} {layout} {flags}"))


@pytest.mark.grid
@full
@pytest.mark.parametrize("flags", [ZERO2, f"{ZERO3} --fsdp-double-buffer"])
def test_three_ranks_share_what_three_does_not_divide(run, flags):
    same = f"{LOGGED} --global-batch-size 12"
    assert_same_but_for_rounding(run(3, same), run(3, f"{same} {flags}"))


@pytest.mark.grid
@pytest.mark.parametrize("flags", [ZERO3, pytest.param(ZERO2, marks=full)])
def test_one_rank_shards_with_nobody(run, flags):
    assert_same_bits(run(1, LOGGED), run(1, f"{LOGGED} {flags}"))


# --- precision and steps that are not like the others


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --calculate-per-token-loss --untie-embeddings-and-output-weights",
        pytest.param("--ddp-average-in-collective", marks=full),
        pytest.param("--fp64 --clip-grad 0.1", marks=full),
        pytest.param("--optimizer sgd --iterations-to-skip 2 3", marks=full),
    ],
)
def test_precision_and_losses(run, flags):
    one, two = run(2, f"{LOGGED} {flags}"), run(2, f"{LOGGED} {flags} {ZERO3}")
    assert_same_but_for_rounding(one, two, rel=1e-4 if "bf16" in flags else 2e-6)


@pytest.mark.grid
@pytest.mark.parametrize(
    "sharded", [ZERO3, pytest.param(f"--use-distributed-optimizer {OVERLAP}", marks=full)]
)
def test_fp16_skips_the_same_steps(run, sharded):
    """An overflow that only one rank's shard sees is an overflow on all; the scale follows the same path."""
    flags = "--fp16 --initial-loss-scale 131072 --hysteresis 1 --loss-scale-window 2 --train-iters 8 --save-interval 8"
    one, two = run(2, flags), run(2, f"{flags} {sharded}")
    assert_same_but_for_rounding(one, two, rel=1e-3)  # gradients are accumulated in fp16
    for pattern in (r"loss scale: (\S+) \|", r"number of skipped iterations: +(\d+)"):
        met, expected = (re.findall(pattern, what.output) for what in (two, one))
        assert met == expected
        assert len(set(met)) > 1, met
    assert "overflow at this loss scale: step skipped, scale lowered" in two.output


RAMP = (*SIZE, *"--train-samples 60 --rampup-batch-size 4 4 24 --save ck --save-interval 1000".split())


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        "--fsdp-reshard-policy budget --fsdp-memory-budget 150000",
        pytest.param("--fsdp-reshard-policy step --fsdp-double-buffer", marks=full),
        pytest.param("", marks=full),
    ],
)
def test_microbatches_may_grow_during_the_run(run, flags):
    """One, then two microbatches a step: what is kept between microbatches is planned for either."""
    one, two = run(2, "", base=RAMP), run(2, f"{ZERO3} {flags}", base=RAMP)
    assert set(re.findall(r"global batch size: +(\d+)", two.output)) == {"4", "8"}
    assert_same_but_for_rounding(one, two)


# --- what is told


@pytest.mark.grid
def test_the_memory_table(run):
    """--log-fsdp-ledger: before and after the first step the same at rest, but for gradients, which come with it;
    nothing transient is left over."""
    output = run(2, f"{LOGGED} {ZERO3} --log-fsdp-ledger").output
    assert "--log-fsdp-ledger has no effect" not in output
    assert len(re.findall(r"^ > bytes of the sharding engine on rank 0, ", output, re.MULTILINE)) == 2
    before, after = (
        {name: int(live.replace(",", "")) for name, live, _ in TABLE_ROW.findall(table)}
        for table in re.split(
            r"^ > bytes of the sharding engine on rank 0, .*:$", output, flags=re.MULTILINE
        )[1:]
    )
    assert before["persistent"] == before["weights"] + before["moments"]
    assert after["persistent"] == before["persistent"] + after["main_grads"]
    assert (after["weights"], after["moments"]) == (before["weights"], before["moments"])
    assert after["main_grads"] == after["weights"]
    assert before["moments"] == 2 * before["weights"]
    assert before["weights"] * 2 >= 4 * 56000
    assert before["transient"] == after["transient"] == after["gathered"] == 0
    peaks = {name: int(peak.replace(",", "")) for name, _, peak in TABLE_ROW.findall(output) if peak}
    assert peaks["gathered"] > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fsdp-debug --fsdp-unit-modules Foo",
         ["--fsdp-debug has no effect without --use-custom-fsdp",
          "--fsdp-unit-modules has no effect without --use-custom-fsdp"]),
        (f"{ZERO3} --ddp-bucket-size 10 --outer-dp-sharding-strategy optim --no-overlap-param-gather",
         ["--ddp-bucket-size has no effect with --use-custom-fsdp: each unit is a bucket",
          "--outer-dp-sharding-strategy optim has no effect at --num-distributed-optimizer-instances 1",
          "--overlap-param-gather is always on with --data-parallel-sharding-strategy optim_grads_params"]),
    ],
)  # fmt: skip
def test_flags_without_effect_are_told(tmp_path, flags, says):
    words = [*BASE, *flags.split(), "--check-config"]
    output = launch.ok(launch.run_forked(words, ranks=1, cwd=tmp_path)).output
    for line in says:
        assert line in output, output


# --- a user's own model


@pytest.mark.grid
def test_a_plain_model_in_units_of_its_own(run):
    """A plain nn.Module: sharded by the classes that --fsdp-unit-modules names."""
    units = "--use-custom-fsdp --fsdp-unit-modules Residual --log-fsdp-ledger"
    sharded = run(2, f"{LOGGED} {units}", PLAIN)
    assert_same_but_for_rounding(run(2, LOGGED, PLAIN), sharded)
    for unit in ("embedding", "blocks.0", "blocks.3", "output"):
        assert f"     main_grads {unit}: " in sharded.output


@pytest.mark.grid
def test_our_model_names_its_units_itself(run):
    output = run(2, f"{LOGGED} --use-custom-fsdp --fsdp-unit-modules Nonsense").output
    line = "WARNING: --fsdp-unit-modules Nonsense has no effect: the model names its units itself"
    assert output.count(line) == 1


def test_units_that_the_model_does_not_have(tmp_path):
    words = [*BASE, *"--use-custom-fsdp --fsdp-unit-modules Nonsense".split()]
    finished = launch.ended(launch.run_forked(words, ranks=2, script=PLAIN, cwd=tmp_path), 2)
    assert (
        "--fsdp-unit-modules (fsdp_unit_modules) ['Nonsense']: no module of the model matches"
        in finished.output
    )
    assert "Traceback" not in finished.output


# --- wrong flags


@pytest.mark.parametrize(
    ("ranks", "flags", "rules"),
    [
        (2, "--data-parallel-sharding-strategy optim_grads_params", {"sharding-strategy": "nothing would be sharded"}),
        (2, "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
         {"sharding-strategy": "needs --use-custom-fsdp: --use-distributed-optimizer shards the optimizer state only"}),
        (1, f"{ZERO3} --fsdp-double-buffer", {"gathers-without-effect": "one data parallel rank has nobody to share"}),
        # All reasons at once.
        (4, f"{ZERO2} --pipeline-model-parallel-size 2 --fsdp-memory-budget 5 --outer-dp-sharding-strategy optim "
            "--fsdp-reshard-policy backward --suggested-communication-unit-size -5 --fp8-e4m3 --fsdp-debug "
            "--fsdp-double-buffer",
         {"not-supported": "--fp8-e4m3 is not supported",
          "range-suggested-communication-unit-size": "must be at least 0",
          "reshard-policy-stages": "--fsdp-reshard-policy backward with --pipeline-model-parallel-size 2",
          "double-buffer-stages": "units do not take two slots in turns",
          "fsdp-debug": "--fsdp-debug with --fsdp-double-buffer",
          "outer-sharding": "the optimizer is cut over instances only with optim_grads_params",
          "fsdp-reshard-policy": "weights are not sharded, so none are gathered",
          "fsdp-memory-budget": "--fsdp-memory-budget 5 does nothing under --fsdp-reshard-policy backward"}),
        (3, f"{ZERO3} --global-batch-size 6 --fsdp-reshard-policy budget --num-distributed-optimizer-instances 2 "
            "--check-weight-hash-across-dp-replicas-interval 0 --megatron-fsdp-main-params-dtype bf16",
         {"fsdp-memory-budget": "--fsdp-reshard-policy budget needs --fsdp-memory-budget",
          "distributed-optimizer-instances": "does not divide the data parallel size 3",
          "range-check-weight-hash-across-dp-replicas-interval": "must be at least 1",
          "main-params-dtype": "bf16 cannot hold the model's fp32 weights"}),
        (2, f"{ZERO3} --check-weight-hash-across-dp-replicas-interval 1", {"weight-hash": "no two ranks hold the"}),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_before_torch(tmp_path, ranks, flags, rules):
    """Every reason in one go, each with its fix."""
    output = refused_before_torch([*BASE, *flags.split()], ranks=ranks, folder=tmp_path)
    told = dict(re.findall(r"^ +\d+\. \[([\w-]+)\] (.*)$", output, re.MULTILINE))
    assert set(told) == set(rules), output
    for name, words in rules.items():
        assert words in told[name]
    assert output.count("fix: ") == len(rules)
