"""The culprit is named: pure cases, then real ranks that hang, die and lose the store's host."""

import contextlib
import dataclasses
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transport.traffic import TrafficCounter
from megatron.training.guard.hang_diagnosis import (
    ENDED,
    FAILING,
    ProgressRecord,
    _pack,
    _unpack,
    diagnose,
)
from megatron.training.guard.watchdog import Watchdog

NOW = 1000.0


def rec(rank, sequences=None, last=("", "", ()), **kw):
    op, group, members = last
    key = f"{group}@{members[0]}" if members else group
    fields = {
        "rank": rank,
        "host": f"node{rank}",
        "pid": 40 + rank,
        "step": 17,
        "phase": "grad-sync",
        "op": op,
        "group": group,
        "members": tuple(members),
        "sequences": sequences or {},
        "sequence": (sequences or {}).get(key, 0),
        "published_at": NOW - 0.1,
        "progressed_at": NOW - 5.2,
    }
    return ProgressRecord(**{**fields, **kw})


ALL = (0, 1, 2)


def failing(rank=0, sequence=3):
    return rec(rank, {"dp@0": sequence}, ("all_reduce", "dp", ALL), state=FAILING)


def test_late_rank_is_named_with_everything_one_wants_to_know():
    mine = failing()
    records = {0: mine, 1: rec(1, {"dp@0": 2}, ("all_reduce", "dp", ALL), phase="data"), 2: failing(2)}
    assert diagnose(mine, records, {0, 1, 2}, 3, NOW).startswith(
        "rank 1 (host node1, pid 41) missed all_reduce #3 of group 'dp' at step 17, phase grad-sync; "
        "last heard of 5.2 s ago, then in step 17, phase data"
    )


def test_silent_rank_is_named_even_if_it_had_begun_the_same_collective():
    mine = failing()
    dead = rec(1, {"dp@0": 3}, ("all_reduce", "dp", ALL), published_at=NOW - 4.0)
    text = diagnose(mine, {0: mine, 1: dead, 2: failing(2)}, {0, 2}, 3, NOW)
    assert text.startswith("rank 1 (host node1, pid 41) was lost during all_reduce #3 of group 'dp'")
    assert "last heard of 4.0 s ago" in text
    assert "killed" in text


def test_survivors_that_fail_too_are_never_blamed():
    mine = failing(0, sequence=5)
    early = failing(2, sequence=4)  # its connection broke one collective earlier
    late = rec(1, {"dp@0": 4}, ("all_reduce", "dp", ALL))
    assert diagnose(mine, {0: mine, 1: late, 2: early}, {0, 1, 2}, 3, NOW).startswith("rank 1 ")


def test_chain_of_waiting_is_followed_over_groups():
    # 0 waits for 1 in dp; 1 waits for 3 in pp; 3 sleeps; 2 waits for 3 in its dp group
    mine = rec(0, {"dp@0": 3, "pp@0": 4}, ("all_reduce", "dp", (0, 1)), state=FAILING)
    records = {
        0: mine,
        1: rec(1, {"dp@0": 2, "pp@1": 7}, ("recv", "pp", (1, 3))),
        2: rec(2, {"dp@2": 3, "pp@0": 4}, ("all_reduce", "dp", (2, 3))),
        3: rec(3, {"dp@2": 2, "pp@1": 6}, ("recv", "pp", (1, 3)), phase="data"),
    }
    text = diagnose(mine, records, set(records), 4, NOW)
    assert text.startswith("rank 3 (host node3, pid 43) missed recv #7 of group 'pp'")


def test_who_has_begun_everything_ahead_and_waits_for_nobody():
    """Gathers begun ahead: the counts are equal, the sleeping rank's even higher in a group of others."""
    group = ("all_reduce", "dp", ALL)
    mine = dataclasses.replace(failing(), waits=True)
    waiting = dataclasses.replace(rec(2, {"dp@0": 3}, group, progressed_at=NOW - 9.0), waits=True)
    asleep = rec(1, {"dp@0": 3, "tp@1": 8}, ("all_gather", "tp", (1, 3)), progressed_at=NOW - 5.0)
    other = dataclasses.replace(rec(3, {"dp@0": 3, "tp@1": 7}, ("all_gather", "tp", (1, 3))), waits=True)
    records = {0: mine, 1: asleep, 2: waiting, 3: other}
    text = diagnose(mine, records, set(records), 4, NOW)
    assert text.startswith("rank 1 (host node1, pid 41) was lost during all_reduce #3 of group 'dp'")
    assert "last heard of 5.0 s ago" in text
    everybody_of_dp = {
        **records,
        1: dataclasses.replace(asleep, waits=True),
        3: dataclasses.replace(other, waits=False),
    }
    assert diagnose(mine, everybody_of_dp, set(records), 4, NOW).startswith("rank 3 (host node3")
    everybody = {rank: dataclasses.replace(record, waits=True) for rank, record in everybody_of_dp.items()}
    assert diagnose(mine, everybody, set(records), 4, NOW).startswith("no rank is behind")


def test_the_record_knows_of_waits():
    watchdog, counter = Watchdog(dist.HashStore(), 0, 1, interval_s=0.05), TrafficCounter()
    watchdog.watch([TrafficCounter(), counter])
    waits = []
    counter.wait_for(lambda: waits.append(watchdog.record().waits))
    assert waits == [True]
    assert not watchdog.record().waits
    with contextlib.suppress(ZeroDivisionError):
        counter.wait_for(lambda: 1 // 0)
    assert watchdog.record().waits, "after an error the record shows where it happened"
    watchdog.close()


def test_rank_that_ended_says_why():
    mine = failing()
    ended = rec(1, {"dp@0": 2}, state=ENDED, reason="DataError: corpus.bin: token 70000 >= vocabulary 50257")
    text = diagnose(mine, {0: mine, 1: ended, 2: failing(2)}, {0, 1, 2}, 3, NOW)
    assert "rank 1 (host node1, pid 41) ended at step 17" in text
    assert "token 70000" in text


def test_rank_that_left_regularly_while_others_wait():
    mine = failing()
    text = diagnose(mine, {0: mine, 1: rec(1, {"dp@0": 2}, state=ENDED), 2: failing(2)}, {0, 1, 2}, 3, NOW)
    assert text.startswith("rank 1 ")
    assert "missed all_reduce #3" in text
    assert "ended after step 17" in text


def test_different_collectives_at_the_same_number():
    mine = failing()
    other = rec(1, {"dp@0": 3}, ("all_gather", "dp", ALL))
    text = diagnose(mine, {0: mine, 1: other, 2: failing(2)}, {0, 1, 2}, 3, NOW)
    assert "disagree on collective #3 of group 'dp'" in text
    assert "all_gather" in text
    assert "all_reduce" in text


def test_without_counts_the_lowest_step_is_late():
    mine = rec(0, state=FAILING)
    text = diagnose(mine, {0: mine, 1: rec(1, step=16)}, {0, 1}, 2, NOW)
    assert text.startswith("rank 1 ")
    assert "in step 16" in text
    nobody = diagnose(mine, {0: mine, 1: rec(1)}, {0, 1}, 2, NOW)
    assert nobody.startswith("no rank is behind")


def test_rank_without_any_record():
    mine = failing()
    assert diagnose(mine, {0: mine, 2: failing(2)}, {0, 2}, 3, NOW).startswith("rank 1 never reported")


@given(st.lists(st.integers(0, 5000), unique=True, max_size=12))
def test_members_survive_packing(ranks):
    assert _unpack(_pack(ranks)) == tuple(ranks)


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 2000))
def test_even_groups_are_three_numbers(first, stride, count):
    ranks = tuple(range(first, first + stride * count, stride))
    assert _unpack(_pack(ranks)) == ranks
    assert len(str(_pack(ranks))) < 60


@given(
    sequences=st.lists(st.integers(0, 6), min_size=2, max_size=8),
)
def test_lowest_sequence_is_always_the_one_blamed(sequences):
    top = max(sequences)
    mine_rank = sequences.index(top)
    members = tuple(range(len(sequences)))
    records = {
        r: rec(r, {"dp@0": s}, ("all_reduce", "dp", members), state=FAILING if s == top else "running")
        for r, s in enumerate(sequences)
    }
    text = diagnose(records[mine_rank], records, set(members), len(members), NOW)
    if min(sequences) == top:
        assert text.startswith("no rank is behind")
    else:
        blamed = int(re.match(r"rank (\d+) ", text)[1])
        assert sequences[blamed] == min(sequences)


def test_record_keeps_step_phase_and_counts():
    watchdog = Watchdog(dist.HashStore(), 0, 1, interval_s=0.05)
    watchdog.step(3)
    with watchdog.phase("grad-sync"):
        watchdog.collective("all_reduce", "dp", (0, 2))
        watchdog.collective("all_reduce", "dp", (0, 2))
        watchdog.collective("barrier", "world")
        record = watchdog.record()
        with watchdog.phase("inner"):
            assert watchdog.record().phase == "inner"
        assert watchdog.record().phase == "grad-sync"
    assert (record.step, record.phase, record.op, record.sequence) == (3, "grad-sync", "barrier", 1)
    assert record.sequences == {"dp@0": 2, "world": 1}
    assert ProgressRecord.from_json(record.to_json()) == record
    with contextlib.suppress(ValueError), watchdog.phase("data"):
        raise ValueError
    assert watchdog.record().phase == "data", "after an error the record shows where it happened"
    watchdog.close()


def test_publishes_and_says_its_last_word():
    store = dist.HashStore()
    watchdog = Watchdog(store, 0, 1, interval_s=0.02)
    deadline = time.monotonic() + 10
    while not (store.check(["watchdog/0"]) and ProgressRecord.from_json(store.get("watchdog/0")).beat >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watchdog.close("DataError: x")
    last = ProgressRecord.from_json(store.get("watchdog/0"))
    assert (last.state, last.reason) == (ENDED, "DataError: x")


def test_survivor_that_closes_after_its_diagnosis_stays_nobodys_culprit():
    store = dist.HashStore()
    watchdog = Watchdog(store, 0, 1, interval_s=0.02)
    watchdog.diagnose()
    watchdog.close("PeerLostError: reset")
    last = ProgressRecord.from_json(store.get("watchdog/0"))
    assert (last.state, last.reason) == (FAILING, "")


# --- real ranks


def fork_ranks(world_size, body, timeout=40):
    """Fork ranks that write one line each; a rank may kill itself. Returns rank -> text."""
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    torch.set_num_threads(1)
                    text = body(rank, world_size, folder)
                    with open(os.path.join(folder, f"out{rank}"), "w") as file:
                        file.write(text or "")
                    status = 0
                finally:
                    os._exit(status)
            pids[rank] = pid
        deadline = time.monotonic() + timeout
        waiting = dict(pids)
        try:
            while waiting and time.monotonic() < deadline:
                for rank, pid in list(waiting.items()):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        del waiting[rank]
                survivors = [r for r in waiting if not os.path.exists(os.path.join(folder, f"stopped{r}"))]
                if not survivors:
                    break
                time.sleep(0.02)
        finally:
            for pid in waiting.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        texts = {}
        for rank in range(world_size):
            path = os.path.join(folder, f"out{rank}")
            texts[rank] = Path(path).read_text() if os.path.exists(path) else None
        return texts


def _fault(kind):
    """Three ranks, four collectives; rank 1 fails after the second as `kind` says; survivors diagnose."""

    def body(rank, world_size, folder):
        store = dist.FileStore(os.path.join(folder, "watch"), world_size)
        watchdog = Watchdog(store, rank, world_size, interval_s=0.2)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from datetime import timedelta

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "pg"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2),
        )
        started = time.monotonic()
        try:
            for step in range(1, 5):
                watchdog.step(step)
                if rank == 1 and step == 3:
                    with watchdog.phase("data"):
                        time.sleep(0.5)  # a record that says where we are is published by now
                        if kind == "kill":
                            os.kill(os.getpid(), signal.SIGKILL)
                        if kind == "stop":
                            open(os.path.join(folder, "stopped1"), "w").close()
                            os.kill(os.getpid(), signal.SIGSTOP)
                        if kind == "sleep":
                            open(os.path.join(folder, "stopped1"), "w").close()
                            time.sleep(60)
                        if kind == "error":
                            watchdog.close("DataError: corpus.bin is short")
                            os._exit(4)
                with watchdog.phase("grad-sync"):
                    watchdog.collective("all_reduce", "dp", (0, 1, 2))
                    dist.all_reduce(torch.ones(2))
        except RuntimeError:
            found_at = time.monotonic()
            text = watchdog.diagnose()
            assert time.monotonic() - found_at < 2.0
            assert found_at - started < 30
            return text
        return "no failure"

    return body


@pytest.mark.parametrize("kind", ["kill", "stop", "sleep", "error"])
def test_survivors_name_rank_1(kind):
    texts = fork_ranks(3, _fault(kind))
    assert texts[1] is None
    for rank in (0, 2):
        text = texts[rank]
        assert text.startswith("rank 1 (host "), (rank, text)
        if kind == "error":
            assert "ended at step 3, phase data: DataError: corpus.bin is short" in text
        else:
            assert "missed all_reduce #3 of group 'dp' at step 3, phase grad-sync" in text
            assert "in step 3, phase data" in text
            assert ("alive" in text) == (kind == "sleep")


def test_store_that_dies_with_rank_0_is_said_to_be_gone():
    def body(rank, world_size, folder):
        port_file = os.path.join(folder, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
            with open(port_file + ".tmp", "w") as file:
                file.write(str(store.port))
            os.rename(port_file + ".tmp", port_file)
            watchdog = Watchdog(store, rank, world_size, interval_s=0.1)
            store.wait(["watchdog/1"])
            watchdog.close()
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists(port_file):
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(Path(port_file).read_text()), world_size, False)
        watchdog = Watchdog(store, rank, world_size, interval_s=0.1)
        watchdog.step(9)
        deadline = time.monotonic() + 20
        while watchdog.store_error is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return watchdog.diagnose()

    texts = fork_ranks(2, body)
    assert texts[1].startswith("the store is gone (")
    assert "rank 0" in texts[1]
    assert "step 9" in texts[1]


def test_store_that_does_not_answer_does_not_hold_us_up():
    class Mute:
        def set(self, key, value):
            return None

        def get(self, key):
            raise AssertionError("not reached")

        def check(self, keys):
            time.sleep(60)
            return False

        def clone(self):
            return self

    started = time.monotonic()
    text = Watchdog(Mute(), 1, 2, interval_s=0.1).diagnose()
    assert time.monotonic() - started < 10
    assert "does not answer" in text


def test_without_memory_for_another_thread_the_rank_still_says_where_it_was(monkeypatch):
    """A rank that has lost a peer, itself at a limit on its data (ulimit -d), ended with a traceback."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    watchdog = Watchdog(store, 0, 2, interval_s=0.1)
    watchdog.step(7)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        text = watchdog.diagnose()
    watchdog.close()
    assert text.startswith(
        "who is to blame cannot be looked up (can't start new thread). This rank was at step 7"
    )


def test_store_that_answers_slowly_is_read_to_the_end():
    """On a loaded machine: every answer takes its time, and all of them more than a store may be silent for."""

    class Slow:
        def __init__(self):
            self.kept = {}

        def set(self, key, value):
            self.kept[key] = value

        def get(self, key):
            time.sleep(0.2)
            return self.kept[key]

        def check(self, keys):
            return set(keys) <= self.kept.keys()

        def clone(self):
            return self

    store = Slow()
    peers = [Watchdog(store, rank, 4, interval_s=0.1) for rank in (0, 2, 3)]
    text = Watchdog(store, 1, 4, interval_s=0.1).diagnose()
    for peer in peers:
        peer.close()
    assert "the store is gone" not in text
