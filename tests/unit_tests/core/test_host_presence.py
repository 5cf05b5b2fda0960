"""Ranks of one host that wait for each other through memory."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import time

import pytest
import torch

from megatron.core import collectives, host_memory, host_presence
from megatron.core.host_memory import meet_on_host, shared_zeros
from megatron.core.host_presence import presence_of
from tests.harness.ranks import rank_outcomes, run_ranks

ROUNDS = 200


def test_nobody_passes_a_fence_before_all_have_come():
    """A ring of writes and reads with a fence between them, ranks late in turn: every value read is that round's."""

    def body(ctx):
        group = ctx.ps.dp_gather_group
        meet_on_host(group)
        assert presence_of(group) is not None
        meet_on_host(group)  # again: nothing
        shared = shared_zeros(4, torch.int64, group)
        left = (ctx.rank - 1) % ctx.world_size
        for turn in range(ROUNDS):
            if turn % 40 == 10 * ctx.rank:
                time.sleep(0.005)
            shared.own.fill_(turn)
            collectives.fence(group)
            if shared.of_ranks[left].tolist() != [turn] * 4:
                return f"{turn}: {shared.of_ranks[left]}"
            collectives.fence(group)
        return "in step"

    assert run_ranks(body, 2) == ["in step"] * 2
    assert run_ranks(body, 3) == ["in step"] * 3


def test_a_point_is_complete_once_all_have_come():
    def body(ctx):
        group = ctx.ps.dp_gather_group
        meet_on_host(group)
        presence = presence_of(group)
        if ctx.rank == 1:
            collectives.fence(ctx.ps.dp_reduce_group)
            presence.come("here").wait()
            return True
        first = presence.come("here")
        early = first.is_completed()
        collectives.fence(ctx.ps.dp_reduce_group)
        first.wait()
        return not early and first.is_completed()

    assert run_ranks(body, 2) == [True, True]


def test_ranks_that_do_different_things_hear_of_it():
    def body(ctx):
        group = ctx.ps.dp_gather_group
        meet_on_host(group)
        for _ in range(100):  # marks are used again
            collectives.fence(group)
        with pytest.raises(
            AssertionError, match=rf"point 101: rank {1 - ctx.rank} has come there for something else"
        ):
            presence_of(group).come(f"rank {ctx.rank}").wait()
        return True

    assert run_ranks(body, 2) == [True, True]


def test_no_message_is_sent(monkeypatch):
    def body(ctx):
        group = ctx.ps.dp_gather_group
        meet_on_host(group)
        with monkeypatch.context() as one:
            one.setattr(torch.distributed, "all_reduce", lambda *_, **__: pytest.fail("a message"))
            collectives.fence(group)
        return True

    assert run_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("silent", [False, True])
def test_a_dead_or_silent_peer_is_lost(silent):
    def body(ctx):
        group = ctx.ps.dp_gather_group
        if silent:
            group = dataclasses.replace(group, timeout=datetime.timedelta(seconds=0.5))
        meet_on_host(group)
        collectives.fence(group)
        if ctx.rank == 1:
            if silent:
                time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.fence(group)

    said = rank_outcomes(body, 2)[0].error
    assert said is not None
    assert "PeerLostError: rank 0: lost a peer in fence over group 'dp_gather'" in said
    assert ("waiting for ranks [1]" if silent else "the process of rank 1 has ended") in said


def test_where_one_cannot_all_send_messages(monkeypatch):
    def body(ctx):
        group, found = ctx.ps.dp_gather_group, []
        files = len(os.listdir("/proc/self/fd"))
        for module, name, instead in (
            (host_memory, "watched", lambda processes: None),
            (host_memory, "shared_zeros", lambda *_: None),
            (host_presence.platform, "machine", lambda: "aarch64"),
        ):
            with monkeypatch.context() as one:
                if ctx.rank == 1 or name == "shared_zeros":  # which all ranks agree on by themselves
                    one.setattr(module, name, instead)
                meet_on_host(group)
            found.append(presence_of(group) is None)
            collectives.fence(group)
        return found, len(os.listdir("/proc/self/fd")) - files

    for found, files in run_ranks(body, 2):
        assert found == [True] * 3
        assert files == 0
