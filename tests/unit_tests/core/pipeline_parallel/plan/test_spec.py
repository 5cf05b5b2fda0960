"""One value, and the plans that follow from it."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan, plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE, Kind, PlanError
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.plan.text import load_plan, to_json
from tests.harness.unit_stages import shares


def spec_of(name, ranks=2, **facts):
    placement = SCHEDULES[name].placed(ranks)
    return ScheduleSpec(name, placement, CostModel.of_ranks(placement), **facts)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_training_plan_is_the_schedule_lowered(name):
    spec = spec_of(name)
    expected = lower(build_plan(name, Request(2, 6, costs=spec.costs)), spec.costs)
    assert plan_for(spec, 6, PlanPurpose.TRAIN) == expected
    kinds = {op[0] for row in plan_for(spec, 6, PlanPurpose.TRAIN_AND_STEP).rows for op in row}
    assert {Kind.VALIDATE, Kind.STEP} <= kinds
    assert spec.splits_backward == any(op[0] == Kind.W for row in expected.rows for op in row)


def test_equal_specs_have_one_plan_and_reasons_are_no_part_of_it():
    one, other = spec_of("zb-1p"), spec_of("zb-1p", reasons=("told",))
    assert one == other
    assert plan_for(one, 5, PlanPurpose.TRAIN) is plan_for(other, 5, PlanPurpose.TRAIN)


def test_data_parallelism_is_the_last_pass_of_every_purpose():
    unit = UnitCosts("unit", f=1.0, b=1.0, w=1.0, shares=shares(8, 8, ways=2))
    stages = (StageUnits((unit,), ((0,),), ((0,),)),) * 2
    residency = Residency("optim_grads_params")
    bare = spec_of("zb-h1")
    spec = dataclasses.replace(bare, stages_units=stages, residency=residency)
    assert spec.bare == bare
    for purpose in (PlanPurpose.TRAIN, PlanPurpose.TRAIN_AND_STEP, PlanPurpose.EVALUATE):
        plan = plan_for(spec, 4, purpose)
        assert plan == add_residency(plan_for(bare, 4, purpose), stages, residency, spec.costs)
        assert any(IS_BESIDE[op[0]] for row in plan.rows for op in row)
    assert plan_for(spec, 4, PlanPurpose.ORDER) == plan_for(bare, 4, PlanPurpose.ORDER)
    unshared = dataclasses.replace(unit, shares=shares(8, 8, ways=1))
    alone = dataclasses.replace(spec, stages_units=(StageUnits((unshared,), ((0,),), ((0,),)),) * 2)
    assert plan_for(alone, 4, PlanPurpose.TRAIN) is plan_for(bare, 4, PlanPurpose.TRAIN)


def test_fixed_orders_are_held_to_limits():
    spec = spec_of("1f1b", limits=(1.0, 1.0))
    plan_for(spec, 4, PlanPurpose.ORDER)  # to be weighed by whoever asks
    for purpose in (PlanPurpose.TRAIN, PlanPurpose.EVALUATE):
        with pytest.raises(PlanError, match="1f1b holds 2 of activations on pipeline rank 0"):
            plan_for(spec, 4, purpose)
    plan_for(spec_of("zb-1p", limits=(1.0, 1.0)), 4, PlanPurpose.TRAIN)


def test_the_plan_of_a_file_is_what_runs(tmp_path):
    spec = spec_of("1f1b")
    path = str(tmp_path / "plan.json")
    saved = plan_for(spec, 4, PlanPurpose.TRAIN_AND_STEP)
    (tmp_path / "plan.json").write_text(to_json(saved))
    with pytest.raises(PlanError, match="give --enable-optimizer-post-validation"):
        load_plan(path, 2, post_validation=False)
    filed = dataclasses.replace(spec, file=load_plan(path, 2, post_validation=True))
    assert plan_for(filed, 4, PlanPurpose.TRAIN_AND_STEP).rows == saved.rows
    assert plan_for(filed, 4, PlanPurpose.TRAIN).rows == plan_for(spec, 4, PlanPurpose.TRAIN).rows
    assert plan_for(filed, 3, PlanPurpose.EVALUATE).num_microbatches == 3
    assert not filed.reads_costs
    with pytest.raises(PlanError, match="is a plan for 4 microbatches a step, this one has 5"):
        plan_for(filed, 5, PlanPurpose.TRAIN)
