"""What a user's shell does to a run: a console that is closed or full, a hang-up, few files, a number of threads."""

import os
import re
import signal

import pytest

from tests.harness import launch

ODD = "tests/functional_tests/trainers/odd_start.py"
FAULTY = "tests/functional_tests/trainers/faulty.py"
SHORT = [*launch.TINY, "--train-iters", "3"]
ENDLESS = [*launch.TINY, "--train-iters", "100000", "--save", "ck", "--save-interval", "100000"]


def console_events(folder):
    lines = launch.metrics_lines(folder)
    assert [line["iteration"] for line in lines if "lm loss" in line] == [1, 2, 3]
    assert lines[-1]["event"] == "exit"
    return [(line["rank"], line["lost"]) for line in lines if line.get("event") == "console"]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ({"CLOSED": "1"}, ["stdout: closed from the start"]),
        ({"CLOSED": "0 1 2"}, ["stdout: closed from the start", "stderr: closed from the start"]),
        ({"FULL": "1"}, ["stdout: No space left on device"]),
        ({"FULL": "1 2"}, ["stdout: No space left on device"]),
        ({"UNREAD": "1"}, ["stdout: Broken pipe"]),
        ({"TERMINAL": "step 1/", "TERM": "xterm"}, ["stdout: Input/output error"]),
    ],
    ids=lambda value: "-".join([*value, *value.values()]) if isinstance(value, dict) else "",
)
def test_a_dead_console_does_not_end_a_run(tmp_path, how, lost):
    """It trains, writes metrics.jsonl, saves and ends with 0; what was lost is noted once."""
    flags = [*SHORT, "--save", "ck", "--save-interval", "3", "--metrics-file", "metrics.jsonl"]
    run = launch.ok(launch.run_forked(flags, script=ODD, cwd=tmp_path, env=how))
    found = console_events(tmp_path)
    assert set(lost) <= {what for _, what in found}
    assert len(found) == len(set(found)), "noted once"
    assert (tmp_path / "ck" / "iter_0000003").is_dir()
    if how == {"FULL": "1"}:
        assert "WARNING: stdout cannot be written: No space left on device" in run.output


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_whose_console_is_dead_is_noted(tmp_path, rank):
    def full(number):
        return {"FULL": "1 2"} if number == rank else {}

    launch.ok(launch.run_forked(SHORT, ranks=2, script=ODD, cwd=tmp_path, rank_env=full))
    assert (rank, "stdout: No space left on device") in console_events(tmp_path)


@pytest.mark.parametrize("how", [{"FULL": "1 2"}, {"UNREAD": "1 2"}, {"CLOSED": "1 2"}], ids=str)
@pytest.mark.parametrize(
    ("more", "status"), [("--check-config", 0), ("--check-config --clip-grad x", 2), ("--lr x", 2)]
)
def test_a_refusal_nobody_can_read_has_its_status(tmp_path, how, more, status):
    run = launch.run_forked([*SHORT, *more.split()], script=ODD, cwd=tmp_path, env=how)
    assert (run.status, run.output) == (status, "")


def test_a_hang_up_saves_like_sigterm(tmp_path):
    with launch.forked(ENDLESS, ranks=2, cwd=tmp_path) as group:
        group.wait_for("iteration        2/")
        group.signal(signal.SIGHUP, 0)
        launch.ended(group.wait(), 75)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["reason"], record["requeue"]) == (75, "received SIGHUP", True)
    assert record["checkpoint"] == f"ck/iter_{record['iteration']:07d}"


@pytest.mark.grid
def test_a_terminal_that_hangs_up_signals_data_loaders_too(tmp_path):
    """A terminal and torchrun send it to whole groups of processes."""
    with launch.forked([*ENDLESS, "--num-workers", "2"], cwd=tmp_path) as group:
        group.wait_for("iteration        2/")
        os.killpg(group.pids[0], signal.SIGHUP)
        launch.ended(group.wait(), 75)
    assert launch.exit_record(tmp_path / "ck")["reason"] == "received SIGHUP"


@pytest.mark.grid
def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path):
    with launch.forked(ENDLESS, script=ODD, cwd=tmp_path, env={"NOHUP": "1"}) as group:
        group.wait_for("iteration        2/")
        group.signal(signal.SIGHUP)
        group.wait_for("iteration       20/")
        group.signal(signal.SIGTERM)
        launch.ended(group.wait(), 75)
    assert launch.exit_record(tmp_path / "ck")["reason"] == "received SIGTERM"


@pytest.mark.parametrize(
    "files", [24, pytest.param(40, marks=pytest.mark.full), pytest.param(50, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_too_few_files_are_a_message(tmp_path, ranks, files):
    flags = [*SHORT, "--num-workers", "2"]
    run = launch.run_forked(flags, ranks=ranks, script=ODD, cwd=tmp_path, env={"FILES": str(files)})
    launch.ended(run, 2)
    assert run.output.count(f"at most {files} files may be open at once (ulimit -n)") == ranks
    assert "run `ulimit -n 4096` before the launch" in run.output
    assert "Traceback" not in run.output


@pytest.mark.grid
def test_a_soft_limit_on_files_is_raised(tmp_path):
    flags = [*SHORT, "--num-workers", "2"]
    run = launch.ok(launch.run_forked(flags, ranks=2, script=ODD, cwd=tmp_path, env={"SOFT_FILES": "24"}))
    assert run.output.count("note: at most 24 files could be open at once (ulimit -n); raised to ") == 1


@pytest.mark.full
@pytest.mark.parametrize("files", [70, 80, 96, 128])
def test_what_is_let_through_has_enough_files(tmp_path, files):
    """Just above what is asked for: nothing runs out later, loaders and checkpoints included."""
    flags = [*SHORT, "--num-workers", "2", "--save", "ck", "--save-interval", "1"]
    run = launch.run_forked(flags, ranks=2, script=ODD, cwd=tmp_path, env={"FILES": str(files)})
    assert set(run.statuses) in ({0}, {2}), run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], " > threads per rank: 3 (1 core, 1 local rank; OMP_NUM_THREADS)"),
        (["--threads-per-rank", "2"], " > threads per rank: 2 (1 core, 1 local rank; --threads-per-rank)"),
    ],
)
def test_the_users_number_of_threads_counts(tmp_path, flags, told):
    with launch.forked([*SHORT, *flags], cwd=tmp_path, env={"OMP_NUM_THREADS": "3"}) as group:
        group.wait_for(re.escape(told))
