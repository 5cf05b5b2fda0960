"""Post-validated runs through the entry script: lines, checkpoints, endings and resumes of synchronous ones."""

from __future__ import annotations

import functools
import re
import signal

import pytest

from tests.harness import launch
from tests.harness.runs import Run, common_state

SCRIPT = "tests/functional_tests/trainers/faulty_steps.py"
PP = "--pipeline-model-parallel-size 2"
FLAGS = [
    *launch.TINY,
    *f"--train-iters 9 --padded-vocab-size 128 --clip-grad 4 --eval-iters 1 {PP}".split(),
    *"--save ck --load ck --save-interval 100 --untie-embeddings-and-output-weights".split(),
]
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-after"
# Clipped from the first step on, not finite on one stage, twice in a row, and last.
FAULTS = (
    "--faults 1:1:4096 2:0:inf 3:1:nan:loss 6:1:4096 7:0:4096 9:1:inf --nan-policy skip --nan-max-skips 9"
)
EVERYTHING = (
    f"{FAULTS} --num-layers 3 --allow-padding-num-layers --eval-interval 4 --save-interval 5 --iterations-to-skip 8 "
    "--log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard "
    "--lr-warmup-iters 4 --lr-decay-style cosine --start-weight-decay 0.01 --end-weight-decay 0.2 "
    "--weight-decay-incr-style linear"
)
# What is looked at after iterations is left to the few runs that need it, so that most steps are undecided for long.
SETTINGS = {
    "everything": (2, EVERYTHING),
    "few lines": (2, f"{FAULTS} --log-interval 3 --enable-zero-bubble --num-layers 4"),
    "fp16": (
        2,
        f"{FAULTS} --fp16 --initial-loss-scale 65536 --hysteresis 1 --loss-scale-window 2 --enable-zero-bubble",
    ),
    "growing, four ranks": (
        4,
        f"{FAULTS} --rampup-batch-size 4 4 16 --global-batch-size 16 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --bf16",
    ),
    "custom fsdp": (
        4,
        f"{FAULTS} --use-custom-fsdp --data-parallel-sharding-strategy optim --overlap-param-gather "
        "--check-weight-hash-across-dp-replicas-interval 3",
    ),
    "experts": (
        2,
        f"{FAULTS} --enable-zero-bubble --num-layers 4 --num-experts 4 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.01 "
        "--moe-z-loss-coeff 0.001 --moe-expert-capacity-factor 1 --save-interval 5",
    ),
    "sp": (4, f"{FAULTS} --tensor-model-parallel-size 2 --sequence-parallel --calculate-per-token-loss"),
}


def lines(run):
    """Of iterations, without times and rollbacks; what was skipped; the rollbacks."""
    told = [re.sub(r" rollbacks: \d+ \|", "", line) for line in run.lines]
    notes = re.findall(r"^ iteration \d+: .*$", run.output, re.MULTILINE)
    return told, notes, [int(n) for n in re.findall(r" rollbacks: (\d+) \|", run.output)]


def same_state(one, other, iteration):
    """Counters, clocks, scale and policy of checkpoints; the flags differ."""
    first, second = (common_state(run.folder, iteration) for run in (one, other))
    for common in (first, second):
        common.pop("config")
    assert first == second


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    @functools.cache
    def one(ranks, words):
        folder = tmp_path_factory.mktemp("run")
        finished = launch.run_forked([*FLAGS, *words.split()], ranks=ranks, script=SCRIPT, cwd=folder)
        return Run(folder, launch.ok(finished))

    return one


def check_alike(train, name, after):
    ranks, words = SETTINGS[name]
    one, run = train(ranks, words), train(ranks, f"{words} {OPTIMISTIC} {after}")
    expected, notes, none = lines(one)
    told, found_notes, rollbacks = lines(run)
    assert expected
    assert none == []
    assert told == expected
    assert found_notes == notes
    assert run.validation == one.validation
    assert run.digests == one.digests
    for iteration in (5, 9) if "--save-interval 5" in words else (9,):
        same_state(one, run, iteration)
        assert launch.digests(run.folder / "ck", iteration) == launch.digests(one.folder / "ck", iteration)
    return rollbacks


@pytest.mark.grid
def test_lines_evaluations_and_checkpoints_are_those_of_synchronous_runs(train):
    # Iteration 8 is skipped with its batch.
    assert check_alike(train, "everything", 0) == [
        1,
        0,
        1,
        0,
        0,
        1,
        0,
        1,
    ]  # the first rank knows of others itself
    assert check_alike(train, "everything", 2) == [0, 0, 0, 0, 0, 1, 0, 0]
    # A line of three iterations counts them all; the first iteration's own line is one more.
    first, three, *later = check_alike(train, "few lines", 0)
    assert (first, three) == (1, 2)
    assert len(later) == 2


@pytest.mark.grid
def test_a_loss_scale_that_moves(train):
    assert sum(check_alike(train, "fp16", 0)) >= 2


@pytest.mark.grid
def test_biases_of_experts_move_and_go_back_with_the_steps(train):
    assert sum(check_alike(train, "experts", 0)) > 0


@pytest.mark.full
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(train, name, after):
    check_alike(train, name, after)


@pytest.mark.grid
def test_the_plan_is_told_and_the_snapshot_is_counted(train):
    run = train(2, f"{OPTIMISTIC} 0 --train-iters 2 --log-fsdp-ledger")
    assert run.plan["post_validation"] == "snapshot"
    sizes = run.plan["snapshot_bytes_per_rank"]
    # fp32: main weights and two moments, and a step count each group.
    told = re.findall(r"number of parameters on .*? rank \(0, (\d)\): (\d+)", run.output)
    weights = [int(count) for _, count in sorted(told)]
    assert len(sizes) == 2
    assert len(weights) == 2, run.output[:3000]
    for size, count in zip(sizes, weights, strict=True):
        assert 12 * count <= size <= 12 * count + 4096
    words = f"{OPTIMISTIC} 0 --post-validation-rollback inverse --train-iters 2 --log-fsdp-ledger"
    inverse = train(2, words)
    assert inverse.plan["post_validation"] == "inverse"
    assert inverse.plan["snapshot_bytes_per_rank"] == [0, 0]
    assert "snapshot" not in tracked_of(inverse)
    assert tracked_of(run)["snapshot"] == sizes[0]
    synchronous = train(2, SETTINGS["fp16"][1]).plan
    assert synchronous["post_validation"] == "off"
    assert "snapshot_bytes_per_rank" not in synchronous


@pytest.mark.grid
def test_a_snapshot_without_room_is_refused_with_the_ways_out(tmp_path):
    words = f"{OPTIMISTIC} 0 --free-bytes 100000".split()
    run = launch.ended(launch.run_forked([*FLAGS, *words], ranks=2, script=SCRIPT, cwd=tmp_path), 2)
    assert "--post-validation-rollback inverse" in run.output
    assert "--use-distributed-optimizer" in run.output
    assert "for the 2 ranks of its machine" in run.output
    assert run.output.count("copies of main weights and moments") == 1
    assert "Traceback" not in run.output
    launch.ok(
        launch.run_forked(
            [*FLAGS, *words, "--post-validation-rollback", "inverse", "--train-iters", "1"],
            ranks=2,
            script=SCRIPT,
            cwd=tmp_path,
        )
    )


# Failures --------------------------------------------------------------------------------------------


def ends_alike(tmp_path, words, after, status):
    """The synchronous run and the post-validated one; exit records and checkpoints are compared."""
    found = []
    for name, more in (("synchronous", ""), ("validated", f"{OPTIMISTIC} {after}")):
        folder = tmp_path / name
        folder.mkdir()
        flags = [*FLAGS, *words.split(), *more.split()]
        run = launch.ended(launch.run_forked(flags, ranks=2, script=SCRIPT, cwd=folder), status)
        record = launch.exit_record(folder / "ck")
        kept = sorted(path.name for path in (folder / "ck").glob("iter_*"))
        found.append(
            (
                Run(folder, run),
                {key: record[key] for key in ("status", "iteration", "checkpoint", "reason")},
                kept,
            )
        )
    (one, record, kept), (run, found_record, found_kept) = found
    assert found_record == record
    assert found_kept == kept
    assert lines(run)[:2] == lines(one)[:2]
    for name in kept:
        iteration = int(name[5:])
        same_state(one, run, iteration)
        assert launch.digests(run.folder / "ck", iteration) == launch.digests(one.folder / "ck", iteration)
    return one, run


BROKEN = "--faults 3:1:4096 6:1:nan:loss"
FAILURES = {
    "abort": (f"{BROKEN} --nan-policy abort --save-interval 4", 0, 5),
    "abort behind a clipped step": ("--faults 5:1:4096 6:0:inf --nan-policy abort", 1, 5),
    "skips": ("--faults 5:0:inf 6:1:nan 7:1:nan:loss --nan-policy skip --nan-max-skips 2", 0, 5),
    "fp16 at its least scale": (
        "--faults 5:0:inf 6:1:nan 7:1:nan:loss --nan-max-skips 2 --fp16 --initial-loss-scale 1 --min-loss-scale 1",
        0,
        5,
    ),
    "persistent": (f"{BROKEN} --nan-policy rerun-once --save-interval 4", 0, 16),
    "persistent behind a clipped step": ("--faults 5:1:4096 6:0:inf --nan-policy rerun-once", 2, 16),
    "other bits": (
        "--faults 6:1:nan:1-1 6:1:inf:2-9 --nan-policy rerun-once",
        0,
        17,
    ),
    "transient": (f"{BROKEN}:1-1 --nan-policy rerun-once", 0, 0),
    "transient, last": ("--faults 9:0:nan:1-1 --nan-policy rerun-once", 0, 0),
    "signal": ("--stop-iteration 4", 0, 75),
    "signal, before it is trusted": ("--stop-iteration 4 --faults 4:1:4096", 2, 75),
    "duration": ("--exit-duration-s 0.0001 --faults 1:1:4096", 0, 0),
    "interval": ("--exit-interval 5 --faults 5:1:4096", 0, 0),
}
SAMPLE = ("persistent", "signal")


@pytest.mark.grid
@pytest.mark.parametrize(
    "name",
    [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in FAILURES if name not in SAMPLE)],
)
def test_ends_as_a_synchronous_run_does(tmp_path, name):
    words, after, status = FAILURES[name]
    _, run = ends_alike(tmp_path, words, after, status)
    assert ("Traceback" in run.output) is False
    if name == "transient":
        assert "iteration 6: transient fault: the second run of the step is finite and is used" in run.output
        assert lines(run)[2] == [0, 0, 1, 0, 0, 1, 0, 0, 0]
    if status == 75:
        go_on(run.folder, f"{words.replace('--stop-iteration 4', '')} {OPTIMISTIC} {after}", tmp_path)


def go_on(folder, words, tmp_path, ranks=2):
    """A resumed run ends in the undisturbed one's bits."""
    flags = [*FLAGS, *words.split()]
    again = launch.ok(launch.run_forked(flags, ranks=ranks, script=SCRIPT, cwd=folder))
    (tmp_path / "straight").mkdir(exist_ok=True)
    straight = launch.ok(launch.run_forked(flags, ranks=ranks, script=SCRIPT, cwd=tmp_path / "straight"))
    assert again.losses()
    assert again.losses().items() <= straight.losses().items()
    assert launch.digests(folder / "ck", 9) == launch.digests(tmp_path / "straight" / "ck", 9)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        ("0:2", 2),
        *(pytest.param(where, 4, marks=pytest.mark.full) for where in ("0:1:step", "1:1", "2:2:step")),
    ],
)
def test_a_rank_that_dies_in_a_rollback(tmp_path, where, ranks):
    """All ranks but the last have stepped when they hear of its gradients; one of them dies while it steps back, the
    others have stepped back, or have gone on."""
    words = f"--faults 3:1:4096 6:1:4096 7:1:4096 --save-interval 2 --num-layers 4 {OPTIMISTIC} 0"
    words += f" --pipeline-model-parallel-size {ranks}"
    flags = [*FLAGS, *words.split(), "--kill-in-rollback", where]
    victim = int(where[0])
    run = launch.run_forked(flags, ranks=ranks, script=SCRIPT, cwd=tmp_path, timeout_s=60)
    assert run.statuses[victim] == -signal.SIGKILL, run.output
    assert all(status == 6 for rank, status in enumerate(run.statuses) if rank != victim), run.output
    assert "Traceback" not in run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"]) == (6, True)
    assert f"rank {victim}" in record["reason"] if victim else "the store is gone" in record["reason"]
    go_on(tmp_path, words, tmp_path, ranks)


# The quick setting ------------------------------------------------------------------------------------

QUICK = "--zero-bubble-v-schedule --allow-padding-num-layers --enable-optimizer-post-validation"


@pytest.mark.grid
@pytest.mark.parametrize("num_layers", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 3)), 5])
def test_three_flags_run_any_model_with_the_bits_of_one_process(tmp_path, num_layers):
    base = [
        *launch.TINY,
        *f"--padded-vocab-size 128 --save ck --save-interval 100 --num-layers {num_layers}".split(),
    ]
    base += "--train-iters 14 --clip-grad 1.2".split()  # trusted from the eleventh clean step on
    found = {}
    for name, ranks, more in (
        ("one", 1, ""),
        ("quick", 2, f"{PP} {QUICK}"),
        ("at once", 2, f"{PP} {QUICK} --post-validation-after 0"),
    ):
        (tmp_path / name).mkdir()
        found[name] = Run(
            tmp_path / name,
            launch.ok(launch.run_forked([*base, *more.split()], ranks=ranks, cwd=tmp_path / name)),
        )
    for name in ("quick", "at once"):
        assert lines(found[name])[:2] == lines(found["one"])[:2]
        assert found[name].digests == found["one"].digests
    assert sum(lines(found["at once"])[2]) > 0


# Schedules that are solved again ------------------------------------------------------------------------


@pytest.mark.grid
def test_a_schedule_is_solved_again_while_a_step_is_undecided(tmp_path):
    base = "--clip-grad 0 --num-layers 5 --allow-padding-num-layers --zero-bubble-v-schedule"
    timers = "--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 5"
    found = []
    for name, more in (("synchronous", ""), ("validated", f"{OPTIMISTIC} 0 {timers}")):
        (tmp_path / name).mkdir()
        flags = [*FLAGS, *base.split(), *more.split()]
        found.append(
            Run(
                tmp_path / name,
                launch.ok(launch.run_forked(flags, ranks=2, script=SCRIPT, cwd=tmp_path / name)),
            )
        )
    one, run = found
    assert lines(run)[:2] == lines(one)[:2]
    assert run.digests == one.digests
    assert re.search(r"^ > pipeline solved again after iteration \d+ \(iterations 2-4\)", run.output, re.M), (
        run.output
    )
    # A step that repeats forwards is like no other: it is not measured. Here is none.
    bubbles = [int(n) for n in re.findall(r"^ pipeline bubble of iteration (\d+): ", run.output, re.M)]
    assert bubbles[:6] == [1, 2, 3, 4, 5, 6]


def tracked_of(run):
    """Kind -> peak bytes of rank 0, after the first iteration."""
    _, told = run.output.split("bytes of the sharding engine on rank 0, after iteration 1:")
    rows = re.findall(r"^   (\w+) +[\d,]+ +([\d,]+)$", told, re.MULTILINE)
    return {kind: int(peak.replace(",", "")) for kind, peak in rows}
