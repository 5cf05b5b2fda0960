"""Who has come, and what is decided for all: threads for ranks, over a store of this process or a real one."""

import datetime
import json
import threading

import pytest
import torch.distributed as dist

from megatron.core.transport.peer_loss import PeerLostError
from megatron.training.config.launch_env import LaunchEnvError
from megatron.training.guard.startup_check import Meeting


def meet(ranks, store=None, judge=None, timeout_s=20.0):
    """What each rank hears or raises. ranks: (rank, world size, facts, texts) of each that comes."""
    store = store or dist.HashStore()
    heard = [None] * len(ranks)
    judge = judge or (lambda told, read: json.dumps([told, read(told[-1]["text"])]))

    def come(place, rank, world_size, facts, texts):
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            meeting = Meeting(store, rank, world_size, timeout, hosts=rank == 0)
            heard[place] = meeting.decide(facts, texts, judge)
        except (LaunchEnvError, PeerLostError) as error:
            heard[place] = error

    threads = [threading.Thread(target=come, args=(place, *who)) for place, who in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def rank(number, world_size, text="t"):
    return number, world_size, {"rank": str(number), "text": text}, {text: f"long {text}"}


def test_rank_0_judges_what_all_say_and_all_hear_it():
    heard = meet([rank(2, 3, "other"), rank(1, 3), rank(0, 3)])
    assert len(set(heard)) == 1
    told, text = json.loads(heard[0])
    assert [facts["rank"] for facts in told] == ["0", "1", "2"]
    assert text == "long other"


def test_nothing_to_say_is_an_empty_text():
    assert meet([rank(0, 2), rank(1, 2)], judge=lambda told, read: "") == ["", ""]


@pytest.mark.parametrize(("come", "missing"), [((0, 1, 3), "rank 2 has"), ((1, 2), "ranks 0, 3 have")])
def test_who_does_not_come_is_named_on_all_others(come, missing):
    heard = meet([rank(number, 4) for number in come], timeout_s=0.3)
    assert all(isinstance(error, PeerLostError) for error in heard), heard
    assert all(f"{missing} not come" in str(error) for error in heard), heard


def test_who_dies_after_he_came_is_named():
    store = dist.HashStore()
    dist.PrefixStore("meeting", store).add("came/1", 1)
    (error,) = meet([rank(0, 2)], store, timeout_s=0.3)
    assert "rank 1 has not come" in str(error)


def test_a_rank_number_used_twice():
    heard = meet([rank(0, 3), rank(1, 3), rank(1, 3)])
    assert len(set(heard)) == 1
    assert heard[0].startswith("RANK=1 was given to two processes of one launch: process "), heard
    assert ", and process " in heard[0]  # both are named, also where they come in the same moment


def test_other_world_sizes():
    heard = meet([rank(0, 3), rank(1, 2)])
    assert heard == ["WORLD_SIZE: rank 1 has 2, rank 0 3"] * 2
    heard = meet([rank(0, 2), rank(2, 3)])
    assert heard == ["WORLD_SIZE: rank 2 has 3, rank 0 2"] * 2


def test_a_stranger_leaves_the_others_alone():
    """Another launch that was given the same port."""
    store = dist.HashStore()
    assert meet([rank(0, 2), rank(1, 2)], store, judge=lambda told, read: "") == ["", ""]
    (error,) = meet([rank(1, 2)], store)
    assert isinstance(error, LaunchEnvError)
    assert "is another run using this MASTER_PORT?" in str(error)


class Departures(dist.Store):
    """A store that tells whoever asks anything behind its farewell."""

    def __init__(self):
        super().__init__()
        self.store, self.late, self._gone = dist.HashStore(), [], set()

    def _asked(self, what):
        if threading.get_ident() in self._gone:
            self.late.append(what)

    def set(self, key, value):
        self._asked(key)
        self.store.set(key, value)

    def get(self, key):
        self._asked(key)
        return self.store.get(key)

    def check(self, keys):
        self._asked(keys)
        return self.store.check(keys)

    def compare_set(self, key, expected, value):
        self._asked(key)
        return self.store.compare_set(key, expected, value)

    def add(self, key, amount):
        self._asked(key)
        if key.endswith("left") and amount:
            self._gone.add(threading.get_ident())
        return self.store.add(key, amount)


def test_who_does_not_host_the_store_asks_nothing_behind_his_farewell():
    """The host may be gone with it by then, and torch prints pages for an answer that does not come."""
    store = Departures()
    heard = meet([rank(1, 3), rank(2, 3)], store, timeout_s=0.2)
    assert all("rank 0 has not come" in str(error) for error in heard)
    assert store.late == []
