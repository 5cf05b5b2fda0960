"""Messages between pipeline ranks: shapes told once, receives posted ahead, a bounded number of sends."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.ir import RECV_B, RECV_F, SEND_B, SEND_F
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.transport.collectives import Pending
from megatron.core.transport.parallel_state import single_process
from tests.harness.ranks import run_ranks


def op(kind, stage, microbatch, peer):
    return (kind, stage, microbatch, 0, -1, -1, peer, 0)


def counted(channel):
    """The messages that a channel starts, in order: (send or receive, elements, purpose of the group)."""
    started = []
    start, line = channel._start, channel._route

    def by_batch(sends, receives, group):
        started.extend(("send", tensor.numel(), group.purpose) for _, tensor in sends)
        started.extend(("receive", tensor.numel(), group.purpose) for _, tensor in receives)
        return start(sends, receives, group)

    def by_line(op):
        _, shape = channel._shapes[op[0], op[6]]
        direction = "send" if op[0] in (SEND_F, SEND_B) else "receive"
        started.append((direction, math.prod(shape), channel._groups[op[0]].purpose))
        return line(op)

    channel._start, channel._route = by_batch, by_line
    return started


def test_any_shape_and_dtype_is_told_once_a_route():
    tensors = [
        torch.arange(6.0).view(2, 3).bfloat16(),
        torch.tensor(7.0, dtype=torch.float64),
        torch.arange(24.0).view(1, 2, 3, 4).transpose(1, 3),  # not contiguous
        torch.empty(0, 3),
    ]

    def check(ctx):
        ps = ctx.make_ps(pp=2)
        got = []
        for tensor in tensors:
            channel = P2P(ps)
            started = counted(channel)
            for microbatch in range(2):
                if ctx.rank == 0:
                    channel.post([(op(SEND_F, 0, microbatch, 1), tensor + microbatch)])
                else:
                    (arrival,) = channel.post([(op(RECV_F, 1, microbatch, 0), None)])
                    one = arrival.wait()
                    got.append((one.dtype, one.tolist(), one.shape == tensor.shape))
            channel.drain()
            assert len(started) == 3  # one header
        return got

    assert run_ranks(check, 2)[1] == [
        (tensor.dtype, (tensor + m).tolist(), True) for tensor in tensors for m in range(2)
    ]


@pytest.mark.parametrize("batches", [False, True])
def test_directions_and_batches_once_hands_are_shaken(batches):
    """One batch: both directions at once, each over its own communicator; receives wait in any order. A backend with
    batches gets one a direction; else sends come first."""

    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2))
        assert not channel._batches  # gloo
        channel._batches = batches
        me, peer = ctx.rank, 1 - ctx.rank
        value = torch.full((2,), float(me))
        got = []
        started = counted(channel)
        for step in range(3):
            started.clear()
            # In one global order, as a plan has it: rank 0's messages first.
            sends = [(op(SEND_F, me, step, peer), value + step), (op(SEND_B, me, step, peer), -value - step)]
            receives = [(op(RECV_F, me, step, peer), None), (op(RECV_B, me, step, peer), None)]
            arrivals = channel.post([*sends, *receives] if me == 0 else [*receives, *sends])
            got.append([arrival.wait().tolist() for arrival in reversed(arrivals)])
            backward = [("send", 2, "pp_backward"), ("receive", 2, "pp_backward")]
            forward = [("send", 2, "pp_forward"), ("receive", 2, "pp_forward")]
            if batches and step:
                assert started == [*backward, *forward]
            elif step:
                assert started == [forward[0], backward[0], forward[1], backward[1]]
        channel.drain()
        return got

    first, second = run_ranks(check, 2)
    assert first == [[[-1.0 - s] * 2, [1.0 + s] * 2] for s in range(3)]
    assert second == [[[-0.0 - s] * 2, [0.0 + s] * 2] for s in range(3)]


def test_another_shape_is_refused_where_it_is_sent_showing_both():
    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2))
        if ctx.rank == 0:
            channel.post([(op(SEND_F, 0, 0, 1), torch.zeros(2, 3))])
            messages = []
            for tensor in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)):
                with pytest.raises(ModelError, match="0SEND_F1@1#0") as caught:
                    channel.post([(op(SEND_F, 0, 1, 1), tensor)])
                messages.append(str(caught.value))
            channel.drain()
            return messages
        return channel.post([(op(RECV_F, 1, 0, 0), None)])[0].wait().shape

    messages, shape = run_ranks(check, 2)
    assert shape == (2, 3)
    assert "float32 [2, 4] after float32 [2, 3]" in messages[0]
    assert "float64 [2, 3] after float32 [2, 3]" in messages[1]


def test_sends_are_kept_up_to_a_number():
    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2), max_sends=3)
        if ctx.rank == 1:
            for microbatch in range(8):
                channel.post([(op(RECV_F, 1, microbatch, 0), None)])[0].wait()
            return None
        held = []
        for microbatch in range(8):
            channel.post([(op(SEND_F, 0, microbatch, 1), torch.zeros(4))])
            held.append(len(channel._sends))
        channel.drain()
        return [*held, len(channel._sends)]

    held = run_ranks(check, 2)[0]
    assert max(held) == 3
    assert held[-1] == 0


def test_a_released_send_is_kept_no_longer():
    """Its memory is free after the next batch. A release may come too late; only the others count for the bound."""

    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2), max_sends=2)
        if ctx.rank == 1:
            for microbatch in range(4):
                channel.post([(op(RECV_F, 1, microbatch, 0), None)])[0].wait()
                channel.post([(op(SEND_B, 1, microbatch, 0), torch.zeros(1))])
            channel.drain()
            return None
        held = []
        for microbatch in range(4):
            array = np.zeros(4, dtype=np.float32)
            alive = weakref.ref(array)
            channel.post([(op(SEND_F, 0, microbatch, 1), torch.from_numpy(array))])
            (arrival,) = channel.post([(op(RECV_B, 0, microbatch, 1), None)])
            del array
            arrival.wait()
            held.append((alive() is not None, len(channel._sends)))
            if microbatch != 1:
                channel.release([(SEND_F, 0, microbatch), (SEND_F, 0, 17)])
                assert alive() is not None  # somebody waits for the computation that starts now
            channel.post([])
            held.append((alive() is not None, len(channel._sends)))
        channel.drain()
        return [*held, len(channel._sends), len(channel._headers)]

    kept, free = (True, 1), (False, 0)
    assert run_ranks(check, 2)[0] == [
        kept,
        free,
        kept,
        kept,
        (True, 2),
        (False, 1),
        (True, 2),
        (False, 1),
        0,
        0,
    ]


def test_completed_sends_are_dropped_where_the_backend_says_so(monkeypatch):
    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2), max_sends=9)
        assert not channel._batches  # gloo knows nothing before it is waited for
        channel._batches = True
        if ctx.rank == 1:
            for microbatch in range(6):
                channel.post([(op(RECV_F, 1, microbatch, 0), None)])[0].wait()
            return None
        through, held = set(), []
        monkeypatch.setattr(Pending, "is_completed", lambda self: self in through)
        for microbatch in range(6):
            channel.post([(op(SEND_F, 0, microbatch, 1), torch.zeros(4))])
            held.append([key[2] for key in channel._sends])
            if microbatch in (1, 3, 4):  # the first two; one behind another that is under way; all
                done = {1: (0, 1), 3: (3,), 4: (2, 4)}[microbatch]
                through |= {channel._sends[SEND_F, 0, m][1] for m in done}
        channel.drain()
        return held

    assert run_ranks(check, 2)[0] == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5]]


def test_more_dims_and_other_dtypes_than_a_header_can_say():
    channel = P2P(single_process())
    with pytest.raises(ModelError, match=r"float32 \[1, .*that is 9 dimensions, and .* at most 8"):
        channel._shake_hands(op(SEND_F, 0, 0, 1), torch.zeros([1] * 9))
    with pytest.raises(ModelError, match=r"int32 \[1\]; .* one of the types float32, float64,"):
        channel._shake_hands(op(SEND_F, 0, 0, 1), torch.zeros(1, dtype=torch.int32))
