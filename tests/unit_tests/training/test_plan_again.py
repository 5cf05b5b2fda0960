"""Schedules solved again for measured costs: better ones are taken, limits are kept, layers stay where they are."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, PlanError, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.training.arguments import parse_config
from megatron.training.launch_env import LaunchEnv
from megatron.training.plan_again import measured_costs, solve_again, window_of
from megatron.training.plans import Plans
from tests.harness import launch
from tests.harness.measured_runs import figures_of_run

MICROBATCHES, MIB = 8, float(2**20)


def made(flags, ranks=4):
    words = [*launch.TINY, *f"--num-layers 8 --train-iters 4 --pipeline-model-parallel-size {ranks}".split()]
    words += f"--padded-vocab-size 128 --micro-batch-size 1 --global-batch-size {MICROBATCHES}".split()
    return Plans(
        parse_config([*words, *flags.split()], env=LaunchEnv(world_size=ranks, launched=True, rank=0))
    )


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


def again(plans, costs, splits=True):
    return solve_again(plans, costs, MICROBATCHES, MICROBATCHES, splits=splits)


@pytest.mark.parametrize(
    ("first", "window"),
    [(1, (100, 110)), (100, (100, 110)), (101, (102, 112)), (500, (501, 511))],
)
def test_a_run_resumed_behind_the_start_measures_later(first, window):
    assert window_of(100, 110, first) == window


@pytest.mark.parametrize("flags", ["--pipeline-schedule zb-1p", "--zero-bubble-v-schedule"])
def test_a_searched_schedule_becomes_better_and_then_stays(flags):
    plans = made(flags)
    costs = measured(plans.placement, slow=0)
    old = plans.train(MICROBATCHES)
    found = again(plans, costs)
    assert found.why is None
    assert found.before.cost == simulate(old, costs).cost
    assert found.after.cost < found.before.cost
    assert found.after.bubble_rate < found.before.bubble_rate
    verify(found.after.plan)
    plans.use_layout(found.layout, found.limits)
    assert plans.train(MICROBATCHES).rows == found.after.plan.rows != old.rows
    second = again(plans, costs)
    assert (second.why, second.after) == ("a new one would take as long", second.before)
    assert second.layout is None


@pytest.mark.parametrize("flags", ["", "--pipeline-schedule zb-h1", "--pipeline-schedule dualpipe-v"])
def test_fixed_orders_stay(flags):
    plans = made(flags)
    found = again(plans, measured(plans.placement, slow=1))
    assert found.after is found.before
    assert found.why == f"{plans.schedule} is a fixed order"


def test_a_plan_from_a_file_stays(tmp_path):
    plans = made("--pipeline-schedule zb-1p")
    (tmp_path / "plan.json").write_text(to_json(plans.train(MICROBATCHES)))
    filed = made(f"--pipeline-schedule-file {tmp_path}/plan.json")
    found = again(filed, measured(filed.placement, slow=0))
    assert (found.layout, found.why) == (None, "a file says what is run")


def test_limits_in_bytes_stay_and_those_in_activations_are_counted_anew():
    costs = measured(made("").placement)
    in_bytes = made("--pipeline-schedule zb-1p --pipeline-memory-limit 512M")
    assert in_bytes.limits_under(costs) == in_bytes.limits == (512 * MIB,) * 4
    counted = made("--enable-zero-bubble --zero-bubble-max-pending-backward 5")
    assert counted.limits_under(costs) == (5 * MIB,) * 4 != counted.limits
    assert made("--pipeline-schedule zb-1p").limits_under(costs) is None
    by_device = made("--enable-zero-bubble")
    by_device.limit((7 * MIB,) * 4)
    assert by_device.limits_under(costs) == (7 * MIB,) * 4


def test_a_plan_that_holds_too_much_gives_way_to_a_slower_one():
    plans = made("--pipeline-schedule zb-2p --pipeline-memory-limit 4M")
    costs = measured(plans.placement, activation=MIB / 2)
    plans.use_layout(dataclasses.replace(plans.layout, costs=costs), plans.limits)
    costs = measured(plans.placement, activation=MIB)
    assert max(simulate(plans.train(MICROBATCHES), costs).peak_activation) > 4 * MIB
    found = again(plans, costs)
    assert found.why is None
    assert found.after.cost > found.before.cost
    assert max(found.after.peak_activation) <= 4 * MIB


def test_nothing_fits():
    plans = made("--pipeline-schedule zb-1p --pipeline-memory-limit 4M")
    costs = measured(plans.placement, activation=MIB / 2)
    plans.use_layout(dataclasses.replace(plans.layout, costs=costs), plans.limits)
    found = again(plans, measured(plans.placement, activation=8 * MIB))
    assert found.after is found.before
    assert found.why.startswith("nothing fits: ")


@pytest.mark.parametrize("splits", [True, False])
def test_auto_chooses_among_schedules_whose_layers_lie_the_same(splits):
    plans = made("--pipeline-schedule auto --pipeline-memory-limit 512M")
    before = plans.placement, plans.stages
    costs = measured(plans.placement, slow=2)
    limits = plans.limits_under(costs)
    layout, reasons = plans.layout_under(costs, limits, MICROBATCHES, splits=True)
    plans.use_layout(layout, limits)
    assert (plans.placement, plans.stages) == before
    kinds = {SCHEDULES[line.partition(":")[0]].placement for line in reasons}
    assert kinds == {plans.placement.kind}
    assert any(line.endswith("chosen") for line in reasons)
    try:
        layout, _ = plans.layout_under(costs, limits, MICROBATCHES, splits=splits)
    except PlanError:
        assert not splits
        return
    rows = plans.computations_of(layout, MICROBATCHES, limits).rows
    kinds = {op[0] for row in rows for op in row if IS_COMPUTE[op[0]]}
    assert splits or kinds == {F, BW}


def test_layers_do_not_move():
    with pytest.raises(AssertionError, match="layers cannot move"):
        made("").use_layout(made("--zero-bubble-v-schedule").layout, None)


def test_fused_backwards_do_not_show_what_is_held_between_b_and_w():
    plans = made("--pipeline-schedule 1f1b --pipeline-memory-limit 1G")
    figures = figures_of_run(plans.train(MICROBATCHES), measured(plans.placement))
    assert not any(kind in (B, W) for one in figures for kind, _, _ in one["times"])
    for rank, one in enumerate(figures):
        one["activations"] = [[rank, 1000 + rank, 1000 + rank]]
    costs, known = measured_costs(figures, plans), plans.costs
    assert costs.activation == (1000, 1001, 1002, 1003)
    for stage, held in enumerate(costs.held_after_b):
        share = known.held_after_b[stage] / known.activation[stage]
        assert held == pytest.approx(share * costs.activation[stage])
        assert abs(share - 1) > 0.01


def test_memory_counts_as_measured_where_all_of_it_was():
    plans = made("--pipeline-schedule zb-1p")
    figures = figures_of_run(plans.train(MICROBATCHES), measured(plans.placement))
    known = plans.costs.activation
    unweighed = measured_costs(figures, plans)
    assert unweighed.activation == known
    for rank, one in enumerate(figures):
        one["activations"] = [[rank, 1000 + rank, 400]]
    costs = measured_costs(figures, plans)
    assert costs.activation == (1000, 1001, 1002, 1003)
    assert costs.held_after_b == (400,) * 4
    assert dataclasses.replace(costs, activation=known, held_after_b=plans.costs.held_after_b) == unweighed
    figures[1]["activations"] = []
    assert measured_costs(figures, plans) == unweighed
    figures[1]["activations"] = [[1, 0, 0]]
    assert measured_costs(figures, plans) == unweighed
