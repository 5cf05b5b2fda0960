"""States between neighbours: exact numbers, two ways at once, in order, whatever the grid; and a lost neighbour."""

from __future__ import annotations

import math
import os
import struct

import pytest

from megatron.core.pipeline_parallel.post_validation.channel import StateChannel
from tests.harness.ranks import rank_outcomes, run_ranks

NUMBERS = [0.1, -0.0, math.inf, 5e-324, 2.0**53 - 1, math.nan]


def test_numbers_arrive_bit_for_bit_and_in_order():
    def body(ctx):
        ps = ctx.make_ps(tp=2, pp=2)
        channel, peer = StateChannel(ps), 1 - ps.pp_rank
        got = []
        for numbers in (NUMBERS, [float(ctx.rank)] * len(NUMBERS)):
            arrival = channel.receive(peer)  # the first time of unknown length
            channel.send(peer, numbers)
            got.append(arrival.wait(len(NUMBERS)))
        channel.drain()
        channel.drain()  # nothing is left
        with pytest.raises(AssertionError, match="1 numbers, not 6"):
            channel.send(peer, [1.0])
        return ps.pp_group.ranks[peer], [struct.pack("6d", *one) for one in got]

    for peer, (first, second) in run_ranks(body, 4):
        assert first == struct.pack("6d", *NUMBERS)
        assert second == struct.pack("6d", *[float(peer)] * 6)  # of the same tensor parallel rank


def test_a_lost_neighbour_is_named():
    def body(ctx):
        channel = StateChannel(ctx.make_ps(pp=2))
        if ctx.rank == 1:
            os._exit(9)
        channel.receive(1).wait(6)

    first, _ = rank_outcomes(body, 2)
    assert first.error is not None
    assert "PeerLostError" in first.error
    assert "post-validation's state from pipeline rank 1" in first.error
