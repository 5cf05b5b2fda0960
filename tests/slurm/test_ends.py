"""What must not come back is not requeued: status and reason are in the job's log and in what Slurm shows."""

import os
import signal

import pytest

from tests.harness import launch
from tests.slurm.runs import FAULTY, FLAGS, ends_as_undisturbed, started

NAN = ("--inject-nan-iteration", "3", "--nan-policy", "abort")


def damaged(folder):
    """A checkpoint of iteration 2 with a flipped bit in a shard."""
    flags = [*FLAGS[:-2], "--exit-interval", "2", "--save", "ck"]
    launch.ok(launch.run_forked(flags, ranks=2, script=str(FAULTY), cwd=folder))
    for checkpoint in (folder / "ck").glob("iter_*"):
        shard = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)


@pytest.mark.parametrize(
    ("flags", "before", "status", "why"),
    [
        (
            ("--hiden-size", "4"),
            None,
            2,
            "status 2, iteration null: configuration: 1 problem 1. [unknown-flag] ",
        ),
        ((), damaged, 3, "status 3, "),
        (NAN, None, 5, "status 5, iteration 2: "),
    ],
    ids=["wrong flag", "damaged checkpoint", "diverged"],
)
def test_a_mistake_stays_away(slurm, tmp_path, flags, before, status, why):
    if before:
        before(tmp_path)
    job = started(slurm, tmp_path, *flags)
    shown = job.wait("FAILED")
    assert shown["ExitCode"] == f"{status}:0"
    assert shown["Restarts"] == "0"
    assert shown["Comment"].startswith(why)
    assert f"train.sbatch: {why}" in job.log
    assert job.log.rstrip().endswith("; not requeued")


def all_killed(slurm, job):
    """Launchers too, so that nobody is left to write exit.json."""
    pids = [pid for node in ("n1", "n2") for pid in (*job.ranks(node), job.launcher(node))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_killed_without_a_word(slurm, tmp_path):
    """As out of memory: back once for each new checkpoint, and left where there is none."""
    flags = ("--save-interval", "5")
    job = started(slurm, tmp_path, *flags, "--sleep-iteration", "8")
    job.wait_for("rank 1 sleeps")
    all_killed(slurm, job)
    job.wait_for(
        r"killed without a word \(status 137, no exit.json\), after a new checkpoint \(5\); requeued"
    )
    job.wait_for("(?s)(rank 1 sleeps.*){2}")
    all_killed(slurm, job)
    shown = job.wait("FAILED")
    why = "killed without a word (status 137, no exit.json), without a new checkpoint since it began"
    assert shown["Comment"] == why
    assert f"{why}; not requeued" in job.log
    assert (shown["ExitCode"], shown["Restarts"]) == ("137:0", "1")
    ends_as_undisturbed(started(slurm, tmp_path, *flags), tmp_path, restarts=0, attempts=1)
