"""The folder of a run: its name, who may leave exit.json there, and what a refused run does not touch."""

import datetime
import os

import pytest

from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard import exit_status
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, write_exit_json
from megatron.training.guard.lease import LeaseError
from megatron.training.guard.run_folder import OutputPathError, RunFolder, fresh_folder, is_held

ENV = LaunchEnv()


def claimed(save, say=print):
    folder = RunFolder(save, pytest.fail)
    folder.adopt(folder.claim(ENV, say))
    return folder


def test_names_are_utc_time_and_pid_and_sort_by_time():
    begin = datetime.datetime(2026, 7, 28, 10, 15, 30, 123456, datetime.UTC)
    assert str(fresh_folder(begin, 4242)) == "runs/20260728T101530.123Z-4242"
    times = [begin + datetime.timedelta(milliseconds=step) for step in (0, 1, 900, 60_000, 90_000_000)]
    names = [str(fresh_folder(when, pid)) for when, pid in zip(times, (9, 80, 7, 1000, 5), strict=True)]
    assert names == sorted(names)


def test_without_save_nothing_is_made_before_something_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    folder = claimed(None, lines.append)
    assert lines == [f" > run folder: {folder.path}"]
    assert folder.path.name.endswith(f"-{os.getpid()}")
    assert folder.for_exit_record(ExitStatus.CONFIGURATION) is None, "a refused launch leaves nothing"
    assert folder.for_exit_record(ExitStatus.DATA) == folder.path
    folder.check()
    folder.release()
    assert not list(tmp_path.iterdir())
    folder.path.mkdir(parents=True)
    assert folder.for_exit_record(ExitStatus.CONFIGURATION) == folder.path


def test_before_the_folder_is_known_only_a_free_save_folder_gets_a_record(tmp_path):
    assert RunFolder(None, pytest.fail).for_exit_record(ExitStatus.PEER_LOST) is None
    save = str(tmp_path / "ck")
    assert RunFolder(save, pytest.fail).for_exit_record(ExitStatus.PEER_LOST) == tmp_path / "ck"
    holder = claimed(save)
    assert RunFolder(save, pytest.fail).for_exit_record(ExitStatus.PEER_LOST) is None
    holder.release()


def test_the_first_to_claim_clears_the_former_record_and_the_second_touches_nothing(tmp_path):
    save = str(tmp_path)
    write_exit_json(save, ExitRecord.of(ExitStatus.STOPPED, "SIGTERM", rank=0))
    first = claimed(save)
    assert exit_status.read_exit_json(save) is None
    write_exit_json(save, ExitRecord.of(ExitStatus.PEER_LOST, "mine", rank=0))
    second = RunFolder(save, pytest.fail)
    told = second.claim(ENV, pytest.fail)
    for rank in (second, RunFolder(save, pytest.fail)):
        with pytest.raises(LeaseError, match="another run holds this folder"):
            rank.adopt(told)
        rank.release()
    first.release()
    assert second.for_exit_record(ExitStatus.CHECKPOINT) is None, "not even once the holder has ended"
    assert exit_status.read_exit_json(save).reason == "mine"
    assert sorted(os.listdir(save)) == ["exit.json"]


def test_other_ranks_of_the_run_leave_their_records_in_the_folder_that_it_holds(tmp_path):
    first = RunFolder(str(tmp_path), pytest.fail)
    told = first.claim(ENV, print)
    other_rank = RunFolder(str(tmp_path), pytest.fail)
    other_rank.adopt(told)
    assert other_rank.for_exit_record(ExitStatus.DATA) == tmp_path
    assert is_held(tmp_path)
    first.release()
    assert not is_held(tmp_path)
    assert other_rank.for_exit_record(ExitStatus.DATA) == tmp_path, "also when rank 0 was faster"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputPathError, match=r"--save .*/file/ck: .*Not a directory: name another folder"):
        claimed(str(tmp_path / "file" / "ck"))
    (tmp_path / LEASE_FILE).mkdir()
    with pytest.raises(OutputPathError, match=r"lease\.json: is a folder"):
        claimed(str(tmp_path))
