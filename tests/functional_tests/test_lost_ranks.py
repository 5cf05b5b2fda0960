"""Launchers of two machines start all ranks again where one is lost, without being started again themselves."""

import os
import re
import signal
import time

import pytest

from tests.functional_tests.doors_again.test_15_launch import Launched
from tests.harness import launch

FAULTY = launch.ROOT / "tests" / "functional_tests" / "trainers" / "faulty.py"
ITERATIONS = 12
FLAGS = [
    *launch.TINY,
    *f"--train-iters {ITERATIONS} --save ck --load ck --save-interval 1 --use-custom-fsdp".split(),
]


def started(folder, *more, script=FAULTY):
    """Launchers of one rank each, and the files that have what they say."""
    port, launchers, outputs = launch.free_port(), [], []
    for machine in range(2):
        outputs.append(folder / f"output{machine}")
        outputs[-1].touch()
        where = ["--nnodes", 2, "--node-rank", machine, "--master-addr", "127.0.0.1", "--master-port", port]
        words = [*where, "--restart-lost-ranks", "--", script, *FLAGS, *more]
        launchers.append(Launched(folder, words, outputs[-1]))
    return launchers, outputs


def kill_the_rank_of(launcher, folder, iteration):
    """Once this iteration is saved."""
    tracker = folder / "ck" / "latest_checkpointed_iteration.txt"
    while not tracker.exists() or int(tracker.read_text()) < iteration:
        assert launcher.alive()
        time.sleep(0.01)
    (rank,) = (pid for pid in launch.descendants(launcher.pid) if os.getsid(pid) == pid)
    os.kill(rank, signal.SIGKILL)


@pytest.mark.grid
def test_ranks_start_again_whichever_is_lost_and_end_in_the_same_bits(tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    launch.ok(launch.run_forked(FLAGS, ranks=2, script=str(FAULTY), cwd=plain))
    launchers, outputs = started(tmp_path, "--slow-s", "0.1")
    for attempt, launcher in enumerate(launchers):
        kill_the_rank_of(launcher, tmp_path, 3 * attempt + 2)
        while outputs[0].read_text().count("all of them start again") <= attempt:
            time.sleep(0.01)
    assert [launcher.wait() for launcher in launchers] == [0, 0], [file.read_text() for file in outputs]
    assert len(re.findall("successfully loaded checkpoint", outputs[0].read_text())) == 2
    assert launch.digests(tmp_path / "ck", ITERATIONS) == launch.digests(plain / "ck", ITERATIONS)
    losses = [
        [line for line in launch.metrics_lines(folder) if "lm loss" in line]
        for folder in (tmp_path / "ck", plain / "ck")
    ]
    assert [line["lm loss"] for line in losses[0]] == [line["lm loss"] for line in losses[1]]


@pytest.mark.grid
def test_a_run_that_ends_for_a_reason_of_its_own_stays_away(tmp_path):
    launchers, outputs = started(tmp_path, "--inject-nan-iteration", 4, "--nan-policy", "abort")
    assert {launcher.wait() for launcher in launchers} <= {5, 6}
    assert launch.exit_record(tmp_path / "ck")["status"] == 5
    assert not any("start again" in file.read_text() for file in outputs)


ENDS = """
import os, pathlib, signal, time
tracker = pathlib.Path("ck/latest_checkpointed_iteration.txt")
if os.environ["RANK"] == "0":
    tracker.parent.mkdir()
    tracker.write_text("1")
else:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.grid
def test_ranks_of_a_machine_that_has_done_its_part_are_not_started_again(tmp_path):
    """Nor waited for, by the launcher of one that was killed then."""
    (tmp_path / "ends.py").write_text(ENDS)
    (first, second), outputs = started(tmp_path, script=tmp_path / "ends.py")
    assert second.wait() == 128 + signal.SIGKILL
    os.kill(first.pid, signal.SIGKILL)  # torch's agent waits five minutes for the others at the end
    assert first.wait() == -signal.SIGKILL
    assert not any("start again" in file.read_text() for file in outputs)
