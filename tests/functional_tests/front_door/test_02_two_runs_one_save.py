"""A run holds a lease on its --save folder, and its ranks end when launcher or store are gone: one run a folder."""

import json
import os
import signal
import time

import pytest

from megatron.training.guard.lease_holder import process_start
from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty.py"
SAVING = ["--save", "ck", "--load", "ck", "--save-interval", "1"]
ENDLESS = [*launch.TINY, "--train-iters", "100000", *SAVING]
# Rank 0 holds still in an iteration, so that nothing changes in the folder but by others.
ASLEEP = [*ENDLESS, "--sleep-iteration", "3", "--fault-rank", "0", "--fault-microbatch", "0"]


def up_to(iteration):
    return [*ENDLESS, "--exit-interval", str(iteration)]


def content(folder):
    """Every file below a folder, with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.grid
def test_a_held_lease_ends_the_second_run_with_3_and_nothing_in_the_folder_changes(tmp_path):
    with launch.forked(ASLEEP, script=FAULTY, cwd=tmp_path) as holder:
        holder.wait_for("rank 0 sleeps")
        before = content(tmp_path)
        lease = json.loads((tmp_path / "ck" / "lease.json").read_text())
        assert lease["pid"] == holder.pids[0]
        second = launch.ended(launch.run_forked(up_to(3), ranks=2, cwd=tmp_path), 3)
        assert second.output.count("another run holds this folder") == 1, second.output
        assert f"host {lease['host']}, pid {lease['pid']}, started {lease['started']}" in second.output
        assert "last heartbeat " in second.output
        assert "another --save" in second.output
        assert launch.run_forked([*up_to(3), "--lr", "x"], cwd=tmp_path).status == 2
        assert content(tmp_path) == before, "neither a refused run nor a refused launch line wrote anything"
    # Killed on this host: free at once, with a word about it.
    after = launch.ok(launch.run_forked(up_to(4), ranks=2, cwd=tmp_path))
    assert f"took over the lease of another run (host {lease['host']}, pid {lease['pid']}" in after.output
    assert "that process is gone" in after.output
    assert list(after.losses()) == [3, 4]
    assert not (tmp_path / "ck" / "lease.json").exists(), "a run that ends gives the folder free"


@pytest.mark.grid
def test_a_run_that_was_stopped_for_a_minute_finds_its_lease_taken_and_commits_nothing(tmp_path):
    with launch.forked([*ENDLESS, "--slow-s", "0.02"], script=FAULTY, cwd=tmp_path) as first:
        first.wait_for("iteration        2/")
        first.signal(signal.SIGSTOP)
        lease = tmp_path / "ck" / "lease.json"
        beat = os.stat(lease).st_mtime
        os.utime(lease, (beat - 61, beat - 61))
        second = launch.ok(launch.run_forked(up_to(5), cwd=tmp_path))
        assert "no heartbeat for 6" in second.output
        third = [*ENDLESS, *"--sleep-iteration 8 --fault-rank 0 --fault-microbatch 0".split()]
        with launch.forked(third, script=FAULTY, cwd=tmp_path) as holder:
            holder.wait_for("rank 0 sleeps")
            before = content(tmp_path)
            first.signal(signal.SIGCONT)
            run = launch.ended(first.wait(), 3)
            assert content(tmp_path) == before
    assert (
        f"its lease was taken by another run (host {os.uname().nodename}, pid {holder.pids[0]}" in run.output
    )
    assert "Traceback" not in run.output


@pytest.mark.grid
def test_a_rank_ends_with_6_when_the_host_of_the_store_is_gone_whatever_it_waits_for(tmp_path):
    """Rank 1 sits in its forward; rank 0, which has the store, is killed."""
    flags = [*ENDLESS, *"--sleep-iteration 3 --fault-rank 1 --fault-microbatch 0".split()]
    with launch.forked(flags, ranks=2, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("rank 1 sleeps")
        group.kill(0)
        run = group.wait(timeout_s=30)
    assert run.statuses == (-signal.SIGKILL, 6), run.output
    assert "the store at 127.0.0.1:" in run.output
    assert "this rank was at step 3, phase forward-backward" in run.output
    assert launch.exit_record(tmp_path / "ck")["status"] == 6


@pytest.mark.grid
def test_kill_9_of_torchrun_ends_its_ranks_and_the_same_command_goes_on(tmp_path):
    flags = [*ENDLESS, *"--sleep-iteration 3 --fault-rank 0 --fault-microbatch 0".split()]
    with launch.started(flags, ranks=2, script=FAULTY, cwd=tmp_path) as process:
        launch.read_until(process, lambda line: "rank 0 sleeps" in line)
        ranks = launch.descendants(process.pid)
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=30)  # to the end of file: nobody holds the pipe any more
        for pid in ranks:
            assert not process_start(pid), "a rank is still there"
    assert f"the launcher (pid {process.pid}) is gone; this rank was at step 3" in output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"]) == (6, True)
    again = launch.ok(launch.run_forked(up_to(3), ranks=2, cwd=tmp_path))
    assert list(again.losses()) == [3]


@pytest.mark.grid
def test_a_run_that_ends_early_gives_its_folder_free(tmp_path):
    error = [*ENDLESS, "--inject-nan-iteration", "1"]
    launch.ended(launch.run_forked(error, script=FAULTY, cwd=tmp_path), 5)
    assert not (tmp_path / "ck" / "lease.json").exists()
    with launch.forked(ASLEEP, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("rank 0 sleeps")
        assert (tmp_path / "ck" / "lease.json").exists()
        group.signal(signal.SIGTERM)
        time.sleep(0.4)
        group.signal(signal.SIGTERM)
        launch.ended(group.wait(), 75)
    assert not (tmp_path / "ck" / "lease.json").exists()
