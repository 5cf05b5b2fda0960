"""What goes wrong in sharded runs: peers that die or hang, NaN, checkpoints whose bits changed.

Nothing may be worse than without sharding: the same exit status, the same culprit, the same way back.
"""

import re
import shutil
import signal
import time

import pytest

from tests.harness import launch
from tests.harness.faults import check_survivor_of_a_sleeping_peer

FAULTY = "tests/functional_tests/trainers/faulty.py"
FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 6 --save ck --save-interval 3 --load ck".split(),
]
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"
ZERO2, ZERO3 = f"{FSDP} optim_grads", f"{FSDP} optim_grads_params"
STEP = f"{ZERO3} --fsdp-reshard-policy step"
HSDP = f"{ZERO3} --num-distributed-optimizer-instances 2"
OPTIM = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
full = pytest.mark.full


def faulty(folder, flags, ranks=2):
    return launch.run_forked([*FLAGS, *flags.split()], ranks=ranks, script=FAULTY, cwd=folder)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Folder and run in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("clean")
    return folder, launch.ok(launch.run_forked([*FLAGS, *ZERO3.split()], ranks=2, cwd=folder))


# --- peers that die or hang


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "victim", "microbatch"),
    [
        (ZERO3, 1, 1),
        pytest.param(ZERO3, 1, 0, marks=full),
        pytest.param(ZERO3, 0, 1, marks=full),
        pytest.param(ZERO2, 1, 1, marks=full),
        pytest.param(STEP, 1, 1, marks=full),
        pytest.param(OPTIM, 1, 0, marks=full),
    ],
)
def test_survivor_of_a_killed_peer(tmp_path, flags, victim, microbatch):
    """Killed between gathers of a step: the other ends with status 6 and names it; no gather hangs on."""
    flags += f" --kill-iteration 5 --fault-rank {victim} --fault-microbatch {microbatch}"
    with launch.forked([*FLAGS, *flags.split()], ranks=2, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("iteration        4/")
        start = time.monotonic()
        run = group.wait(timeout_s=60)
        assert time.monotonic() - start < 30.0  # far below --distributed-timeout-minutes
    survivor = 1 - victim
    assert run.statuses[victim] == -signal.SIGKILL
    assert run.statuses[survivor] == 6, run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["rank"], record["requeue"]) == (6, survivor, True)
    assert record["checkpoint"] == "ck/iter_0000003"
    if victim == 1:  # without a launcher rank 0 is also the store's host
        assert "rank 1 (host " in record["reason"]
        assert "step 5, phase forward-backward" in record["reason"]


@pytest.mark.grid
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, clean):
    """kill -9 of one rank in the middle of a step; the same command then ends in the undisturbed run's bits."""
    folder, undisturbed = clean
    killed = faulty(tmp_path, f"{ZERO3} --kill-iteration 5 --fault-rank 1")
    assert killed.statuses == (6, -signal.SIGKILL), killed.output
    again = launch.ok(launch.run_forked([*FLAGS, *ZERO3.split()], ranks=2, cwd=tmp_path))
    assert list(again.losses()) == [4, 5, 6]
    assert {**killed.losses(), **again.losses()} == undisturbed.losses()
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(folder / "ck", 6)


@pytest.mark.grid
@full
def test_all_survivors_of_a_killed_rank_of_an_instance(tmp_path):
    """Its own instance loses it in a gather or a reduction, the other instance loses those that left."""
    flags = f"{HSDP} --kill-iteration 5 --fault-rank 1 --fault-microbatch 0"
    run = launch.run_forked([*FLAGS, *flags.split()], ranks=4, script=FAULTY, cwd=tmp_path)
    assert run.statuses == (6, -signal.SIGKILL, 6, 6), run.output


@pytest.mark.grid
@pytest.mark.parametrize("flags", [ZERO3, pytest.param(OPTIM, marks=full)])
def test_survivor_of_a_sleeping_peer(tmp_path, flags):
    """A gather that never ends: after the timeout status 6, and who does not move."""
    check_survivor_of_a_sleeping_peer([*FLAGS, *flags.split()], script=FAULTY, folder=tmp_path, within_s=40.0)


# --- NaN


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "rank", "where"),
    [
        (ZERO3, 1, "grad"),
        (ZERO3, 1, "loss"),
        pytest.param(ZERO3, 0, "grad", marks=full),
        pytest.param(ZERO2, 1, "grad", marks=full),
        pytest.param(STEP, 0, "grad", marks=full),
        pytest.param(f"{ZERO3} --fsdp-double-buffer", 1, "grad", marks=full),
        pytest.param(OPTIM, 0, "grad", marks=full),
    ],
)
def test_abort_names_rank_and_place(tmp_path, flags, rank, where):
    """Every rank's shard holds some of the NaN once it is reduced: still the rank that made it is named."""
    flags += (
        f" --inject-nan-iteration 5 --inject-nan-rank {rank} --inject-where {where} --inject-microbatch 1"
    )
    run = launch.ended(faulty(tmp_path, flags), 5)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["iteration"], record["checkpoint"]) == (5, 4, "ck/iter_0000003")
    what = rf"the loss of microbatch 1 and the gradient of (?:decoder|embedding)\.[\w.]+ are not finite on rank {rank}"
    if where == "grad":
        what = rf"the gradient of (?:decoder|embedding)\.[\w.]+ is not finite on rank {rank}"
    assert re.search(f"iteration 5: {what}", record["reason"]), record["reason"]
    assert run.output.count("error (non finite") == 1
    assert "Traceback" not in run.output


@pytest.mark.grid
@pytest.mark.parametrize("flags", [ZERO3, pytest.param(STEP, marks=full), pytest.param(OPTIM, marks=full)])
def test_skip_leaves_every_shard_alone(tmp_path, flags):
    flags += (
        " --inject-nan-iteration 2 --inject-lasts 2 --nan-policy skip --inject-nan-rank 1 --save-interval 1"
    )
    run = launch.ok(faulty(tmp_path, flags))
    saved = [launch.digests(tmp_path / "ck", iteration) for iteration in (1, 2, 3, 4)]
    assert saved[1] == saved[0]
    assert saved[2] == saved[0]
    assert all(saved[3][name] != digest for name, digest in saved[0].items() if name.endswith(".weight"))
    assert run.output.count("number of skipped iterations:   1 | number of nan iterations:   1") == 2


@pytest.mark.grid
@pytest.mark.parametrize("where", ["loss", pytest.param("grad", marks=full)])
def test_a_transient_fault_is_run_again(tmp_path, clean, where):
    """The step is run a second time on the same weights, gathered once more: nothing of the first run is left."""
    folder, undisturbed = clean
    flags = f"{ZERO3} --inject-nan-iteration 4 --inject-how once --inject-nan-rank 1 --nan-policy rerun-once"
    run = launch.ok(faulty(tmp_path, f"{flags} --inject-where {where}"))
    assert "iteration 4: transient fault: the second run of the step is finite and is used" in run.output
    assert run.losses() == undisturbed.losses()
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(folder / "ck", 6)


# --- damaged checkpoints


@pytest.mark.grid
@pytest.mark.parametrize("flags", [ZERO3, pytest.param("", marks=full)])
def test_a_flipped_bit_in_a_shard(tmp_path, clean, flags):
    """Status 3, naming the file, whoever wrote it and whoever reads it; the checkpoint before it is offered."""
    folder, _ = clean
    shutil.copytree(folder / "ck", tmp_path / "ck")
    shards = sorted((tmp_path / "ck" / "iter_0000006").glob("shard_*.safetensors"))
    assert len(shards) == 2  # every rank wrote its own
    data = bytearray(shards[1].read_bytes())
    data[len(data) * 2 // 3] ^= 4
    shards[1].write_bytes(data)
    words = [*FLAGS, *flags.split()]
    run = launch.ended(launch.run_forked(words, ranks=2, cwd=tmp_path), 3)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"]) == (3, False)
    assert f"ck/iter_0000006/{shards[1].name}: SHA-256 is " in record["reason"]
    assert run.output.count("error (checkpoint, exit status 3)") == 1
    assert "Traceback" not in run.output
