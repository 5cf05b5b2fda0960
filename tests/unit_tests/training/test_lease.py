"""One holder at a time: the judgement (pure), taking, losing and giving back, also when several want it at once."""

import contextlib
import dataclasses
import errno
import fcntl
import os
import subprocess
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.training.guard import lease as lease_module
from megatron.training.guard.lease import Lease, LeaseError, take
from megatron.training.guard.lease_holder import (
    STALE_S,
    UNREADABLE,
    Holder,
    LeaseState,
    judge,
    look,
    process_start,
    this_machine,
)

HERE, ELSEWHERE = "boot1 pid:[1]", "boot2 pid:[1]"
HOLDER = Holder("t", "node7", 4242, HERE, "99", "2026-01-01 00:00:00 UTC")


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def put(folder, age_s=0.0, **fields):
    """A lease of another run, this process's own but for some fields."""
    holder = dataclasses.replace(Holder.this_process(), **fields)
    path = folder / LEASE_FILE
    path.write_text(holder.to_json())
    then = time.time() - age_s
    os.utime(path, (then, then))
    return holder


def files(folder):
    return os.listdir(folder)


# --- the judgement


@pytest.mark.parametrize(
    ("holder", "age_s", "machine", "is_alive", "verdict"),
    [
        (None, 0.0, HERE, False, LeaseState.FREE),
        (HOLDER, 5.0, HERE, True, LeaseState.HELD),
        (HOLDER, 5.0, HERE, False, LeaseState.STALE),  # its process is gone: at once
        (HOLDER, 61.0, HERE, True, LeaseState.STALE),  # stopped
        (HOLDER, 59.0, ELSEWHERE, False, LeaseState.HELD),  # a pid of another machine says nothing here
        (HOLDER, 61.0, ELSEWHERE, True, LeaseState.STALE),
        (HOLDER, -3600.0, ELSEWHERE, True, LeaseState.HELD),  # the file system's clock was set back
        (HOLDER, -3600.0, HERE, False, LeaseState.STALE),
        (UNREADABLE, 5.0, "", False, LeaseState.HELD),
        (UNREADABLE, 61.0, "", False, LeaseState.STALE),
    ],
)
def test_judgement(holder, age_s, machine, is_alive, verdict):
    assert judge(holder, age_s, machine=machine, is_alive=is_alive) is verdict


@given(st.floats(-1e6, 1e6), st.sampled_from([HERE, ELSEWHERE, ""]), st.booleans())
def test_a_lease_with_a_recent_heartbeat_is_never_taken_unless_its_process_is_known_to_be_gone(
    age_s, here, alive
):
    verdict = judge(HOLDER, age_s, machine=here, is_alive=alive)
    assert (verdict is LeaseState.STALE) == (age_s > STALE_S or (here == HERE and not alive))


def test_records_survive_their_text_and_anything_else_is_unreadable():
    assert Holder.from_json(HOLDER.to_json().encode()) == HOLDER
    for text in (b"", b"{", b"[]", b'"x"', b"{}", b"\xff", b"[" * 10000, b'{"token": 1}'):
        assert Holder.from_json(text) == UNREADABLE
    for fields in (
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
        {"pid": "4"},
        {"host": "a\x1b[2J"},
        {"host": 3},
    ):
        assert Holder.from_json(dataclasses.replace(HOLDER, **fields).to_json().encode()) == UNREADABLE


def test_a_pid_that_was_used_again_is_not_the_holder():
    me = Holder.this_process()
    assert me.is_alive
    assert not dataclasses.replace(me, process_start="1").is_alive
    assert not dataclasses.replace(me, pid=dead_pid()).is_alive
    assert me.machine == this_machine() != ""


def test_a_process_that_nobody_has_waited_for_is_gone():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(process.pid) == ""
    process.wait()


# --- taking


def test_a_free_folder_is_taken_and_given_back(tmp_path):
    me = Holder.this_process()
    take(tmp_path, me, say=pytest.fail)
    assert look(tmp_path)[:2] == (LeaseState.HELD, me)
    lease = Lease(tmp_path, me, pytest.fail)
    with pytest.raises(
        LeaseError, match=f"another run holds this folder: host .*, pid {me.pid}, started .* UTC, last"
    ):
        take(tmp_path, Holder.this_process(), say=pytest.fail)
    assert files(tmp_path) == [LEASE_FILE], "who is refused leaves nothing"
    lease.release()
    lease.release()
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "age_s", "why"),
    [
        ({"process_start": "1"}, 0.0, "that process is gone"),
        ({"machine": ELSEWHERE}, 75.0, "no heartbeat for 75 s"),
    ],
)
def test_a_stale_one_is_taken_over_with_a_line(tmp_path, fields, age_s, why):
    other, me, lines = put(tmp_path, age_s, **fields), Holder.this_process(), []
    take(tmp_path, me, lines.append)
    assert look(tmp_path)[1] == me
    (line,) = lines
    assert f"took over the lease of another run ({other.name}): {why}" in line
    assert files(tmp_path) == [LEASE_FILE]


def test_one_of_another_machine_is_held_whatever_its_pid_means_here(tmp_path):
    put(tmp_path, 30.0, machine=ELSEWHERE, pid=dead_pid())
    with pytest.raises(LeaseError, match="last heartbeat 30 s ago"):
        take(tmp_path, Holder.this_process(), say=pytest.fail)


def test_a_former_attempt_of_the_same_job_is_waited_for(tmp_path, monkeypatch):
    put(tmp_path, machine=ELSEWHERE, run_id="job1")
    waits, said = [], []

    def two_waits(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            os.unlink(tmp_path / LEASE_FILE)  # it has ended

    monkeypatch.setattr(lease_module.waiting, "pause", two_waits)
    take(tmp_path, Holder.this_process("job1", 1), say=said.append)
    assert len(waits) == 2
    assert len(said) == 1, "once, however long it takes"
    assert "waiting for a former attempt of this job to end (host " in said[0]
    put(tmp_path, machine=ELSEWHERE, run_id="none")
    with pytest.raises(LeaseError):
        take(tmp_path, Holder.this_process("none"), say=pytest.fail)


def test_of_many_that_want_a_stale_lease_one_gets_it(tmp_path):
    for _ in range(4):
        put(tmp_path, 75.0, machine=ELSEWHERE)
        won, start = [], threading.Barrier(6)

        def want(won=won, start=start):
            me = Holder.this_process()
            start.wait()
            try:
                take(tmp_path, me, say=str)
            except LeaseError:
                return
            won.append(me)

        threads = [threading.Thread(target=want) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [look(tmp_path)[1]] == won
        os.unlink(tmp_path / LEASE_FILE)


def test_no_lock_is_needed(tmp_path, monkeypatch):
    def no_locks(*_):
        raise AssertionError("a lock")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    put(tmp_path, 75.0, machine=ELSEWHERE)
    me = Holder.this_process()
    take(tmp_path, me, say=str)
    with pytest.raises(LeaseError):
        take(tmp_path, Holder.this_process(), say=pytest.fail)
    assert look(tmp_path).holder == me


def test_a_file_system_without_hard_links_is_enough(tmp_path, monkeypatch):
    def no_links(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    for _ in range(3):
        won, start = [], threading.Barrier(4)

        def want(won=won, start=start):
            me = Holder.this_process()
            start.wait()
            with contextlib.suppress(LeaseError):
                take(tmp_path, me, say=str)
                won.append(me)

        threads = [threading.Thread(target=want) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [look(tmp_path)[1]] == won
        os.unlink(tmp_path / LEASE_FILE)


def test_a_lease_that_came_between_look_and_rename_stays(tmp_path):
    put(tmp_path, 75.0, machine=ELSEWHERE)
    stale = look(tmp_path)
    fresh = put(tmp_path)
    assert not lease_module._take_over(tmp_path, stale, Holder.this_process())
    assert look(tmp_path)[:2] == (LeaseState.HELD, fresh)
    assert files(tmp_path) == [LEASE_FILE]


def test_a_holder_that_woke_up_before_its_lease_was_taken_keeps_it(tmp_path):
    put(tmp_path, 75.0, machine=ELSEWHERE)
    found = look(tmp_path)
    os.utime(tmp_path / LEASE_FILE)
    assert not lease_module._take_over(tmp_path, found, Holder.this_process())
    assert look(tmp_path)[:2] == (LeaseState.HELD, found.holder)
    assert files(tmp_path) == [LEASE_FILE]


def claimed(folder, holder, **fields):
    """A claim of another process on this holder's lease; the process."""
    maker = dataclasses.replace(Holder.this_process(), **fields)
    lease_module._claim_path(folder, holder).write_text(maker.to_json())
    return maker


def test_a_claim_of_a_process_that_died_is_claimed_itself(tmp_path):
    """Twice over, and litter of others goes with it."""
    stale = put(tmp_path, 75.0, machine=ELSEWHERE)
    first = claimed(tmp_path, stale, process_start="1")
    claimed(tmp_path, first, pid=dead_pid())
    claimed(tmp_path, HOLDER, pid=dead_pid())
    me, lines = Holder.this_process(), []
    take(tmp_path, me, lines.append)
    assert look(tmp_path).holder == me
    assert len(lines) == 1
    assert files(tmp_path) == [LEASE_FILE]


def test_of_a_stale_lease_that_another_process_takes_over_nothing_is_touched(tmp_path):
    stale = put(tmp_path, 75.0, machine=ELSEWHERE)
    claimed(tmp_path, stale)
    before = sorted(files(tmp_path))
    assert not lease_module._take_over(tmp_path, look(tmp_path), Holder.this_process())
    assert look(tmp_path).holder == stale
    assert sorted(files(tmp_path)) == before


def test_who_was_stopped_before_its_rename_withdraws(tmp_path, monkeypatch):
    """Its claim was claimed meanwhile, and another run has the folder."""
    put(tmp_path, 75.0, machine=ELSEWHERE)
    found, slow, other = look(tmp_path), Holder.this_process(), Holder.this_process()
    publish = lease_module.publish_text

    def late(path, text, **options):
        if path.name == LEASE_FILE and text == slow.to_json() and not options:
            (claim,) = lease_module._claim(tmp_path, found.holder, slow)
            os.utime(claim, (1.0, 1.0))
            assert lease_module._take_over(tmp_path, found, other)
        publish(path, text, **options)

    monkeypatch.setattr(lease_module, "publish_text", late)
    assert not lease_module._take_over(tmp_path, found, slow)
    assert files(tmp_path) == []
    lease = Lease(tmp_path, other, pytest.fail)
    lease.check()  # makes it again
    assert look(tmp_path).holder == other
    lease.release()
    assert files(tmp_path) == []


def test_a_holder_whose_lease_is_being_taken_over_does_not_give_it_back(tmp_path):
    lease, me = held(tmp_path)
    claimed(tmp_path, me)
    lease.release()
    assert look(tmp_path).holder == me, "left to who has the claim"


def test_claims_that_name_each_other_are_an_error(tmp_path):
    stale = put(tmp_path, 75.0, machine=ELSEWHERE)
    first = claimed(tmp_path, stale, process_start="1")
    lease_module._claim_path(tmp_path, first).write_text(stale.to_json())
    os.utime(lease_module._claim_path(tmp_path, first), (1.0, 1.0))
    with pytest.raises(LeaseError, match="name each other"):
        take(tmp_path, Holder.this_process(), say=str)


def test_a_planted_link_is_neither_read_nor_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "target").write_text("precious")
    (tmp_path / "folder" / LEASE_FILE).symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"):
        take(tmp_path / "folder", Holder.this_process(), say=pytest.fail)
    assert (tmp_path / "target").read_text() == "precious"


# --- holding


def held(folder, on_lost=pytest.fail):
    me = Holder.this_process()
    take(folder, me, say=pytest.fail)
    return Lease(folder, me, on_lost), me


def test_a_heartbeat_is_renewed_from_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.01)
    lease, _ = held(tmp_path)
    path = tmp_path / LEASE_FILE
    os.utime(path, (1.0, 1.0))
    deadline = time.monotonic() + 20
    while os.stat(path).st_mtime == 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.release()


def test_a_run_whose_lease_was_taken_is_told_by_the_thread_and_at_the_next_check(tmp_path, monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.01)
    lease, _ = held(tmp_path, on_lost=lambda error: told.set())
    other = put(tmp_path)
    assert told.wait(20)
    with pytest.raises(LeaseError, match=f"taken by another run \\(host .*, pid {other.pid}"):
        lease.check()
    lease.release()
    assert look(tmp_path)[1] == other, "another's lease is not given back"


def test_a_lease_that_somebody_removed_is_made_again_unless_another_run_may_have_come_and_gone(
    tmp_path, monkeypatch
):
    lease, me = held(tmp_path)
    os.unlink(tmp_path / LEASE_FILE)
    lease.check()
    assert look(tmp_path)[1] == me
    os.unlink(tmp_path / LEASE_FILE)
    later = lease_module._uptime_s() + STALE_S + 1
    monkeypatch.setattr(lease_module, "_uptime_s", lambda: later)
    with pytest.raises(LeaseError, match="taken by another run, which has ended since"):
        lease.check()
    lease.release()
