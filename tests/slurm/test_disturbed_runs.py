"""Whatever Slurm, its users and its machines do to a run under way: it ends in the undisturbed run's bits."""

import os
import signal

import pytest

from tests.slurm.runs import (
    FOUR_RANKS,
    ends_as_undisturbed,
    reaches,
    resumed_at,
    started,
    trained,
    undisturbed,
)


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks_per_node", "flags"),
    # What a run was started with (test_scripts.py) is asked of such a one, too.
    [pytest.param(1, (), marks=pytest.mark.full), (2, FOUR_RANKS)],
    ids=["2x1", "2x2"],
)
def test_two_nodes(slurm, tmp_path, ranks_per_node, flags):
    started(slurm, tmp_path, *flags, ranks_per_node=ranks_per_node).wait()
    assert trained(tmp_path / "ck") == undisturbed(2 * ranks_per_node, *flags)


@pytest.mark.parametrize("node", ["n1", pytest.param("n2", marks=pytest.mark.full)])
def test_a_rank_is_killed(slurm, tmp_path, node):
    """Its launchers start all ranks again."""
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    kill(*job.ranks(node))
    job.wait_for("all of them start again")
    ends_as_undisturbed(job, tmp_path, restarts=0, attempts=1)
    assert len(resumed_at(job.log)) == 1


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["with the store", "without"])
def test_a_launcher_is_killed(slurm, tmp_path, node):
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    kill(job.launcher(node))
    job.wait_for("started again on the same nodes")
    ends_as_undisturbed(job, tmp_path, restarts=0, attempts=2)


@pytest.mark.full
def test_a_node_is_lost(slurm, tmp_path):
    """Nobody tells its ranks: the next attempt waits for the lease of those that go on."""
    job = started(slurm, tmp_path, "--slow-s", "2")
    reaches(job, tmp_path, 2)
    ranks = job.ranks("n2")
    slurm.lose_node("n2")
    job.until(lambda: job.shown["Restarts"] == "1", "back in the queue")
    slurm.start_node("n2")
    job.wait_for("successfully loaded checkpoint")
    assert not set(ranks) & set(job.ranks("n2"))
    ends_as_undisturbed(job, tmp_path, restarts=1, attempts=2)


def test_requeued_by_hand(slurm, tmp_path):
    """Its processes have a moment to save in, or are killed: on from the newest checkpoint."""
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    slurm.commands("scontrol", "requeue", job.id)
    ends_as_undisturbed(job, tmp_path, restarts=1, attempts=2)


def test_preempted(slurm, tmp_path):
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    urgent = slurm.submit("--wrap=true", cwd=tmp_path, partition="high", nodes=2, exclusive=None)
    job.wait_for("status 75, iteration .*: received SIGTERM; requeued")
    ends_as_undisturbed(job, tmp_path, restarts=1, attempts=2)
    assert urgent.shown["JobState"] == "COMPLETED"


@pytest.mark.full
def test_the_time_limit(slurm, tmp_path):
    """Slurm's signal comes ahead of it; its limits are whole minutes, so the limit comes to the run. On a machine with
    other work it takes half a minute until launchers and srun have ended."""
    job = started(slurm, tmp_path, "--slow-s", "3", signal="TERM@120", env={"SIGNAL_LEAD_S": "120"})
    reaches(job, tmp_path, 1)
    minutes = job.ran_s() // 60 + 3  # the signal within a minute
    slurm.commands("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
    job.wait_for("status 75, iteration .*: received SIGTERM; requeued")
    slurm.commands("scontrol", "update", f"JobId={job.id}", "TimeLimit=20")
    ends_as_undisturbed(job, tmp_path, restarts=1, attempts=2)


def test_requeues_are_bounded(slurm, tmp_path):
    """The reason stands in the log and in what Slurm shows; submitted again, it goes on."""
    job = started(slurm, tmp_path, env={"MAX_REQUEUES": "1"})
    for iteration in (2, 5):
        reaches(job, tmp_path, iteration)
        attempt = len(resumed_at(job.log))
        slurm.commands("scancel", "--signal=TERM", job.id)
        job.wait_for(f"(?s)(received SIGTERM.*){{{attempt + 1}}}")
    shown = job.wait("FAILED")
    why = "requeued 1 times, as often as MAX_REQUEUES=1 allows; last: status 75, iteration"
    assert why in job.log
    assert why in shown["Comment"]
    assert (shown["ExitCode"], shown["Restarts"]) == ("75:0", "1")
    ends_as_undisturbed(started(slurm, tmp_path), tmp_path, restarts=0, attempts=1)


def test_cancelled(slurm, tmp_path):
    """It saves, ends and stays away; submitted again, it goes on."""
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    slurm.commands("scancel", job.id)
    shown = job.wait("CANCELLED")
    assert shown["Restarts"] == "0"
    assert "requeued" not in job.log
    slurm.until(lambda: (tmp_path / "ck" / "exit.json").exists(), "the run has ended")
    ends_as_undisturbed(started(slurm, tmp_path), tmp_path, restarts=0, attempts=1)
