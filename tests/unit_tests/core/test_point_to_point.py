"""Lines between two ranks on gloo; `send_receive`, which is made of them there, has its tests in test_collectives."""

from __future__ import annotations

import torch

from megatron.core.transport.point_to_point import P2PRoute, send_receive
from tests.harness.ranks import run_ranks


def test_messages_of_a_line_arrive_in_order_whichever_way_the_other_end_takes():
    def check(ctx):
        group = ctx.make_ps(pp=2).pp_forward_group
        got, kept = [], []
        if ctx.rank == 0:
            line = P2PRoute("send", 1, group)
            for value in range(4):
                tensor = torch.full((3,), float(value))
                kept.append(line.start(tensor) if value % 2 else send_receive([(tensor, 1)], [], group)[0][0])
        else:
            line = P2PRoute("receive", 0, group)
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
