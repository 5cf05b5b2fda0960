"""Who ends a rank whose launcher or store is gone, and who leaves it alone."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from megatron.training.guard import watchdog
from megatron.training.guard.watchdog import OrphanGuard, Watchdog


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)


class End:
    """Waits for the guard's verdict."""

    def __init__(self):
        self.errors, self._happened = [], threading.Event()

    def __call__(self, error):
        self.errors.append(str(error))
        self._happened.set()

    def wait(self):
        assert self._happened.wait(20)
        return self.errors


def no_trouble(seconds):
    return None


def test_a_parent_that_changes_ends_the_rank_at_once_and_once(monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_S", 600)
    end = End()
    former = os.getppid() + 1
    OrphanGuard(former, no_trouble, lambda: "at step 3, phase data", end)
    words = "; this rank was at step 3, phase data: it ends rather than train on alone"
    assert end.wait() == [f"the launcher (pid {former}) is gone{words}"]
    time.sleep(0.1)
    assert len(end.errors) == 1


def test_a_run_that_saves_may_leave_by_itself_unless_it_stands_still_or_takes_too_long(monkeypatch):
    """[Note: a launcher that leaves]"""
    former, still = os.getppid() + 1, threading.Event()
    for leaves, hangs, leave_s in ((True, False, 600), (False, True, 600), (False, False, 0.05)):
        monkeypatch.setattr(watchdog, "LEAVE_S", leave_s)
        still.clear()
        end, asked = End(), threading.Event()

        def ask(why, asked=asked):
            assert why == f"the loss of its launcher (pid {former})"
            asked.set()
            return True

        guard = OrphanGuard(
            former, no_trouble, str, end, ask, lambda: watchdog.STILL_S + 1.0 if still.is_set() else 0.0
        )
        assert asked.wait(20)
        if leaves:
            guard.close()
            time.sleep(0.1)
            assert not end.errors
        elif hangs:
            still.set()
            assert end.wait()
        else:
            assert end.wait()


def test_without_a_launcher_that_stays_and_with_a_store_that_answers_nothing_happens():
    end = End()
    guards = [OrphanGuard(parent, no_trouble, str, end) for parent in (None, os.getppid())]
    time.sleep(0.3)
    for guard in guards:
        guard.close()
    assert not end.errors


def test_the_main_thread_has_a_moment_to_meet_the_loss_of_the_store_itself(monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_S", 600)
    end, asked = End(), threading.Event()

    def gone(seconds):
        asked.set()
        return "the store at h:1 is gone (reset)"

    guard = OrphanGuard(None, gone, str, end)
    assert asked.wait(20)
    guard.close()  # as a run that fails does first
    assert not end.errors
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    OrphanGuard(None, gone, str, end)
    assert end.wait()[0].startswith("the store at h:1 is gone (reset); this rank was ")


class Store:
    """Answers until it is told to be mute."""

    def __init__(self):
        self.mute = threading.Event()
        self.answers = 0

    def clone(self):
        return self

    def set(self, key, value):
        return None  # as TCPStore's, it does not wait

    def check(self, keys):
        if self.mute.is_set():
            time.sleep(600)
        self.answers += 1
        return True

    def wait_for_answers(self, more):
        enough, deadline = self.answers + more, time.monotonic() + 20
        while self.answers < enough:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_store_that_accepts_records_and_never_answers_is_in_trouble(monkeypatch):
    monkeypatch.setattr(watchdog, "ECHO_EVERY", 2)
    store = Store()
    dog = Watchdog(store, 0, 2, interval_s=0.01, store_host="h:1")
    for _ in range(3):  # each answer begins anew
        assert dog.store_trouble(watchdog.STORE_SILENT_S - 1) is None
        store.wait_for_answers(2)
    store.mute.set()
    told = dog.store_trouble(watchdog.STORE_SILENT_S + 1)
    assert told is not None
    assert told.startswith("the store at h:1 has not answered for ")


def test_time_in_which_nobody_looked_does_not_count():
    """A process that was stopped for an hour finds its own clock ahead of the store's answers."""
    dog = Watchdog(dist.HashStore(), 0, 1, interval_s=3600)
    assert dog.store_trouble(0.4) is None
    dog.close()


def test_an_error_of_the_store_is_trouble_at_once():
    class Broken(Store):
        def set(self, key, value):
            raise RuntimeError("Broken pipe\n  trace")

    dog = Watchdog(Broken(), 0, 2, interval_s=0.01, store_host="h:1")
    dog._thread.join(20)
    assert dog.store_trouble(0.4) == "the store at h:1 is gone (Broken pipe)"
