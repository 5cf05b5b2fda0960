import dataclasses

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, parse_row
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only, lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.text import from_json, to_json, to_torch_csv
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.schedules import check_torch_accepts, check_torch_runs_our_transfers, chunk_costs


def plans():
    for name in SCHEDULES:
        plan = build_plan(name, Request(3, 7))
        yield plan
        yield lower(plan, CostModel.of_ranks(plan.placement))
        yield forward_only(plan)
        yield lower(forward_only(plan), CostModel.of_ranks(plan.placement))
    rows = (
        parse_row("0F0 3F0[0:2].1 (0F1;3BW0) (0F2;3BW1)".split()),
        parse_row("1UNSHARD 1F0 1REDUCE[1:4] 1SEND_STATE@0#3 1VALIDATE 1STEP".split()),
    )
    yield Plan("all kinds", Placement("v", 2, 2), 3, rows, bitwise=False)


@pytest.mark.parametrize("plan", list(plans()), ids=lambda plan: f"{plan.schedule}-{plan.num_ops}")
def test_round_trips(plan):
    assert from_json(to_json(plan)) == plan


def test_a_plan_without_backwards_stays_one():
    """It would be no sound plan otherwise: every activation waits for a backward."""
    plan = forward_only(build_plan("1f1b", Request(2, 3)))
    plan = from_json(to_json(lower(plan, CostModel.of_ranks(plan.placement))))
    assert plan.forward_only
    verify(plan)
    with pytest.raises(PlanError):
        verify(dataclasses.replace(plan, forward_only=False))


def test_changed_files_are_refused():
    plan = build_plan("1f1b", Request(2, 2))
    text = to_json(plan)
    for before, after, why in (
        ("0F1", "0F0", "it was changed"),
        ("0F1", "0Q1", "no operation"),
        ('"version": 1', '"version": 9', "has version 9, this program reads version 1"),
        ("linear", "ring", "header is wrong"),
        (': false, "h', ': "maybe", "h', "forward_only is True or False, not 'maybe'"),
        *(('"ranks": 2', f'"ranks": {wrong}', "header is wrong") for wrong in ("[2]", "2.5", "true", "null")),
    ):
        with pytest.raises(PlanError, match=why):
            from_json(text.replace(before, after, 1))
    for text in ("", "a,b", "[]", '{"ops": 3}'):
        with pytest.raises(PlanError, match="no plan"):
            from_json(text)
    with pytest.raises(PlanError, match="one list of texts a rank"):
        from_json('{"ops": [3]}')


def test_torch_letters():
    plan = Plan("x", Placement("v", 1, 2), 1, (parse_row("0F0 1F0 1B0 1W0 (0F1;1BW1)".split()),))
    assert to_torch_csv(plan) == "0F0,1F0,1I0,1W0,(0F1;1B1)OVERLAP_F_B\n"
    with_state = dataclasses.replace(plan, rows=(parse_row(["0VALIDATE"]),))
    with pytest.raises(PlanError, match="0VALIDATE cannot be said"):
        to_torch_csv(with_state, transfers=True)


def test_overlapped_pairs_are_written_for_torch():
    plan = build_plan("dualpipe-v", Request(2, 5))
    text = to_torch_csv(plan)
    # rank 1 takes its first pair apart
    assert text.splitlines()[0].count("OVERLAP_F_B") == 2 * (5 - 4 + 1) + 1
    assert ",(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B," in text
    for wrong in ("(0F0)", "(0F0;1B0;2B0)"):
        with pytest.raises(PlanError, match="two computations overlap"):
            parse_row([wrong])


def torch_zbv(p, m):
    """Torch's ZBV as a plan of ours: another source of V plans with B and W apart."""
    schedule = torch_schedules.ScheduleZBVZeroBubble.__new__(torch_schedules.ScheduleZBVZeroBubble)
    schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = p, 2 * p, m
    rows = (schedule._calculate_single_rank_operations(rank) for rank in range(p))
    lines = [[str(action) for action in row if action is not None] for row in rows]
    ours = tuple(parse_row([cell.replace("B", "BW").replace("I", "B") for cell in line]) for line in lines)
    return Plan("zbv of torch", Placement("v", p, 2), m, ours, bitwise=False), lines


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 2), (4, 10), (5, 12)])
def test_plans_on_the_v_go_back_to_torch(p, m, tmp_path):
    plan, lines = torch_zbv(p, m)
    verify(dataclasses.replace(plan, bitwise=True), chunk_costs(plan.placement))  # in order
    assert [line.split(",") for line in to_torch_csv(plan).splitlines()] == lines
    check_torch_accepts(plan, tmp_path / "plan.csv")
    check_torch_runs_our_transfers(plan, chunk_costs(plan.placement), tmp_path / "plan.csv")


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_accepts_every_schedule(name, tmp_path):
    plan = build_plan(name, Request(3, 7))
    check_torch_accepts(plan, tmp_path / "plan.csv")
    check_torch_runs_our_transfers(plan, chunk_costs(plan.placement), tmp_path / "plan.csv")
