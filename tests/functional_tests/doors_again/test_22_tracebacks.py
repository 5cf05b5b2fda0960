"""Number 22: what ended in a traceback is a message; one RANK for two, a working directory that is gone, SIGTERM before
ranks exist; and two sentences that were not true."""

import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.command import lost_folder
from tests.harness import launch
from tests.harness.launch import ROOT
from tests.harness.scripts import run_script
from tools import commands, report, show_schedule

LINE = [*launch.TINY, "--train-iters", "2"]


def told(main, words, capsys):
    """(status, stderr) of a tool in this process."""
    try:
        status = main([str(word) for word in words])
    except SystemExit as leaving:
        status = leaving.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize("words", [[""], ["", ""], [" "], ["\n"], ["", "train"]])
def test_a_command_that_is_no_word(words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["megatron-zero", *words])
    with pytest.raises(SystemExit) as leaving:
        commands.main()
    assert leaving.value.code == 2
    assert "megatron-zero: no command " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["x" * 300], ["a/" + "x" * 5000], ["r", "--out", "x" * 300], ["r", "x" * 300]]
)
def test_a_report_of_a_name_that_is_too_long(words, tmp_path, capsys):
    run = tmp_path / "r"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0}\n')
    status, said = told(report.main, [run if word == "r" else word for word in words], capsys)
    assert status == 2
    assert said.count("File name too long") == 1


GOOD = {"status": 0, "reason": "x", "iteration": 1, "checkpoint": None, "rank": 0, "requeue": False}
FOREIGN = [None, True, -1, 0.5, 1e400, 10**400, "x", [], {}, [[]], {"code": 3}]


@pytest.mark.parametrize("field", [*GOOD, None])
def test_a_report_beside_a_foreign_exit_json(field, tmp_path, capsys):
    """Whoever wrote it: a message that names file and field, and nothing of Python's."""
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0}\n')
    for value in FOREIGN:
        text = json.dumps(value if field is None else {**GOOD, field: value})
        (tmp_path / "exit.json").write_text(text)
        status, said = told(report.main, [tmp_path], capsys)
        if status == 0:
            assert type(value) is type(GOOD[field]) or value is None or field == "checkpoint", (field, value)
            continue
        assert status == 2
        assert f"{tmp_path / 'exit.json'} is not an exit record: " in said
        assert f"field {field or ''!r}" in said or "not JSON" in said
        assert not re.search("__init__|unhashable|argument after", said)


@pytest.mark.parametrize("value", ["1e308", "1e-320", "1.7e308", "5e-324"])
def test_times_that_no_float_sums(value, capsys):
    flags = ("--time-f", "--time-b", "--time-w", "--time-comm")
    for flag, name in itertools.product(flags, ("auto", "zb-1p", "zbv", "1f1b")):
        line = ["--schedule", name, "--stages", 4, "--microbatches", 8, flag, value]
        status, said = told(show_schedule.main, line, capsys)
        assert status == 2
        assert f"{flag}: {value}: must be 0, or from 1e-150 to 1e+150: give it in another unit" in said


@pytest.mark.parametrize("value", ["1e150", "1e-150"])
def test_the_largest_and_smallest_times_are_planned(value, capsys):
    line = ["--schedule", "zb-1p", "--stages", 2, "--microbatches", 3, "--time-f", value, "--format", "json"]
    assert told(show_schedule.main, line, capsys)[0] == 0


def test_no_times_at_all(capsys):
    line = ["--schedule", "1f1b", "--stages", 2, "--microbatches", 3]
    line += [word for name in "fbw" for word in (f"--time-{name}", 0)]
    status, said = told(show_schedule.main, line, capsys)
    assert status != 0
    assert "nothing takes time" in said


# --- launches


def test_one_rank_for_two_processes_ends_both_naming_both(tmp_path):
    """Rank 0, in whose store the ranks meet: who comes second finds its port taken."""
    zero = {"RANK": "0", "LOCAL_RANK": "0"}
    with launch.forked(LINE, ranks=2, cwd=tmp_path, rank_env=lambda rank: zero) as group:
        run = launch.ended(group.wait(), 2)
        pids = group.pids
    sentences = re.findall(r"RANK=0 was given to two processes of one launch: (.*)", run.output)
    assert len(sentences) == 2, run.output
    assert all(f"process {pid} on {os.uname().nodename}" in one for pid in pids for one in sentences)
    assert "frame #" not in run.output


@pytest.mark.grid
def test_a_port_that_something_else_has_is_still_named(tmp_path):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = {"MASTER_PORT": str(other.getsockname()[1])}
        closes = threading.Timer(1.0, other.close)  # what never answers is waited for
        closes.start()
        with launch.forked(LINE, ranks=2, cwd=tmp_path, rank_env=lambda rank: port) as group:
            deadline = time.monotonic() + 60
            while group.alive(0):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            output = group.output
    assert f"MASTER_PORT={port['MASTER_PORT']} is taken by another process on this machine" in output


def _in_a_lost_folder(tmp_path, start):
    """What `start` returns where the working directory was removed."""
    folder, before = tmp_path / "gone", os.getcwd()
    folder.mkdir()
    os.chdir(folder)
    shutil.rmtree(folder)
    try:
        return start()
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "words", [[], LINE, [*LINE, "--save", "ck", "--save-interval", "1"], ["--check-config"]]
)
def test_a_working_directory_that_is_gone(words, tmp_path, capsys):
    from megatron.training.run.arguments import launch_config

    def start():
        with pytest.raises(SystemExit) as leaving:
            launch_config(words)
        return leaving.value.code

    assert _in_a_lost_folder(tmp_path, start) == 2
    said = capsys.readouterr().err
    assert "the working directory is gone (No such file or directory)" in said
    assert "change to a folder that exists" in said
    assert lost_folder() == ""


def test_every_command_in_a_working_directory_that_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["megatron-zero", "generate", "--load", "ck"])

    def start():
        with pytest.raises(SystemExit) as leaving:
            commands.main()
        return leaving.value.code

    assert _in_a_lost_folder(tmp_path, start) == 2
    assert "megatron-zero: the working directory is gone" in capsys.readouterr().err


SAVING = [*LINE, "--save", "ck", "--save-interval", "1"]


@pytest.mark.grid
def test_sigterm_while_ranks_do_not_come_leaves_an_exit_json(tmp_path):
    """Rank 0 waits for rank 1, which is not there, and rank 1 of another launch for its rank 0."""
    for rank in (0, 1):
        alone = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        folder = tmp_path / str(rank)
        folder.mkdir()
        with launch.forked(SAVING, cwd=folder, env={**launch._rendezvous(2), **alone}) as group:
            time.sleep(1.0)
            assert group.alive(0), group.output
            group.signal(signal.SIGTERM)
            run = launch.ended(group.wait(timeout_s=20), 75)
        assert (
            "stopped (exit status 75): SIGTERM before training began; nothing is lost" in run.output or rank
        )
        record = launch.exit_record(folder / "ck")
        assert (record["status"], record["rank"], record["requeue"]) == (75, rank, True)
        assert (record["iteration"], record["checkpoint"]) == (None, None)


@pytest.mark.parametrize(("name", "words", "status"), [("SIGTERM", SAVING, 75), ("SIGINT", LINE, 143)])
def test_a_signal_while_torch_is_imported(name, words, status, tmp_path, monkeypatch):
    """Before the run's own handlers are there."""
    import megatron.training

    def import_torch(*_, **__):
        print("importing", flush=True)
        time.sleep(60)

    monkeypatch.setattr(megatron.training, "pretrain", import_torch)
    with launch.forked(words, cwd=tmp_path) as group:
        group.wait_for("importing")
        group.signal(getattr(signal, name))
        run = launch.ended(group.wait(), status)
    assert f"stopped (exit status {status}): {name} before training began" in run.output
    assert (tmp_path / "ck" / "exit.json").exists() == (status == 75)
    if status == 75:
        assert (
            launch.exit_record(tmp_path / "ck")["reason"] == "SIGTERM before training began; nothing is lost"
        )


# --- sentences


@pytest.mark.grid
def test_only_runs_that_solve_again_are_said_to_keep_a_plan(tmp_path):
    (tmp_path / "file").write_text("{}")
    line = [*LINE, "--check-config", "--pipeline-schedule-file", tmp_path / "file"]
    said = run_script(
        "pretrain_gpt.py", *line, "--pipeline-model-parallel-size", 2, "--world-size", 2, cwd=tmp_path
    )
    assert said.returncode == 2
    assert "a run that solves its schedule again keeps pipeline-plan.json in --save" in said.stderr
    launch.ok(launch.run_forked([*SAVING, "--pipeline-model-parallel-size", "2"], ranks=2, cwd=tmp_path))
    assert not list(tmp_path.rglob("pipeline-plan.json"))


def test_the_security_page_names_all_that_listens():
    text = (Path(ROOT) / "SECURITY.md").read_text()
    assert "GLOO_SOCKET_IFNAME" in text
    assert "MASTER_PORT" in text
