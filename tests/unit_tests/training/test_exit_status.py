import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.guard import exit_status
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, TrainingExit, write_exit_json

DOCS = Path(__file__).resolve().parents[3] / "docs"


class ConfigurationError(ValueError):
    pass


class DataError(ValueError):
    pass


class TokenError(DataError):
    pass


class PeerLostError(RuntimeError):
    pass


TABLE = {
    ConfigurationError: ExitStatus.CONFIGURATION,
    DataError: ExitStatus.DATA,
    PeerLostError: ExitStatus.PEER_LOST,
}


def test_statuses_are_the_promised_numbers():
    assert {s.name: int(s) for s in ExitStatus} == {
        "DONE": 0,
        "BUG": 1,
        "CONFIGURATION": 2,
        "CHECKPOINT": 3,
        "DATA": 4,
        "NON_FINITE": 5,
        "PEER_LOST": 6,
        "RERUN_PERSISTENT": 16,
        "RERUN_INVALID": 17,
        "STOPPED": 75,
        "STOPPED_UNSAVED": 143,
    }
    assert all(status.description for status in ExitStatus)


def test_docs_page_has_the_table():
    rows = [
        f"| {int(status)} | {status.description} | {('no', 'yes')[status.requeue]} |"
        for status in exit_status.ExitStatus
    ]
    table = "\n".join(["| status | meaning | requeue |", "|---|---|---|", *rows])
    assert table in (DOCS / "exit_statuses.md").read_text(encoding="utf-8")


def test_exit_json_content_and_round_trip(tmp_path):
    record = ExitRecord.of(ExitStatus.STOPPED, "SIGTERM", rank=3, iteration=17, checkpoint="/c/iter_0000017")
    path = write_exit_json(tmp_path / "new" / "folder", record)
    assert json.loads(path.read_text()) == {
        "status": 75,
        "reason": "SIGTERM",
        "iteration": 17,
        "checkpoint": "/c/iter_0000017",
        "rank": 3,
        "requeue": True,
    }
    assert exit_status.read_exit_json(path.parent) == record
    assert os.listdir(path.parent) == ["exit.json"]


@pytest.mark.parametrize("status", list(ExitStatus))
def test_requeue_only_where_the_same_command_can_go_on(status):
    assert ExitRecord.of(status, "", rank=0).requeue == (int(status) in (6, 16, 75))


def test_lost_peer_never_hides_the_cause(tmp_path):
    lost = ExitRecord.of(ExitStatus.PEER_LOST, "rank 1 was lost", rank=0)
    cause = ExitRecord.of(ExitStatus.DATA, "corpus.bin is short", rank=1)
    for order in ([lost, cause], [cause, lost], [lost, cause, lost]):
        exit_status.clear_exit_json(tmp_path)
        for record in order:
            write_exit_json(tmp_path, record)
        assert exit_status.read_exit_json(tmp_path) == cause
    exit_status.clear_exit_json(tmp_path)
    assert exit_status.read_exit_json(tmp_path) is None
    write_exit_json(tmp_path, lost)
    assert exit_status.read_exit_json(tmp_path) == lost


def test_lost_peer_on_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_, **__):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    lost = ExitRecord.of(ExitStatus.PEER_LOST, "lost", rank=0)
    write_exit_json(tmp_path, lost)
    assert exit_status.read_exit_json(tmp_path) == lost
    cause = ExitRecord.of(ExitStatus.BUG, "bug", rank=1)
    write_exit_json(tmp_path, cause)
    write_exit_json(tmp_path, lost)
    assert exit_status.read_exit_json(tmp_path) == cause
    assert os.listdir(tmp_path) == ["exit.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"status": 99}', '{"status": 0, "surprise": 1}'])
def test_damaged_exit_json_is_named(tmp_path, text):
    (tmp_path / "exit.json").write_text(text)
    with pytest.raises(ValueError, match=r"exit\.json is not an exit record"):
        exit_status.read_exit_json(tmp_path)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("x"), 2),
        (TokenError("x"), 4),
        (PeerLostError("x"), 6),
        (TrainingExit(ExitStatus.STOPPED, "SIGTERM"), 75),
        (ValueError("x"), 1),
        (KeyError("x"), 1),
    ],
)
def test_exceptions_to_statuses(error, status):
    assert exit_status.status_of(error, TABLE) == status


def raise_it(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_user_errors_are_one_message_and_bugs_a_traceback(capsys, tmp_path):
    status = exit_status.report_failure(
        raise_it(TokenError("corpus.bin: token 70000")), TABLE, rank=1, directory=tmp_path, iteration=4
    )
    shown = capsys.readouterr().err
    assert status == 4
    assert shown == "[rank 1] error (data, exit status 4): corpus.bin: token 70000\n"
    assert exit_status.read_exit_json(tmp_path) == ExitRecord(4, "corpus.bin: token 70000", 4, None, 1, False)

    assert exit_status.report_failure(raise_it(KeyError("weight")), TABLE, rank=0) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "raise error" in shown
    assert "KeyError: 'weight'" in shown


def test_lost_peer_is_diagnosed_and_the_diagnosis_kept(capsys, tmp_path):
    exit_status.report_failure(
        raise_it(PeerLostError("reset by peer")),
        TABLE,
        rank=0,
        directory=tmp_path,
        diagnose=lambda: "rank 1 (host h, pid 5) missed all_reduce #3",
    )
    assert "[rank 0] rank 1 (host h, pid 5) missed all_reduce #3\n" in capsys.readouterr().err
    reason = exit_status.read_exit_json(tmp_path).reason
    assert reason == "rank 1 (host h, pid 5) missed all_reduce #3; reset by peer"


def test_training_exit_brings_its_own_status(tmp_path):
    error, kept = TrainingExit(ExitStatus.STOPPED, "SIGTERM"), "/c/iter_0000008"
    exit_status.report_failure(error, TABLE, rank=0, directory=tmp_path, iteration=8, checkpoint=kept)
    record = exit_status.read_exit_json(tmp_path)
    assert (record.iteration, record.checkpoint, record.requeue) == (8, kept, True)


def test_unwritable_folder_does_not_hide_the_error(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status = exit_status.report_failure(DataError("bad"), TABLE, rank=0, directory=tmp_path / "file" / "sub")
    assert status == 4
    shown = capsys.readouterr().err
    assert "bad" in shown
    assert "could not be written" in shown


def test_a_run_that_fails_says_why_whatever_processes_of_its_own_end_meanwhile():
    """torch's loader raises in SIGCHLD, and would again in the words of the failure."""
    code = (
        "import os, signal\n"
        "from types import SimpleNamespace as Part\n"
        "from megatron.training.run.training import _Run\n"
        "def raises(*_): raise RuntimeError('a worker has died')\n"
        "signal.signal(signal.SIGCHLD, raises)\n"
        "run = Part(guard=Part(close=lambda: os.kill(os.getpid(), signal.SIGCHLD)), session=None, loop=None,\n"
        "    env=Part(local_rank=0), folder=Part(release=lambda: None), _report=lambda error, _: print(error))\n"
        "try: raises()\n"
        "except RuntimeError as error: _Run.fail(run, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (ExitStatus.BUG, "a worker has died\n", "")


def test_hard_exit_flushes_and_runs_nothing():
    code = (
        "import atexit; from megatron.training.guard.exit_status import hard_exit, ExitStatus\n"
        "atexit.register(lambda: print('never'))\n"
        "print('last words', end='')\n"
        "hard_exit(ExitStatus.PEER_LOST)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=DOCS.parent)
    assert (done.returncode, done.stdout) == (6, "last words")


def test_second_signal_is_75_only_with_a_checkpoint(tmp_path, capfd):
    assert exit_status.second_signal(15, tmp_path, rank=2, iteration=9, checkpoint=None) == 128 + 15
    assert exit_status.read_exit_json(tmp_path).requeue is False
    kept = "/c/iter_0000008"
    assert exit_status.second_signal(2, tmp_path, rank=2, iteration=9, checkpoint=kept) == 75
    record = exit_status.read_exit_json(tmp_path)
    assert (record.status, record.iteration, record.checkpoint, record.requeue) == (75, 9, kept, True)
    shown = capfd.readouterr().err
    assert "[rank 2] second SIGTERM: stopped at once, without saving; valid checkpoint: none" in shown
    assert "second SIGINT" in shown


def test_a_planted_link_is_replaced_and_never_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    for status in (ExitStatus.DONE, ExitStatus.PEER_LOST):
        folder = tmp_path / status.name
        folder.mkdir()
        (folder / "exit.json").symlink_to(tmp_path / "target")
        with pytest.raises(OSError, match="symbolic link"):
            exit_status.read_exit_json(folder)
        write_exit_json(folder, ExitRecord.of(status, "over", rank=0))
        assert (folder / "exit.json").is_symlink() == (status is ExitStatus.PEER_LOST)
    assert (tmp_path / "target").read_text() == "precious"


def test_a_record_is_left_although_nobody_hears_the_message(tmp_path, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Closed())
    status = exit_status.report_failure(DataError("bad"), TABLE, rank=0, directory=tmp_path)
    assert status == exit_status.read_exit_json(tmp_path).status == 4
