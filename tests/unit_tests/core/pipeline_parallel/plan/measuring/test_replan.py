"""Schedules solved again for measured costs: better ones are taken, limits are kept, layers stay where they are."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.ir import BW, IS_COMPUTE, F
from megatron.core.pipeline_parallel.plan.measuring.replan import measured_costs, solve_again
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.training.config.launch_env import LaunchEnv
from tests.harness import launch, unit_stages
from tests.harness.described import planned_config
from tests.harness.measured_runs import figures_of_run

MICROBATCHES, MIB = 8, float(2**20)


def made(flags, ranks=4):
    words = [*launch.TINY, *f"--num-layers 8 --train-iters 4 --pipeline-model-parallel-size {ranks}".split()]
    words += f"--padded-vocab-size 128 --micro-batch-size 1 --global-batch-size {MICROBATCHES}".split()
    env = LaunchEnv(world_size=ranks, rank=0)
    return planned_config([*words, *flags.split()], env=env).planner().spec


def measured(placement, *, slow=None, activation=MIB, held=0.5):
    """F = B = 10 ms, W = 3 ms of each stage, one of them three times slower; latency of 2 ms."""
    times = [3.0 if stage == slow else 1.0 for stage in range(placement.num_stages)]
    return CostModel(
        tuple(10e6 * one for one in times),
        tuple(10e6 * one for one in times),
        tuple(3e6 * one for one in times),
        (activation,) * placement.num_stages,
        (activation * held,) * placement.num_stages,
        2e6,
    )


def again(spec, costs, splits=True):
    return solve_again(spec, costs, MICROBATCHES, MICROBATCHES, splits=splits)


def trained(spec, costs=None):
    plan = plan_for(spec, MICROBATCHES, PlanPurpose.TRAIN)
    return plan if costs is None else simulate(plan, costs)


@pytest.mark.parametrize(
    ("flags", "slow"), [("--pipeline-schedule zb-1p", 0), ("--zero-bubble-v-schedule", 1)]
)
def test_a_searched_schedule_becomes_better_and_then_stays(flags, slow):
    spec = made(flags)
    costs = measured(spec.placement, slow=slow)
    before = trained(spec, costs)
    found, kept, _ = again(spec, costs)
    assert kept is None
    after = trained(found, costs)
    assert after.cost < before.cost
    assert after.bubble_rate < before.bubble_rate
    assert after.plan.rows != before.plan.rows
    verify(after.plan)
    assert (found.placement, found.stages) == (spec.placement, spec.stages)
    second, kept, _ = again(found, costs)
    assert second is found
    assert kept == "a new one would take as long"


@pytest.mark.parametrize("flags", ["", "--pipeline-schedule zb-h1", "--pipeline-schedule dualpipe-v"])
def test_fixed_orders_stay(flags):
    spec = made(flags)
    found, kept, reasons = again(spec, measured(spec.placement, slow=1))
    assert found is spec
    assert (kept, reasons) == (f"{spec.schedule} is a fixed order", ())


def test_a_plan_from_a_file_stays(tmp_path):
    (tmp_path / "plan.json").write_text(to_json(trained(made("--pipeline-schedule zb-1p"))))
    filed = made(f"--pipeline-schedule-file {tmp_path}/plan.json")
    found, kept, _ = again(filed, measured(filed.placement, slow=0))
    assert found is filed
    assert kept == "a file says what is run"


def test_limits_in_bytes_stay_and_those_in_activations_are_counted_anew():
    costs = measured(made("").placement)
    in_bytes = made("--pipeline-schedule zb-1p --pipeline-memory-limit 512M")
    assert in_bytes.under(costs).limits == in_bytes.limits == (512 * MIB,) * 4
    counted = made("--enable-zero-bubble --zero-bubble-max-pending-backward 5")
    assert counted.under(costs).limits == (5 * MIB,) * 4 != counted.limits
    assert made("--pipeline-schedule zb-1p").under(costs).limits is None
    by_device = dataclasses.replace(made("--enable-zero-bubble"), limits=(7 * MIB,) * 4)
    assert by_device.under(costs).limits == (7 * MIB,) * 4
    chosen = made("--pipeline-schedule auto")
    whole = chosen.placement.num_chunks * MIB
    assert chosen.under(measured(chosen.placement)).limits == (4 * whole,) * 4 != chosen.limits


def test_nothing_fits():
    spec = made("--pipeline-schedule zb-1p --pipeline-memory-limit 4M")
    spec = spec.under(measured(spec.placement, activation=MIB / 2))
    found, kept, _ = again(spec, measured(spec.placement, activation=8 * MIB))
    assert found is spec
    assert kept.startswith("no other one is possible: ")


@pytest.mark.parametrize("splits", [True, False])
def test_auto_chooses_among_schedules_whose_layers_lie_the_same(splits):
    spec = made("--pipeline-schedule auto --pipeline-memory-limit 512M")
    assert {SCHEDULES[name].placement for name, _ in spec.rivals} == {spec.placement.kind}
    found, kept, reasons = again(spec, measured(spec.placement, slow=2), splits=splits)
    assert (found.placement, found.stages) == (spec.placement, spec.stages)
    names = {line.partition(":")[0] for line in reasons}
    assert names == {name for name, _ in spec.rivals if splits or not SCHEDULES[name].splits}
    if not names:
        assert kept.startswith("no other one is possible: ")
        return
    assert any(line.endswith("chosen") for line in reasons)
    kinds = {op[0] for row in trained(found).rows for op in row if IS_COMPUTE[op[0]]}
    assert splits or kept is not None or kinds == {F, BW}


@pytest.mark.parametrize(
    "flags", ["--pipeline-schedule zb-1p", "--pipeline-schedule 1f1b --pipeline-memory-limit 1G"]
)
def test_times_are_as_measured_and_bytes_as_described(flags):
    spec = made(flags)
    times = measured(spec.placement)
    costs = measured_costs(figures_of_run(trained(spec), times), spec)
    assert costs.f == pytest.approx([1e9 * one for one in times.f])
    assert (costs.activation, costs.held_after_b) == (spec.costs.activation, spec.costs.held_after_b)
    assert len(set(costs.activation)) > 1


@pytest.mark.parametrize(
    ("flags", "strategy", "policy", "reduction_ns"),
    [
        ("--pipeline-schedule zb-h1", "optim", "memory", 5e6),  # trailing W's come unit by unit
        ("--pipeline-schedule 1f1b", "optim_grads_params", "budget", 2e6),  # room is left to gathers ahead
        ("--pipeline-schedule zb-1p", "optim_grads_params", "step", 5e6),
    ],
)
def test_gathers_and_reductions_are_moved_by_measured_costs_and_no_grouping_is(
    flags, strategy, policy, reduction_ns
):
    spec = made(flags, ranks=2)
    costs = measured(spec.placement)
    asked = unit_stages.asked(strategy, policy, 2, budget=5 * unit_stages.W_BYTES)
    spec = dataclasses.replace(spec, stages_units=unit_stages.model(spec.placement, 4), residency=asked)
    before = trained(spec)
    spec = dataclasses.replace(spec, groupings=((MICROBATCHES, before.residency.grouping),))
    wire = LaneCosts(latency=1e5, bandwidth=unit_stages.G_BYTES / reduction_ns)
    found, kept, _ = solve_again(spec, costs, MICROBATCHES, MICROBATCHES, splits=True, lanes=wire)
    assert kept is None
    after = trained(found)
    assert after.residency == before.residency
    times = [simulate(plan, costs, spec.with_lanes(wire)).cost for plan in (before, after)]
    assert times[1] < times[0] * (1 - 1e-6)
    verify(after, costs, stages=found.stages_units, residency=asked)
    assert "would take" in solve_again(found, costs, MICROBATCHES, MICROBATCHES, splits=True, lanes=wire)[1]
    if "zb-1p" not in flags:
        assert "fixed order" in again(spec, costs)[1]
