"""Messages between ranks of one host: as `P2PRoute`'s, through memory that both ends see."""

from __future__ import annotations

import os
import time

import torch

from megatron.core.transport import shared_memory, shm_messages
from megatron.core.transport.point_to_point import P2PRoute
from megatron.core.transport.shm_messages import SharedRoute, open_route
from tests.harness.ranks import rank_outcomes, run_ranks


def route_between(ctx, num_bytes=12, most=2):
    """Rank 0 sends to rank 1."""
    group = ctx.make_ps(pp=2).pp_forward_group
    return open_route("receive" if ctx.rank else "send", 1 - ctx.rank, group, num_bytes, most)


def test_messages_arrive_in_order_whatever_is_waited_for_first():
    """Seven of them in a ring of three, one of which is not taken before the end."""

    def check(ctx):
        route = route_between(ctx)
        if ctx.rank == 0:
            sent = [torch.full((3,), float(value)) for value in range(7)]
            sends = [route.start(tensor) for tensor in sent]
            return [send.is_completed() for send in sends], route._counters[shm_messages._TAKEN] >= 4
        buffers = [torch.empty(3) for _ in range(7)]
        arrivals = [route.start(buffer) for buffer in buffers[:2]]
        arrivals[1].wait()
        both = [buffer.tolist() for buffer in buffers[:2]]
        arrivals += [route.start(buffer) for buffer in buffers[2:]]  # more than slots: the oldest are taken
        for arrival in (arrivals[5], arrivals[0], arrivals[6]):
            arrival.wait()
            assert arrival.is_completed()
        return both, [buffer.tolist() for buffer in buffers]

    sender, receiver = run_ranks(check, 2)
    assert sender == ([True] * 7, True)
    values = [[float(value)] * 3 for value in range(7)]
    assert receiver == (values[:2], values)


def test_a_sender_waits_for_room_and_a_receiver_for_a_message():
    """In the kernel, until the other one writes: either end is woken or comes to it by itself."""

    def check(ctx):
        route, slept = route_between(ctx, num_bytes=4, most=0), 0
        syscall = shared_memory._syscall

        def counted(*args):
            nonlocal slept
            slept += args[2] == shared_memory._WAIT
            return syscall(*args)

        shared_memory._syscall = counted
        for value in range(4):
            if ctx.rank == 0:
                time.sleep(0.02 if value < 2 else 0)
                route.start(torch.tensor([float(value)]))
            else:
                time.sleep(0.02 if value >= 2 else 0)
                buffer = torch.empty(1)
                route.start(buffer).wait()
                assert buffer.item() == value
        return slept > 0

    assert run_ranks(check, 2) == [True, True]


def test_a_lost_sender_is_named():
    def check(ctx):
        route = route_between(ctx)
        if ctx.rank == 0:
            route.start(torch.ones(3))
            os._exit(9)
        buffers = [torch.empty(3), torch.empty(3)]
        arrivals = [route.start(buffer) for buffer in buffers]
        arrivals[0].wait()
        assert buffers[0].tolist() == [1.0] * 3  # was put before
        arrivals[1].wait()

    error = rank_outcomes(check, 2)[1].error or ""
    assert "PeerLostError: rank 1: lost rank 0 in receive over group 'pp_forward'" in error
    assert "the process of rank 0 has ended" in error


def test_routes_without_such_memory_send_messages(monkeypatch):
    """Where it cannot be had at either end, and where messages are too long for a ring."""

    def check(ctx):
        kinds = []
        for owner, name, instead, rank in (
            (shm_messages, "RING_BYTES", 16, 1),
            (shared_memory.platform, "machine", lambda: "aarch64", 0),
            (shared_memory.os, "readlink", lambda path: "/somebody/elses", 0),
            (shared_memory.os, "readlink", lambda path: "/somebody/elses", 1),
        ):
            with monkeypatch.context() as patched:
                if ctx.rank == rank or name == "RING_BYTES":
                    patched.setattr(owner, name, instead)
                route = route_between(ctx)
            tensor = torch.full((3,), 1.0 - ctx.rank)
            route.start(tensor).wait()
            kinds.append((type(route), tensor.tolist()))
        return kinds

    assert run_ranks(check, 2)[1] == [(P2PRoute, [1.0] * 3)] * 4


def test_no_file_stays_open():
    def check(ctx):
        group = ctx.make_ps(pp=2).pp_forward_group
        warm_up = torch.zeros(1)
        P2PRoute("receive" if ctx.rank else "send", 1 - ctx.rank, group).start(warm_up).wait()
        files = len(os.listdir("/proc/self/fd"))
        route = open_route("receive" if ctx.rank else "send", 1 - ctx.rank, group, 12, 2)
        return type(route), len(os.listdir("/proc/self/fd")) - files

    assert run_ranks(check, 2) == [(SharedRoute, 0)] * 2
