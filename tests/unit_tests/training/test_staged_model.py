import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, F, PlanError
from megatron.core.pipeline_parallel.plan.pipeline_summary import pipeline_facts
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.training.config.launch_env import LaunchEnv
from tests.harness import launch
from tests.harness.described import planned_config

MICROBATCHES = 4
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def spec_of(flags, ranks=2):
    return configure(flags, ranks).planner().spec


def configure(flags, ranks=2):
    words = [*launch.TINY, *f"--num-layers 4 --train-iters 4 --pipeline-model-parallel-size {ranks}".split()]
    return planned_config([*words, *flags.split()], env=LaunchEnv(world_size=ranks, rank=0))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pipeline-schedule gpipe",
        CHUNKS,
        f"{CHUNKS} --microbatch-group-size-per-virtual-pipeline-stage 3",
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7])
def test_an_evaluation_of_any_number_of_microbatches(flags, num_microbatches):
    """Each forward once, also of fewer than interleaving takes in turn."""
    made = spec_of(flags)
    plan = plan_for(made, num_microbatches, PlanPurpose.EVALUATE)
    verify(plan)
    stages = made.placement.num_stages
    forwards = sorted((op[1], op[2]) for row in plan.rows for op in row if op[0] == F)
    assert forwards == [(stage, m) for stage in range(stages) for m in range(num_microbatches)]
    assert plan.num_microbatches == num_microbatches


@pytest.mark.parametrize(("flags", "group"), [("", None), (CHUNKS, 2), (f"{CHUNKS} {GROUP} 3", 3)])
def test_what_is_planned_is_what_is_told_before(flags, group):
    spec = configure(flags).planner().spec
    facts = pipeline_facts(spec, MICROBATCHES)
    stages = [stage["layers"] for stage in facts["stages"]]
    assert (facts["schedule"], facts["chunks"]) == (spec.schedule, spec.placement.num_chunks)
    assert stages == [list(held.layers) for held in spec.stages]
    assert facts["microbatch_group_size"] == spec.group_size == group
    order = plan_for(spec, MICROBATCHES, PlanPurpose.ORDER)
    train = plan_for(spec, MICROBATCHES, PlanPurpose.TRAIN)
    assert order.rows == tuple(tuple(op for op in row if IS_COMPUTE[op[0]]) for row in train.rows)
    assert facts["bubble_rate"] == simulate(order, spec.costs).bubble_rate


def test_evaluation_keeps_the_order_of_training():
    made = spec_of(CHUNKS)
    for trained, evaluated in zip(
        *(plan_for(made, 4, one).rows for one in (PlanPurpose.TRAIN, PlanPurpose.EVALUATE)), strict=True
    ):
        assert [op[:3] for op in trained if op[0] == F] == [op[:3] for op in evaluated if op[0] == F]


def test_who_reads():
    made = spec_of("", ranks=4)
    assert [made.reads_data(rank) for rank in range(4)] == [True, False, False, True]
    assert made.local_stages(2) == (2,)
    assert spec_of(CHUNKS).local_stages(1) == (1, 3)


V = "--zero-bubble-v-schedule"


def test_on_a_v_the_first_rank_begins_and_ends():
    made = spec_of(f"{V} --num-layers 8", ranks=4)
    assert [made.local_stages(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [made.reads_data(rank) for rank in range(4)] == [True, False, False, False]
    first, last = made.stages[0], made.stages[7]
    assert (first.embedding, first.loss, last.embedding, last.loss) == (True, False, False, True)
    assert made.splits_backward


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_an_evaluation_under_every_schedule(name, num_microbatches):
    chunks = CHUNKS if SCHEDULES[name].placement == "looped" else ""
    made = spec_of(f"--pipeline-schedule {name} --global-batch-size 16 {chunks}")
    plan = plan_for(made, num_microbatches, PlanPurpose.EVALUATE)
    verify(plan)
    stages = made.placement.num_stages
    forwards = sorted((op[1], op[2]) for row in plan.rows for op in row if op[0] == F)
    assert forwards == [(stage, m) for stage in range(stages) for m in range(num_microbatches)]


def test_equal_flags_have_one_spec_and_one_plan():
    config = configure("--enable-zero-bubble")
    assert config.planner().spec is config.planner().spec
    plan = config.planner().plan(8, PlanPurpose.TRAIN)
    same = configure("--enable-zero-bubble").planner()
    assert same.plan(8, PlanPurpose.TRAIN) is plan
    assert config.replace(seed=7).planner().spec == same.spec


def test_costs_and_limits_can_be_changed_in_a_run():
    """As profiling does: what is planned from then on follows them."""
    spec = spec_of("--enable-zero-bubble")
    slow_w = CostModel.of_ranks(spec.placement, time_w=(9.0,))
    changed = dataclasses.replace(spec, costs=slow_w, limits=(2.0, 1.0))
    after = plan_for(changed, 8, PlanPurpose.TRAIN)
    assert after.rows != plan_for(spec, 8, PlanPurpose.TRAIN).rows
    assert simulate(after, slow_w).peak_activation <= (2.0, 1.0)
    less = plan_for(dataclasses.replace(changed, limits=(1.0, 1.0)), 8, PlanPurpose.TRAIN)
    assert simulate(less, slow_w).peak_activation <= (1.0, 1.0)


def test_a_limit_that_nothing_fits_names_the_rank():
    spec = dataclasses.replace(spec_of("--enable-zero-bubble"), limits=(0.5, 0.5))
    with pytest.raises(PlanError, match=r"rank 0 may hold 0.5"):
        plan_for(spec, 8, PlanPurpose.TRAIN)


SEQUENCE_PARALLEL = (
    "--tensor-model-parallel-size 2 --sequence-parallel --enable-zero-bubble --global-batch-size 16"
)


@pytest.mark.grid
def test_gathered_inputs_are_kept_where_the_limit_has_room():
    def made(limit):
        return spec_of_tp(f"{SEQUENCE_PARALLEL} --pipeline-memory-limit {limit}")

    roomy = made("1G")
    assert roomy.keeps_gathered
    tight = made(int(spec_of_tp(SEQUENCE_PARALLEL).whole_stage) + 1)
    assert not tight.keeps_gathered
    for one in (roomy, tight):
        peaks = simulate(plan_for(one, 16, PlanPurpose.TRAIN), one.costs).peak_activation
        assert all(peak <= limit for peak, limit in zip(peaks, one.limits, strict=True))
    for stage in range(2):
        assert roomy.costs.activation[stage] > tight.costs.activation[stage]
        assert roomy.costs.w[stage] < tight.costs.w[stage]
        assert (roomy.costs.f[stage], roomy.costs.b[stage]) == (tight.costs.f[stage], tight.costs.b[stage])


@pytest.mark.parametrize("flags", ["", "--pipeline-memory-limit 1G --pipeline-schedule 1f1b"])
def test_without_a_limit_or_without_w_inputs_stay_in_parts(flags):
    """Nobody knows whether there is room; W's gather runs beside B's product."""
    words = "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 16"
    assert not spec_of_tp(f"{words} {flags or '--enable-zero-bubble'}").keeps_gathered


def spec_of_tp(flags):
    words = [*launch.TINY, *"--num-layers 4 --train-iters 4 --pipeline-model-parallel-size 2".split()]
    env = LaunchEnv(world_size=4, rank=0)
    return planned_config([*words, *flags.split()], env=env).planner().spec
