"""Number 19: a lock that somebody holds hangs no start: leases need none, caches wait with a line, within a bound, and
a signal ends all waiting. With 21's: a lease dated ahead of the clock is not taken from a live holder."""

import contextlib
import fcntl
import functools
import logging
import os
import random
import re
import signal
import time
from multiprocessing import get_context

import pytest

from megatron.core import safe_files
from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.training.guard import lease as lease_module
from megatron.training.guard.lease import LeaseError, take
from megatron.training.guard.lease_holder import Holder, look
from tests.harness import launch

LINE = [*launch.TINY_DATA, "--mock-data", "--data-cache-path", "cache", "--train-iters", "2"]
SAVING = [*LINE, "--save", "ck", "--save-interval", "2"]


def _hold(path, held, done):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held.set()
        done.wait(120)


def said_at_once(monkeypatch):
    monkeypatch.setattr(safe_files, "SAY_AFTER_S", 0.05)


def not_to_pytest(monkeypatch):
    """Warnings go to the console, as in a process of its own."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


@contextlib.contextmanager
def locked_by_another_process(path):
    """The file's lock is held until the block ends."""
    context = get_context("fork")
    held, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(path, held, done))
    process.start()
    assert held.wait(30)
    try:
        yield
    finally:
        done.set()
        process.join()


@pytest.fixture
def lock_of_index(tmp_path):
    """The lock of the index that a run of LINE fills, which is not there any more."""
    launch.ok(launch.run_forked(LINE, cwd=tmp_path))
    (lock,) = (tmp_path / "cache").glob("*-MockDataset-train.lock")
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    return lock


@pytest.mark.grid
def test_a_lease_is_taken_whoever_locks_what_was_its_lock(tmp_path):
    (tmp_path / "ck").mkdir()
    with locked_by_another_process(tmp_path / "ck" / ".lease.lock"):
        launch.ok(launch.run_forked(SAVING, ranks=2, cwd=tmp_path))
    os.unlink(tmp_path / "ck" / ".lease.lock")
    launch.ok(launch.run_forked(SAVING, cwd=tmp_path))
    assert not [name for name in os.listdir(tmp_path / "ck") if name.startswith(".")]


@pytest.mark.grid
def test_an_index_whose_lock_is_held_is_waited_for_with_a_line_and_built_in_memory(
    tmp_path, lock_of_index, monkeypatch
):
    said_at_once(monkeypatch)
    monkeypatch.setattr(safe_files, "CACHE_PATIENCE_S", 0.4)
    not_to_pytest(monkeypatch)
    with locked_by_another_process(lock_of_index):
        run = launch.ok(launch.run_forked(LINE, ranks=2, cwd=tmp_path))
    told = f"waiting for cache/{lock_of_index.name}, which another process has locked; at most 400 ms"
    assert run.output.count(told) == 1, run.output
    assert "another process holds this lock for " in run.output
    assert "kept in memory" in run.output
    assert list(run.losses()) == [1, 2]


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_the_waiting_on_all_ranks(tmp_path, lock_of_index, monkeypatch, ranks):
    said_at_once(monkeypatch)
    not_to_pytest(monkeypatch)
    with (
        locked_by_another_process(lock_of_index),
        launch.forked(SAVING, ranks=ranks, cwd=tmp_path) as group,
    ):
        group.wait_for("which another process has locked; at most 60 s")
        group.signal(signal.SIGTERM, 0)  # also where the others do not hear of it themselves
        run = launch.ended(group.wait(), 75)
    assert "[rank 0] stopped (exit status 75): SIGTERM before training began; nothing is lost" in run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"], record["checkpoint"]) == (75, True, None)
    assert not (tmp_path / "ck" / LEASE_FILE).exists()


def test_a_plan_whose_lock_is_held_is_searched_for_without_it(tmp_path, monkeypatch, caplog):
    request = Request(4, 9, memory_limit=(4.0,) * 4)
    plan = build_plan("zb-1p", request, str(tmp_path))
    (file,) = tmp_path.glob("*-plan-zb-1p.json")
    file.unlink()
    said_at_once(monkeypatch)
    monkeypatch.setattr(safe_files, "CACHE_PATIENCE_S", 0.2)
    with locked_by_another_process(f"{file}.lock"):
        assert plan_hash(build_plan("zb-1p", request, str(tmp_path))) == plan_hash(plan)
    assert f"waiting for {file}.lock, which another process has locked" in caplog.text
    assert "another process holds this lock" in caplog.text
    assert not file.exists()


# --- leases


def put(folder, age_s, **fields):
    holder = Holder.this_process()
    holder = type(holder)(**{**vars(holder), **fields})
    (folder / LEASE_FILE).write_text(holder.to_json())
    then = time.time() - age_s
    os.utime(folder / LEASE_FILE, (then, then))
    return holder


def _start(folder, seed, barrier, won):
    """A starter whose calls that decide take their time."""
    chance = random.Random(seed)

    def slow(call, *args, **options):
        time.sleep(chance.random() * 0.01)
        return call(*args, **options)

    for name in ("link", "rename", "replace", "unlink"):
        setattr(os, name, functools.partial(slow, getattr(os, name)))
    me = Holder.this_process()
    barrier.wait()
    with contextlib.suppress(LeaseError):
        take(folder, me, say=str)
        won.put(me.token)
    barrier.wait()  # nobody's process ends before all have tried


def test_of_three_starters_on_a_stale_lease_one_gets_it(tmp_path):
    context = get_context("fork")
    for round_ in range(4):
        folder = tmp_path / str(round_)
        folder.mkdir()
        put(folder, 75.0, machine="elsewhere")
        barrier, won = context.Barrier(3), context.SimpleQueue()
        starters = [
            context.Process(target=_start, args=(folder, 3 * round_ + k, barrier, won)) for k in range(3)
        ]
        for starter in starters:
            starter.start()
        for starter in starters:
            starter.join()
        assert look(folder).holder.token == won.get()
        assert won.empty()
        assert os.listdir(folder) == [LEASE_FILE]


class Watched:
    """Waiting in no time. renews: the lease has a heartbeat meanwhile."""

    def __init__(self, monkeypatch, folder, *, renews):
        self.now_s, self.folder, self.renews = time.monotonic(), folder, renews
        monkeypatch.setattr(lease_module.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(lease_module.waiting, "pause", self.pause)

    def pause(self, seconds):
        self.now_s += 20 * seconds
        if self.renews:
            os.utime(self.folder / LEASE_FILE)


def test_a_lease_ahead_of_the_clock_is_not_taken_from_a_process_of_this_machine_that_lives(tmp_path):
    holder = put(tmp_path, -3600.0)
    with pytest.raises(LeaseError, match=r"last heartbeat dated (?:1:00:00|0:59:\d\d) ahead of the clock"):
        take(tmp_path, Holder.this_process(), say=pytest.fail)
    assert look(tmp_path).holder == holder


def test_one_of_another_machine_is_watched_and_left_to_a_holder_that_renews_it(tmp_path, monkeypatch):
    holder, said = put(tmp_path, -3600.0, machine="elsewhere"), []
    Watched(monkeypatch, tmp_path, renews=True)
    with pytest.raises(LeaseError, match=r"last heartbeat 0 s ago|last heartbeat -0 s ago"):
        take(tmp_path, Holder.this_process(), said.append)
    assert look(tmp_path).holder == holder
    assert len(said) == 1
    assert "waiting for a heartbeat of another run" in said[0]


def test_one_that_nobody_renews_is_taken_over(tmp_path, monkeypatch):
    put(tmp_path, -3600.0, machine="elsewhere")
    me, said = Holder.this_process(), []
    Watched(monkeypatch, tmp_path, renews=False)
    take(tmp_path, me, said.append)
    assert look(tmp_path).holder == me
    assert re.search(r"dated (?:1:00:00|0:59:\d\d) ahead of the clock and not renewed for 6", said[-1])
    assert len(said) == 2


@pytest.mark.grid
def test_sigterm_ends_the_waiting_for_a_lease(tmp_path):
    (tmp_path / "ck").mkdir()
    put(tmp_path / "ck", -3600.0, machine="elsewhere")
    with launch.forked(SAVING, ranks=2, cwd=tmp_path) as group:
        group.wait_for("waiting for a heartbeat of another run")
        group.signal(signal.SIGTERM)
        run = group.wait()
    assert run.statuses[0] == 75, run.output
    assert (tmp_path / "ck" / LEASE_FILE).exists()
