"""Plans that are broken on purpose: each is refused, and the operation named."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import (
    Plan,
    PlanError,
    compute,
    parse_op,
    parse_row,
    row_texts,
)
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.schedules import verified_peaks


def plan_of(*lines, kind="linear", chunks=1, microbatches=1, bitwise=True):
    rows = tuple(parse_row(line.split()) for line in lines)
    return Plan("test", Placement(kind, len(lines), chunks), microbatches, rows, bitwise)


@pytest.fixture
def lowered():
    plan = build_plan("1f1b", Request(3, 4))
    return lower(plan, CostModel.of_ranks(plan.placement))


def edited(plan, rank, edit):
    """The plan with a rank's texts changed in place by `edit`."""
    texts = row_texts(plan.rows[rank])
    edit(texts)
    rows = list(plan.rows)
    rows[rank] = parse_row(texts)
    return dataclasses.replace(plan, rows=tuple(rows))


def at(texts, start):
    return next(i for i, text in enumerate(texts) if text.startswith(start))


def swap(texts, one, other):
    i, j = at(texts, one), at(texts, other)
    texts[i], texts[j] = texts[j], texts[i]


def remove(texts, start):
    del texts[at(texts, start)]


def replace(texts, start, new):
    texts[at(texts, start)] = new


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (1, lambda row: remove(row, "1BW2"), "1BW2|1B2 and 1W2|comes before 1B2"),
        (2, lambda row: remove(row, "2F3"), "2F3"),
        (1, lambda row: row.append("1F0"), "1F0: is there twice"),
        (1, lambda row: row.append("1BW0"), "1BW0: is there twice"),
        (2, lambda row: swap(row, "2F1", "2BW1"), "2BW1: comes before 2F1"),
        (1, lambda row: row.insert(0, "0F0"), "0F0: the stage is not on this rank"),
        (1, lambda row: row.insert(0, "1F9"), "1F9: microbatches are 0 to 3"),
        (1, lambda row: remove(row, "1SEND_F2"), "2RECV_F2 has no 1SEND_F2 on rank 1"),
        (1, lambda row: remove(row, "1RECV_F2"), "1F2: has no receive before it"),
        (0, lambda row: remove(row, "0RECV_B1"), "0BW1: has no receive before it"),
        (0, lambda row: row.append("0SEND_F0@1#0"), "0SEND_F0.*is there twice"),
        (0, lambda row: row.append("0SEND_B0@1#90"), "0SEND_B0.*no other rank needs this"),
        (0, lambda row: swap(row, "0F0", "0SEND_F0"), "0SEND_F0.*comes before 0F0"),
        (2, lambda row: row.append("2RECV_B0@1#90"), "2RECV_B0.*comes from no other rank"),
        (0, lambda row: replace(row, "0SEND_F0", "0SEND_F0@2#0"), "stage 1 is on rank 1, not 2"),
        (0, lambda row: replace(row, "0SEND_F0", "0SEND_F0@1#999"), "is message 999 and 1RECV_F0 is message"),
        (0, lambda row: replace(row, "0SEND_F0", "0SEND_F0@1"), "has no message number"),
        (1, lambda row: swap(row, "1RECV_F0", "1RECV_F1"), "1F0: has no receive before it|where it is sent"),
        (1, lambda row: row.append("1STEP"), "rank 0: post-validation needs .*; there are none"),
        (1, lambda row: replace(row, "1F0", "1F0[0:1]"), "only a W has parts, of units"),
        (1, lambda row: replace(row, "1F0", "1F0.1"), "only a W has parts, of units"),
    ],
)
def test_broken_plans_are_refused(lowered, rank, edit, message):
    with pytest.raises(PlanError, match=message):
        verify(edited(lowered, rank, edit))


def test_numbers_of_messages_are_their_own(lowered):
    rows = tuple(tuple((*op[:7], 5 if op[7] >= 0 else -1) for op in row) for row in lowered.rows)
    with pytest.raises(PlanError, match="same number"):
        verify(dataclasses.replace(lowered, rows=rows))


def test_order_of_a_route():
    plan = plan_of(
        "0F0 0F1 0SEND_F0@1#0 0SEND_F1@1#1 0RECV_B0@1#2 0RECV_B1@1#3 0BW0 0BW1",
        "1RECV_F1@0#1 1RECV_F0@0#0 1F0 1F1 1BW0 1SEND_B0@0#2 1BW1 1SEND_B1@0#3",
        microbatches=2,
    )
    with pytest.raises(
        PlanError, match=r"message 0 of SEND_F from rank 0 to rank 1 is of microbatch 0 where"
    ):
        verify(plan)
    verify(edited(plan, 1, lambda row: swap(row, "1RECV_F1", "1RECV_F0")))


def test_deadlock_of_computations_names_both_ranks():
    plan = plan_of("0F0 0BW0 0F1 0BW1", "1F1 1BW1 1F0 1BW0", microbatches=2, bitwise=False)
    with pytest.raises(
        PlanError, match=r"deadlock: rank 0 stops at place 1, 0BW0.*rank 1 stops at place 0, 1F1"
    ):
        verify(plan)


def test_deadlock_of_sends_that_nobody_buffers():
    """Rank 0 posts its receive only behind a computation, while both ranks wait for their sends to be met."""
    late = plan_of(
        "0F0 0SEND_F0@1#0 0F1 0SEND_F1@1#1 0RECV_B0@1#2 0BW0 0RECV_B1@1#3 0BW1",
        "1RECV_F0@0#0 1F0 1BW0 1SEND_B0@0#2 1RECV_F1@0#1 1F1 1BW1 1SEND_B1@0#3",
        microbatches=2,
    )
    verify(late)  # sends and receives between two computations are posted together
    stuck = plan_of(
        "0F0 0SEND_F0@1#0 0F1 0SEND_F1@1#1 0F2 0SEND_F2@1#4 0RECV_B0@1#2 0BW0 0RECV_B1@1#3 0BW1 0RECV_B2@1#5 0BW2",
        "1RECV_F0@0#0 1F0 1BW0 1SEND_B0@0#2 1W9 1RECV_F1@0#1 1F1 1BW1 1SEND_B1@0#3 1RECV_F2@0#4 1F2 1BW2 1SEND_B2@0#5",
        microbatches=3,
    )
    # the stray W becomes the split backward of microbatch 0: a computation between the send and the next receive
    stuck = edited(stuck, 1, lambda row: (replace(row, "1W9", "1W0"), replace(row, "1BW0", "1B0")))
    with pytest.raises(PlanError, match=r"deadlock: rank 0 stops.*0F2.*receive 1RECV_F1.*rank 1 stops.*1W0"):
        verify(stuck)


def test_weight_gradients_out_of_order_must_be_said():
    line = "0F0 0F1 0BW1 0BW0"
    with pytest.raises(PlanError, match=r"0BW0: weight gradients .* increasing microbatch order"):
        verify(plan_of(line, microbatches=2))
    verify(plan_of(line, microbatches=2, bitwise=False))
    with pytest.raises(PlanError, match="0W0"):
        verify(plan_of("0F0 0F1 0B0 0B1 0W1 0W0", microbatches=2))
    verify(plan_of("0F0 0F1 0B1 0B0 0W0 0W1", microbatches=2))  # B adds nothing


def test_peak_of_a_split_backward():
    plan = plan_of("0F0 0F1 0B0 0F2 0B1 0W0 0W1 0B2 0W2", microbatches=3)
    assert verified_peaks(plan) == (3,)
    half = CostModel.of_ranks(plan.placement, memory_after_b=0.5)
    assert verified_peaks(plan, half) == (2.5,)
    assert verified_peaks(plan, CostModel.of_ranks(plan.placement, memory_after_b=0)) == (2,)
    assert verified_peaks(plan, CostModel.of_ranks(plan.placement, memory_after_b=3)) == (3 + 3 + 1,)


def test_overlapped_pairs():
    good = plan_of("0F0 (0F1;0BW0) 0BW1", microbatches=2)
    verify(good)
    assert row_texts(good.rows[0]) == ["0F0", "(0F1;0BW0)", "0BW1"]
    lonely = dataclasses.replace(
        good, rows=((*good.rows[0][:2], *good.rows[0][3:], (*compute(3, 0, 0)[:7], 0)),)
    )
    with pytest.raises(PlanError, match="overlaps with nothing"):
        verify(lonely)
    # the backward of a microbatch cannot overlap with its own forward on the last stage
    with pytest.raises(PlanError, match="deadlock"):
        verify(plan_of("(0F0;0BW0)"))


def test_v_placement_hands_over_without_a_message():
    plan = plan_of("0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0", kind="v", chunks=2)
    costs = CostModel.of_ranks(plan.placement)
    lowered = lower(plan, costs)
    assert sum(op[0] > 3 for row in lowered.rows for op in row) == 8
    broken = dataclasses.replace(
        lowered, rows=(lowered.rows[0], (parse_op("1SEND_F0@1#70"), *lowered.rows[1]))
    )
    with pytest.raises(PlanError, match="no other rank needs this"):
        verify(broken)


def test_a_plan_of_nothing_is_refused():
    with pytest.raises(PlanError, match="at least 1 microbatch, not 0"):
        verify(Plan("x", Placement("linear", 1), 0, ((),)))


def test_rows_are_one_a_rank():
    plan = plan_of("0F0 0BW0")
    with pytest.raises(PlanError, match="2 rows for 1 rank"):
        verify(dataclasses.replace(plan, rows=plan.rows * 2))
