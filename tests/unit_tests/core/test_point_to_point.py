"""Lines between two ranks on gloo: the messages of `send_receive`, observed and blamed alike."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from megatron.core.peer_loss import PeerLostError
from megatron.core.point_to_point import Line, send_receive
from tests.harness.ranks import rank_outcomes, run_ranks


def test_messages_of_a_line_arrive_in_order_whichever_way_the_other_end_takes():
    def check(ctx):
        group = ctx.make_ps(pp=2).pp_forward_group
        got, kept = [], []
        if ctx.rank == 0:
            line = Line("send", 1, group)
            for value in range(4):
                tensor = torch.full((3,), float(value))
                kept.append(line.start(tensor) if value % 2 else send_receive([(tensor, 1)], [], group)[0][0])
        else:
            line = Line("receive", 0, group)
            buffers = [torch.empty(3) for _ in range(4)]
            kept = [line.start(one) for one in buffers[:3]]
            kept += send_receive([], [(buffers[3], 0)], group)[1]
        for message in reversed(kept):  # in any order
            message.wait()
            assert message.is_completed()
        if ctx.rank == 1:
            got = [one.tolist() for one in buffers]
        return got

    assert run_ranks(check, 2)[1] == [[float(value)] * 3 for value in range(4)]


def test_the_observer_hears_what_it_hears_of_send_receive():
    def check(ctx):
        told = []
        group = dataclasses.replace(
            ctx.make_ps(pp=2).pp_backward_group, observer=lambda *what: told.append(what)
        )
        direction, peer, tensor = ("send", "receive")[ctx.rank], 1 - ctx.rank, torch.zeros(2)
        Line(direction, peer, group).start(tensor).wait()
        both = ([(tensor, peer)], []) if ctx.rank == 0 else ([], [(tensor, peer)])
        for messages in send_receive(*both, group):
            for message in messages:
                message.wait()
        return told

    first, second = run_ranks(check, 2)
    assert first == [("send", "pp_backward 0->1", (0, 1))] * 2
    assert second == [("receive", "pp_backward 0->1", (0, 1))] * 2


def test_a_lost_rank_is_named():
    def check(ctx):
        group = ctx.make_ps(pp=2).pp_forward_group
        if ctx.rank == 1:
            os._exit(3)
        message = Line("receive", 1, group).start(torch.empty(2))
        with pytest.raises(PeerLostError, match="lost rank 1 in receive over group 'pp_forward'") as caught:
            message.wait()
        assert caught.value.peer == 1
        with pytest.raises(PeerLostError, match="lost rank 1 in send"):
            Line("send", 1, group).start(torch.empty(2)).wait()
        os._exit(7)  # a barrier with the lost one would follow

    outcomes = rank_outcomes(check, 2, timeout=20)
    assert outcomes[0].died == "exited with status 7 without returning"
