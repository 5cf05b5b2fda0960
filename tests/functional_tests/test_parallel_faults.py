"""What goes wrong over stages and tensor parallel ranks: wrong flags, wrong models, NaN, peers that die or hang."""

import re
import signal
import time

import pytest

from tests.harness import launch
from tests.harness.faults import check_survivor_of_a_sleeping_peer
from tests.harness.runs import refused_before_torch

FAULTY = "tests/functional_tests/trainers/faulty.py"
PLAIN = "tests/functional_tests/trainers/plain_pipeline.py"
FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 6 --save ck --save-interval 3".split(),
]
PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
CHUNKS = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"


def faulty(folder, flags, ranks=2):
    return launch.run_forked([*FLAGS, *flags.split()], ranks=ranks, script=FAULTY, cwd=folder)


# --- wrong flags


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (f"{CHUNKS} --global-batch-size 2",
         ["--global-batch-size 2 has 1 microbatch a rank, fewer than the 2 that interleaving takes",
          "(--pipeline-model-parallel-size)", "larger global batch"]),
        (f"{CHUNKS} --microbatch-group-size-per-virtual-pipeline-stage 5",
         ["--microbatch-group-size-per-virtual-pipeline-stage", "fewer than the 5"]),
        (f"{CHUNKS} --rampup-batch-size 2 2 16 --train-samples 64", ["--rampup-batch-size", "fewer than the 2"]),
        (f"{TP2} --num-attention-heads 5 --hidden-size 40",
         ["--num-attention-heads 5 is not divisible by --tensor-model-parallel-size 2",
          "change --tensor-model-parallel-size"]),
        (f"{TP2} --padded-vocab-size 1 --vocab-size 1",
         ["--padded-vocab-size 1 leaves the last of --tensor-model-parallel-size 2 ranks without a row",
          "leave --padded-vocab-size out"]),
        (f"{CHUNKS} --num-layers 2",
         ["--num-layers 2", "is not divisible by 2 pipeline ranks x 2 chunks", "--allow-padding-num-layers"]),
        (f"{PP2} --num-layers 3 --decoder-first-pipeline-num-layers 3",
         ["leaves stage 1 without layers", "--pipeline-model-parallel-layout"]),
        (f"{CHUNKS} --pipeline-schedule gpipe",
         ["--pipeline-schedule gpipe", "one chunk", "leave the flags of chunks out"]),
        (f"{PP2} --pipeline-model-parallel-layout Ett|tL", ["holds 3 layers, --num-layers asks for 4"]),
        (f"{TP2} --sequence-parallel --seq-length 31",
         ["--seq-length 31 does not divide into 2 parts for --sequence-parallel"]),
        ("--tensor-model-parallel-size 3", ["--tensor-model-parallel-size", "2"]),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_before_torch(tmp_path, flags, says):
    """Flags and fix."""
    output = refused_before_torch([*FLAGS, *flags.split()], ranks=2, folder=tmp_path)
    for words in says:
        assert words in output, output
    assert "fix: " in output


# --- wrong models


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (f"{PP2} --without set_input_tensor",
         "--pipeline-model-parallel-size: Part has no set_input_tensor"),
        (TP2, "--tensor-model-parallel-size needs a model that says which part of each weight it holds"),
        (f"{CHUNKS} --without vp_stage",
         "interleaving builds several chunks a rank: give the model provider a third argument vp_stage"),
        (f"{PP2} --init-model-with-meta-device", "--init-model-with-meta-device needs a model that says"),
        (f"{CHUNKS} --same-names", "give the parameters of different chunks different names"),
        (f"{PP2} --same-names",
         "pipeline stages 0 and 1 both have a parameter 'blocks.0.up.weight': give the parameters of"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_cut(tmp_path, flags, says):
    words = [*FLAGS, *flags.split()]
    with launch.forked(words, script=PLAIN, ranks=2, cwd=tmp_path) as group:
        group.wait_for(re.escape(says), timeout_s=30)
        run = group.wait(timeout_s=30)
    # 6: a rank whose own part is fine, once the other has left
    assert set(run.statuses) <= {2, 6}, run.output
    assert 2 in run.statuses
    assert "Traceback" not in run.output


# --- NaN


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "rank", "where"),
    [
        (PP2, 1, "loss"),
        (CHUNKS, 1, "loss"),
        (PP2, 1, "grad"),  # and with it every gradient of the first stage
        (PP2, 0, "grad"),  # what arrives from the second stage is finite
        (TP2, 1, "loss"),  # and with it every gradient of rank 0
    ],
)
def test_abort_names_rank_and_place(tmp_path, flags, rank, where):
    flags += (
        f" --inject-nan-iteration 5 --inject-nan-rank {rank} --inject-where {where} --inject-microbatch 1"
    )
    run = launch.ended(faulty(tmp_path, flags), 5)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["iteration"], record["checkpoint"]) == (5, 4, "ck/iter_0000003")
    what = rf"the loss of microbatch 1 and the gradient of [\w.]+ are not finite on rank {rank}"
    if where == "grad":
        what = rf"the gradient of [\w.]+ is not finite on rank {rank}"
    assert re.search(f"iteration 5: {what}", record["reason"]), record["reason"]
    assert run.output.count("error (non finite") == 1
    assert "Traceback" not in run.output


@pytest.mark.grid
def test_skip_leaves_every_stage_alone(tmp_path):
    flags = f"{PP2} --inject-nan-iteration 2 --inject-lasts 2 --nan-policy skip --inject-nan-rank 1 --save-interval 1"
    run = launch.ok(faulty(tmp_path, flags))
    saved = [launch.digests(tmp_path / "ck", iteration) for iteration in (1, 2, 3, 4)]
    assert saved[1] == saved[0]
    assert saved[2] == saved[0]
    assert (
        not saved[3].items() & {name: d for name, d in saved[0].items() if name.endswith(".weight")}.items()
    )
    assert run.output.count("number of skipped iterations:   1 | number of nan iterations:   1") == 2


@pytest.mark.grid
def test_a_transient_fault_is_run_again(tmp_path):
    """The whole pipeline runs the step a second time, on the batches it kept."""
    (tmp_path / "clean").mkdir()
    clean = launch.ok(launch.run_forked([*FLAGS, *PP2.split()], ranks=2, cwd=tmp_path / "clean"))
    flags = f"{PP2} --inject-nan-iteration 4 --inject-how once --inject-nan-rank 1 --nan-policy rerun-once"
    run = launch.ok(faulty(tmp_path, flags))
    assert "iteration 4: transient fault: the second run of the step is finite and is used" in run.output
    assert run.losses() == clean.losses()
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(tmp_path / "clean" / "ck", 6)


# --- peers that die or hang


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "victim", "microbatch"), [(PP2, 1, 1), (PP2, 1, 3), (PP2, 0, 1), (TP2, 1, 1)]
)
def test_survivor_of_a_killed_peer(tmp_path, flags, victim, microbatch):
    """Killed in the middle of a step: the other ends with status 6, and says which rank, stage and step."""
    flags += f" --kill-iteration 4 --fault-rank {victim} --fault-microbatch {microbatch}"
    with launch.forked([*FLAGS, *flags.split()], ranks=2, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        start = time.monotonic()
        run = group.wait(timeout_s=30)
        assert time.monotonic() - start < 15.0  # far below --distributed-timeout-minutes
    survivor = 1 - victim
    assert run.statuses[victim] == -signal.SIGKILL
    assert run.statuses[survivor] == 6, run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["rank"], record["iteration"]) == (6, survivor, 3)
    assert record["requeue"]
    if victim == 1:  # without a launcher rank 0 is also the store's host
        assert "rank 1 (host " in record["reason"]
        assert "step 4, phase forward-backward" in record["reason"]
    told = re.search(r"error \(peer lost, exit status 6\): (.*)", run.output)
    assert told, run.output
    if flags.startswith(PP2):  # with the computation that waited and the transfer that broke
        operation = rf"{survivor}(?:F|BW|(?:SEND|RECV)_[FB])\d"
        place = rf"rank {survivor}: stage {survivor}, iteration 4, {operation}.*: lost rank {victim} in \w+ over group"
    else:  # with the computation, which has many collectives
        place = r"rank 0: stage 0, iteration 4, 0(?:F|BW)\d: lost a peer in \w+ over group 'tp'"
    assert re.match(place, told[1]), told[1]
    assert record["reason"].endswith(told[1])


@pytest.mark.full
def test_all_survivors_of_a_killed_stage(tmp_path):
    """A stage in the middle of four: its neighbours lose it, the others lose their neighbours."""
    flags = "--pipeline-model-parallel-size 4 --kill-iteration 4 --fault-rank 1".split()
    with launch.forked([*FLAGS, *flags], ranks=4, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        run = group.wait(timeout_s=30)
    assert run.statuses == (6, -signal.SIGKILL, 6, 6), run.output


@pytest.mark.grid
@pytest.mark.parametrize("flags", [PP2, pytest.param(TP2, marks=pytest.mark.full)])
def test_survivor_of_a_sleeping_peer(tmp_path, flags):
    check_survivor_of_a_sleeping_peer([*FLAGS, *flags.split()], script=FAULTY, folder=tmp_path, within_s=20.0)


@pytest.mark.grid
def test_a_killed_pipeline_goes_on_bit_for_bit(tmp_path):
    """The checkpoint that the survivors leave is whole: the same command ends in the undisturbed run's bits."""
    words = [*FLAGS, *PP2.split(), "--load", "ck"]
    (tmp_path / "clean").mkdir()
    clean = launch.ok(launch.run_forked(words, ranks=2, cwd=tmp_path / "clean"))
    killed = launch.run_forked(
        [*words, *"--kill-iteration 5 --fault-rank 1".split()], ranks=2, script=FAULTY, cwd=tmp_path
    )
    assert killed.statuses == (6, -signal.SIGKILL), killed.output
    again = launch.ok(launch.run_forked(words, ranks=2, cwd=tmp_path))
    assert {**killed.losses(), **again.losses()} == clean.losses()
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(tmp_path / "clean" / "ck", 6)
