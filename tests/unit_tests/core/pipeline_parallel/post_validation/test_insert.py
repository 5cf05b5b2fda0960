"""Plans with post-validation: right, free of deadlocks, no slower, and what ranks do before VALIDATE can be undone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import (
    IS_COMPUTE,
    IS_VALIDATION,
    RECV_F,
    SEND_F,
    F,
    Kind,
    PlanError,
    op_text,
    plan_hash,
)
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.text import from_json, to_json
from megatron.core.pipeline_parallel.plan.timeline import execute
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.core.pipeline_parallel.post_validation.state import rollback_ops
from tests.harness.toy_pipeline import random_plan

STATES = (Kind.SEND_STATE, Kind.RECV_STATE, Kind.VALIDATE, Kind.STEP)


def validated(name, num_ranks, num_microbatches, comm=0.0):
    """(lowered plan, the same with post-validation, costs)"""
    plan = build_plan(name, Request(num_ranks, num_microbatches))
    costs = CostModel.of_ranks(plan.placement, comm=comm)
    lowered = lower(plan, costs)
    return lowered, post_validation(lowered, costs), costs


def check(lowered, plan, costs):
    """Nothing else is moved or lost, messages of undone forwards match, no deadlock though every send blocks."""
    verify(plan, costs)  # with the search for deadlocks
    for rank, (row, old) in enumerate(zip(plan.rows, lowered.rows, strict=True)):
        assert tuple(op for op in row if op[0] not in STATES) == old
        before = row[: next(place for place, op in enumerate(row) if op[0] == Kind.VALIDATE)]
        assert all(op[0] in (F, RECV_F, SEND_F, *STATES) and op[1] == rank for op in before)
        if rank:
            sent = [op[2] for op in plan.rows[rank - 1][: _validate(plan, rank - 1)] if op[0] == SEND_F]
            received = [op[2] for op in before if op[0] == RECV_F]
            surplus = [op[2] for op in rollback_ops(plan, rank).surplus]
            assert received + surplus == sent


def _validate(plan, rank):
    return next(place for place, op in enumerate(plan.rows[rank]) if op[0] == Kind.VALIDATE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name):
    made = 0
    for num_ranks in (1, 2, 4):
        for num_microbatches in (1, num_ranks + 1, 2 * num_ranks):
            try:
                plan = build_plan(name, Request(num_ranks, num_microbatches))
            except PlanError:
                continue  # what the schedule itself cannot do
            for comm in (0.0, 0.3):
                costs = CostModel.of_ranks(plan.placement, comm=comm)
                lowered = lower(plan, costs)
                check(lowered, post_validation(lowered, costs), costs)
                made += 1
    assert made >= 6


@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    placement=st.sampled_from(
        [Placement(LINEAR, 2), Placement(LINEAR, 4), Placement(V_SHAPED, 1, 2), Placement(V_SHAPED, 3, 2),
         Placement(V_SHAPED, 2, 3), Placement(LOOPED, 2, 3), Placement(LOOPED, 3, 2), Placement(LOOPED, 4, 2)]
    ),
    num_microbatches=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    comm=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
)  # fmt: skip
def test_any_valid_order(placement, num_microbatches, seed, comm):
    plan = random_plan(placement, num_microbatches, seed)
    costs = CostModel.of_ranks(placement, comm=comm)
    lowered = lower(plan, costs)
    check(lowered, post_validation(lowered, costs), costs)


def test_where_operations_stand():
    _, plan, _ = validated("zb-h2", 3, 6)
    texts = [[op_text(op) for op in row] for row in plan.rows]
    first, middle, last = texts
    number = max(op[7] for row in plan.rows for op in row) - 3  # two partial states, two whole ones
    assert first[0] == f"0RECV_STATE@1#{number + 2}"
    assert first[-2:] == [f"0SEND_STATE@1#{number}", "0STEP"]
    assert first.index("0VALIDATE") == first.index("0F4") + 2  # five forwards, and the last one's message
    assert middle[0] == f"1RECV_STATE@2#{number + 3}"
    assert middle[-2:] == [f"1SEND_STATE@2#{number + 1}", "1STEP"]
    assert middle[-4:-2] == [
        f"1RECV_STATE@0#{number}",
        "1W5",
    ]  # the partial state is asked for before the last W
    place = middle.index(f"1SEND_STATE@0#{number + 2}")
    assert middle[place + 1] == "1VALIDATE"
    assert last[-1] == "2STEP"
    assert last.index("2VALIDATE") == last.index(f"2SEND_STATE@1#{number + 3}") + 1 < last.index("2B0")
    assert rollback_ops(plan, 0).forwards == tuple((0, m) for m in range(5))


def test_plans_without_it_keep_their_hash_and_plans_with_it_survive_a_file():
    lowered, plan, _ = validated("zbv", 3, 6)
    old = "9d79dba07ab5c0dbb3fa91a5a02beedce3297c2bb643ac1731d8924f0d1ebdb5"
    assert (
        plan_hash(lower(build_plan("1f1b", Request(2, 2)), CostModel.of_ranks(Placement(LINEAR, 2)))) == old
    )
    assert plan_hash(plan) != plan_hash(lowered)
    assert from_json(to_json(plan)).rows == plan.rows


def step_period(plan, costs, *, synchronous, num_steps=6):
    """What one of many steps takes in the long run: between the ends of the last two.

    synchronous: all ranks agree before they step, one message more (an all-reduce takes at least that); else a rank
    begins its next step as soon as its own row is done.
    """
    begin, ends = [0.0] * plan.placement.num_ranks, [0.0]
    for _ in range(num_steps):
        timeline = execute(plan, costs, begin=begin)
        assert not timeline.stopped
        begin = [row[-1] for row in timeline.ends]
        ends.append(max(begin))
        if synchronous:
            begin = [ends[-1] + costs.comm] * len(begin)
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("name", ["zb-h2", "zb-2p", "zbv"])
def test_without_a_synchronous_step_a_zero_bubble_plan_has_none(name):
    """Equal times: a synchronous step waits for the last rank, which began p - 1 forwards later than the first."""
    num_ranks, total = 4, 12
    lowered, plan, costs = validated(name, num_ranks, total)
    late = (num_ranks - 1) * costs.f[0]
    assert step_period(plan, costs, synchronous=False) == pytest.approx(3.0 * total)
    assert step_period(lowered, costs, synchronous=True) == pytest.approx(3.0 * total + late)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
@pytest.mark.parametrize("comm", [0.0, 0.1])
def test_it_is_never_slower_than_synchronous_steps(name, comm):
    """The state is back before anybody needs it, latency included."""
    lowered, plan, costs = validated(name, 4, 12, comm)
    synchronous = step_period(lowered, costs, synchronous=True)
    assert step_period(plan, costs, synchronous=False) <= synchronous + 1e-9
    assert simulate(plan, costs).cost <= simulate(lowered, costs).cost + comm + 1e-9


def test_a_state_takes_the_latency_of_a_message():
    """Nothing to hide it behind: the whole state of two ranks is one latency behind the last one's VALIDATE."""
    _, plan, costs = validated("1f1b", 2, 1, comm=5.0)
    timeline = execute(plan, costs)
    first, last = (timeline.ends[rank][_validate(plan, rank)] for rank in (0, 1))
    assert first == last + 5.0
    steps = [timeline.ends[rank][-1] for rank in (0, 1)]
    done = [timeline.ends[rank][max(i for i, op in enumerate(plan.rows[rank]) if IS_COMPUTE[op[0]])]
            for rank in (0, 1)]  # fmt: skip
    assert steps[0] == done[0]
    assert steps[1] == max(done[1], steps[0] + 5.0)


def test_transfers_are_needed_before_it():
    _, plan, costs = validated("1f1b", 2, 2)
    with pytest.raises(AssertionError, match="a second time"):
        post_validation(plan, costs)
    assert any(IS_VALIDATION[op[0]] for op in plan.rows[0])
