"""Forwards held back: the same computations, a valid plan, and never more than there is room for."""

import random

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, F, W, op_text
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.order_variants import Room, hold_back
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES


def made(schedule, ranks, total):
    placement = SCHEDULES[schedule].placed(ranks)
    costs = CostModel.of_ranks(placement, activation=(60.0,), memory_after_b=0.5)
    chunks = placement.num_chunks if placement.kind != "v" else None
    return build_plan(schedule, Request(ranks, total, chunks, None, costs, None)), costs


def most_held(row, costs, whole):
    """Activations and gradients at the fullest moment; B's and W's free at their ends."""
    held = peak = 0.0
    for op in row:
        first = whole[op[1]] if op[0] in (W, BW) and not op[2] else 0.0
        more = costs.activation[op[1]] if op[0] == F else -costs.released(op[0], op[1])
        peak = max(peak, held + first, held + first + more)
        held += first + more
    return peak


def test_what_has_room_before_gradients_comes_later_behind_them():
    plan, costs = made("zb-h2", 2, 4)
    whole = [40.0, 40.0]
    held = hold_back(plan, costs, Room((190.0, 190.0), (0.0, 0.0), whole))
    texts = [[op_text(op) for op in row[:6]] for row in (plan.rows[0], held.rows[0])]
    assert texts[0] == ["0F0", "0F1", "0F2", "0B0", "0W0", "0F3"]
    assert texts[1] == ["0F0", "0F1", "0F2", "0B0", "0W0", "0B1"]


@pytest.mark.parametrize("seed", range(30))
def test_the_same_computations_never_over_the_room(seed):
    draw = random.Random(seed)
    ranks = draw.choice((2, 3, 4))
    schedule = draw.choice(("zb-h1", "zb-h2", "gis", "zbv", "1f1b"))
    plan, costs = made(schedule, ranks, 2 * ranks + draw.randint(0, 2))
    whole = [draw.choice((10.0, 40.0))] * plan.placement.num_stages
    read, room = draw.choice((0.0, 15.0)), draw.uniform(60, 400)
    held = hold_back(plan, costs, Room((room,) * ranks, (read,) * ranks, whole))
    if held is None:
        assert max(most_held(row, costs, whole) for row in plan.rows) + read > room
        return
    lower(held, costs)
    for row, before in zip(held.rows, plan.rows, strict=True):
        assert sorted(row) == sorted(before)
        assert most_held(row, costs, whole) <= room
