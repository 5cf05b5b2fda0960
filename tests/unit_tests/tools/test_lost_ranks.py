"""Launchers agree on what becomes of ranks that were lost: all start them again, or none."""

import signal
import threading
import time

import pytest
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.catalog import TRACKER_NAME
from tools import lost_ranks
from tools.lost_ranks import Launchers, Restarts

KILLED, PEER_LOST, DIVERGED = -signal.SIGKILL, 6, 5


def saved(folder, iteration):
    (folder / TRACKER_NAME).write_text(str(iteration))


def agreed(folder, *statuses, late_s=0.0, store=None, attempt=0, each=None, beats=True):
    """What the launchers of these ranks decide, the last one late. each: those of the attempt before. beats: whether
    the late one is heard of meanwhile."""
    each = each or [Restarts(folder) for _ in statuses]
    store, answers = store or HashStore(), [None] * len(statuses)
    saved(folder, 5 + attempt)

    def ask(number, ended):
        launchers, begun = Launchers(store, number, len(statuses)), time.monotonic()
        while number == len(statuses) - 1 and time.monotonic() - begun < late_s:
            if beats:
                each[number].beat(launchers)
            time.sleep(0.01)
        answers[number] = each[number].agreed(launchers, attempt, ended)

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(statuses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_lost_ranks_start_again_on_all_machines(tmp_path, capfd):
    assert agreed(tmp_path, [KILLED], [PEER_LOST, PEER_LOST], late_s=0.2) == [True, True]
    assert capfd.readouterr().err.count("iteration 5 is saved: all of them start again") == 2


@pytest.mark.parametrize(
    "statuses",
    [([DIVERGED], [PEER_LOST]), ([PEER_LOST], [KILLED, DIVERGED]), ([], [KILLED]), ([KILLED], [])],
    ids=["the first", "the second", "the first is done", "the second is done"],
)
def test_a_rank_with_a_reason_of_its_own_ends_the_run(tmp_path, statuses):
    assert agreed(tmp_path, *statuses, late_s=0.2) == [False, False]


@pytest.mark.parametrize("beats", [True, False])
def test_a_launcher_that_is_not_heard_of_is_not_waited_for(tmp_path, monkeypatch, beats):
    """It comes too late and ends, too."""
    monkeypatch.setattr(lost_ranks, "BEAT_S", 0.1)
    monkeypatch.setattr(lost_ranks, "QUIET_S", 0.4)
    assert agreed(tmp_path, [KILLED], [PEER_LOST], late_s=0.9, beats=beats) == [beats, beats]


def test_each_restart_needs_a_checkpoint_of_its_own(tmp_path):
    saved(tmp_path, 5)
    assert agreed(tmp_path, [KILLED]) == [False]  # the checkpoint was there when it began
    each, store = [Restarts(tmp_path), Restarts(tmp_path)], HashStore()
    for attempt in (1, 2):
        assert agreed(tmp_path, [KILLED], [PEER_LOST], store=store, attempt=attempt, each=each) == [True] * 2
    assert not any(one.agreed(Launchers(HashStore(), 0, 1), 3, [KILLED]) for one in each)


def test_a_store_that_is_gone_ends_the_run(tmp_path):
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

    restarts = Restarts(tmp_path)
    saved(tmp_path, 5)
    assert not restarts.agreed(Launchers(Gone(), 0, 2), 0, [KILLED])
