"""Whatever Slurm, its users and its machines do to a run under way: it ends in the undisturbed run's bits."""

import os
import signal

import pytest

from tests.slurm.runs import (
    FOUR_RANKS,
    exit_status,
    reaches,
    resumed_at,
    started,
    trained,
    undisturbed,
)


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def ends_as_undisturbed(job, folder, *, restarts, attempts):
    """restarts: how often Slurm put it back into the queue. attempts: how often its ranks were started."""
    shown = job.wait()
    assert trained(folder / "ck") == undisturbed()
    assert exit_status(folder) == 0
    assert int(shown["Restarts"]) == restarts, job.log
    logs = sorted((folder / "ck" / f"slurm-{job.id}").iterdir())
    assert len(logs) == attempts, logs
    assert len(resumed_at(job.log)) == attempts - 1, job.log
    assert not list((folder / "ck").glob("lease.json*"))


@pytest.mark.parametrize(("ranks_per_node", "flags"), [(1, ()), (2, FOUR_RANKS)], ids=["2x1", "2x2"])
def test_two_nodes(slurm, tmp_path, ranks_per_node, flags):
    started(slurm, tmp_path, *flags, ranks_per_node=ranks_per_node).wait()
    assert trained(tmp_path / "ck") == undisturbed(2 * ranks_per_node, *flags)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_rank_is_killed(slurm, tmp_path, node):
    """The nodes are still ours: the next attempt begins on them at once."""
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    kill(*job.ranks(node))
    job.wait_for("started again on the same nodes")
    ends_as_undisturbed(job, tmp_path, restarts=0, attempts=2)


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["with the store", "without"])
def test_a_launcher_is_killed(slurm, tmp_path, node):
    job = started(slurm, tmp_path)
    reaches(job, tmp_path, 3)
    kill(job.launcher(node))
    job.wait_for("requeued|started again")
    ends_as_undisturbed(job, tmp_path, restarts=1, attempts=2)


def test_requeued_by_hand(slurm, tmp_path):
    """No time is left to save: on from the newest checkpoint."""
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
