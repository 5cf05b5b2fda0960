import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, parse_row
from megatron.core.pipeline_parallel.plan.passes.forward_only import forward_only
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.registry import build_plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.text import (
    from_csv,
    from_json,
    from_torch_csv,
    to_csv,
    to_json,
    to_torch_csv,
)
from megatron.core.pipeline_parallel.plan.verify import verify


def plans():
    for name in ("gpipe", "1f1b", "interleaved"):
        plan = build_plan(name, Request(3, 5))
        yield plan
        yield lower(plan, CostModel.of_ranks(plan.placement))
        yield forward_only(plan)
        yield lower(forward_only(plan), CostModel.of_ranks(plan.placement))
    rows = (
        parse_row("0F0 3F0.1[0:2] (0F1;3BW0) (0F2;3BW1)".split()),
        parse_row("1UNSHARD 1F0 1REDUCE[1:4] 1SEND_STATE@0#3 1VALIDATE 1STEP".split()),
    )
    yield Plan("all kinds", Placement("v", 2, 2), 3, rows, bitwise=False)


@pytest.mark.parametrize("plan", list(plans()), ids=lambda plan: f"{plan.schedule}-{plan.num_ops}")
@pytest.mark.parametrize(("write", "read"), [(to_csv, from_csv), (to_json, from_json)])
def test_round_trips(plan, write, read):
    assert read(write(plan)) == plan


@pytest.mark.parametrize(("write", "read"), [(to_csv, from_csv), (to_json, from_json)])
def test_a_plan_without_backwards_stays_one(write, read):
    """It would be no sound plan otherwise: every activation waits for a backward."""
    plan = forward_only(build_plan("1f1b", Request(2, 3)))
    plan = read(write(lower(plan, CostModel.of_ranks(plan.placement))))
    assert plan.forward_only
    verify(plan)
    with pytest.raises(PlanError):
        verify(dataclasses.replace(plan, forward_only=False))


def test_changed_files_are_refused():
    plan = build_plan("1f1b", Request(2, 2))
    for write, read in ((to_csv, from_csv), (to_json, from_json)):
        text = write(plan)
        with pytest.raises(PlanError, match="it was changed"):
            read(text.replace("0F1", "0F0", 1))
        with pytest.raises(PlanError, match="no operation"):
            read(text.replace("0F1", "0Q1", 1))
        with pytest.raises(PlanError, match="has version 9, this program reads version 1"):
            read(text.replace("version,1", "version,9").replace('"version": 1', '"version": 9'))
        with pytest.raises(PlanError, match="header is wrong"):
            read(text.replace("linear", "ring"))
        with pytest.raises(PlanError, match="forward_only is True or False, not 'maybe'"):
            read(
                text.replace("forward_only,False", "forward_only,maybe").replace(
                    ': false, "h', ': "maybe", "h'
                )
            )
    for wrong in ("[2]", "2.5", "true", "null"):
        with pytest.raises(PlanError, match="header is wrong"):
            from_json(to_json(plan).replace('"ranks": 2', f'"ranks": {wrong}'))
    with pytest.raises(PlanError, match="no plan: field larger than"):
        from_csv("x" * 200_000)
    for text in ("", "a,b", "[]", '{"ops": 3}'):
        with pytest.raises(PlanError, match="no plan"):
            from_csv(text)
        with pytest.raises(PlanError, match="no plan"):
            from_json(text)
    with pytest.raises(PlanError, match="one list of texts a rank"):
        from_json('{"ops": [3]}')


def test_torch_letters():
    plan = Plan("x", Placement("v", 1, 2), 1, (parse_row("0F0 1F0 1B0 1W0 (0F1;1BW1)".split()),))
    assert to_torch_csv(plan) == "0F0,1F0,1I0,1W0,(0F1;1B1)OVERLAP_F_B\n"
    assert from_torch_csv(to_torch_csv(plan), plan.placement).rows == plan.rows
    with_state = dataclasses.replace(plan, rows=(parse_row(["0VALIDATE"]),))
    with pytest.raises(PlanError, match="0VALIDATE cannot be said"):
        to_torch_csv(with_state, transfers=True)


def test_torch_csv_is_read():
    plan = build_plan("interleaved", Request(3, 5))
    read = from_torch_csv(to_torch_csv(plan).replace(",", ",,", 3), plan.placement)
    assert (read.rows, read.num_microbatches) == (plan.rows, 5)
    with pytest.raises(PlanError, match="only computations"):
        from_torch_csv("0F0,0SEND_F0\n", Placement("linear", 1))
    with pytest.raises(PlanError, match="1 lines for 2 ranks"):
        from_torch_csv("0F0\n", Placement("linear", 2))
