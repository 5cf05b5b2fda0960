"""Echoes: which sends an arrival proves complete. The oracle steps through whole plans."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.held.sends import send_completion
from megatron.core.pipeline_parallel.plan.ir import BW, RECV_B, RECV_F, SEND_B, SEND_F, B, F
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from tests.harness.toy_pipeline import lowered, random_plan

INPUT = {F: RECV_F, B: RECV_B, BW: RECV_B}


def taken_before_sent(plan):
    """For each message sent, by (kind, stage, microbatch) of its send: the messages of which the sender had taken the
    input before, by their sends."""
    known = {}
    for row in plan.rows:
        taken = set()
        for kind, stage, microbatch, *_ in row:
            if kind == F:
                taken.add((SEND_F, stage - 1, microbatch))
            elif kind in (B, BW):
                taken.add((SEND_B, stage + 1, microbatch))
            elif kind in (SEND_F, SEND_B):
                known[kind, stage, microbatch] = frozenset(taken)
    return known


def held(plan, rank):
    """(most sends held at a time, held after the last operation), by the definition: each arrival proves what its
    sender had taken before."""
    known, row = taken_before_sent(plan), plan.rows[rank]
    found, released = send_completion(plan, rank), []
    under_way, most, peers = [], 0, {op[:3]: op[6] for op in row}
    for op in row:
        if op[0] in (SEND_F, SEND_B):
            under_way.append(op[:3])
            most = max(most, len(under_way))
        elif op[0] in INPUT:
            key = (INPUT[op[0]], op[1], op[2])
            if key not in peers:  # the model's end, or another stage of this rank
                assert key not in found
                continue
            carried = (SEND_F, op[1] - 1, op[2]) if op[0] == F else (SEND_B, op[1] + 1, op[2])
            proven = {one for one in under_way if peers[one] == peers[key] and one in known[carried]}
            assert set(found.get(key, ())) == proven, (op, found.get(key), proven)
            released += found.get(key, ())
            under_way = [one for one in under_way if one not in proven]
    assert len(released) == len(set(released))
    assert sorted(released + under_way) == sorted(op[:3] for op in row if op[0] in (SEND_F, SEND_B))
    return most, len(under_way)


def test_an_arrival_proves_what_its_sender_had_taken():
    plan = lowered(build_plan("1f1b", Request(2, 3)))
    # rank 1: F0 BW0 F1 BW1 F2 BW2
    assert send_completion(plan, 0) == {(RECV_B, 0, m): ((SEND_F, 0, m),) for m in range(3)}
    # rank 0: F0 F1 BW0 F2 BW1 BW2: F2 is proof of the gradient of microbatch 0 having been there
    assert send_completion(plan, 1) == {(RECV_F, 1, 2): ((SEND_B, 1, 0),)}


@pytest.mark.parametrize(("kind", "ranks", "chunks"), [("linear", 3, 1), ("v", 3, 2), ("looped", 2, 3)])
def test_any_plan(kind, ranks, chunks):
    for seed in range(10):
        plan = lowered(random_plan(Placement(kind, ranks, chunks), 5, seed), comm=seed % 3)
        for rank in range(ranks):
            held(plan, rank)


def test_schedules_hold_few_sends_however_many_microbatches():
    for ranks, microbatches in ((2, 8), (4, 32), (8, 64)):
        plan = lowered(build_plan("1f1b", Request(ranks, microbatches)))
        steady = [held(plan, rank)[0] for rank in range(ranks)]
        # of the 2 x microbatches that a rank in the middle sends: as many as it holds activations, and one
        assert steady == [ranks, *(ranks - rank + 1 for rank in range(1, ranks))]
        plan = lowered(build_plan("interleaved", Request(ranks, microbatches, 2)))
        assert max(held(plan, rank)[0] for rank in range(ranks)) <= 3 * ranks


def test_nothing_echoes_in_an_evaluation_of_one_chunk():
    plan = lowered(forward_only(build_plan("1f1b", Request(3, 4))))
    assert [send_completion(plan, rank) for rank in range(3)] == [{}] * 3
    assert [held(plan, rank) for rank in range(3)] == [(4, 4), (4, 4), (0, 0)]
