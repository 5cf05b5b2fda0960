"""One limit of bytes: what is chosen keeps to it, is never slower than what is simple and fits, and says why."""

import dataclasses
import random

import pytest

from megatron.core.pipeline_parallel.plan.budget_search import fastest_within_limit, judge
from megatron.core.pipeline_parallel.plan.candidate import least_bytes
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.ir import Kind, PlanError
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from tests.harness import unit_stages

SHARDED, OPTIM = "optim_grads_params", "optim"


def candidates(ranks, limit, draw, strategies=(OPTIM, SHARDED)):
    """1f1b, a V, and interleaving in groups; activations of a stage weigh as much as some of its layers."""
    activation, bandwidth = draw.choice((4.0, 12.0)), draw.choice((20.0, 80.0))
    found = []
    for name, chunks, group in (("1f1b", 1, None), ("zbv", 2, None), ("gis", 2, ranks)):
        placement = SCHEDULES[name].placed(ranks, chunks)
        costs = CostModel.of_ranks(placement, activation=(activation,), time_w=(0.7,))
        for strategy in strategies:
            stages = unit_stages.model(placement, 4 // chunks)
            if strategy == OPTIM:  # gradients are whole at rest
                stages = unit_stages.whole_at_rest(stages)
            asked = Residency(strategy, policy="budget", limit=(limit,) * ranks)
            words = {"stages_units": stages, "residency": asked, "lanes": LaneCosts(bandwidth=bandwidth)}
            found.append(ScheduleSpec(name, placement, costs, group_size=group, estimated=True, **words))
    return found


LONG = (1, 6, 8, 9, 11)  # of the seeds, those whose ranks and limit another one has too


@pytest.mark.grid
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed in LONG)) for seed in range(12)]
)
def test_the_choice_keeps_to_the_limit_and_none_that_fits_is_faster(seed):
    draw = random.Random(seed)
    ranks, limit = draw.choice((2, 3)), draw.choice((160.0, 220.0, 400.0, 900.0))
    asked = candidates(ranks, limit, draw)
    fitting = []
    for one in asked:
        try:
            fitting.append(judge(one, 2 * ranks))
        except PlanError:
            continue
    if not fitting:
        with pytest.raises(PlanError, match="nothing fits; the least is that of"):
            fastest_within_limit(asked, 2 * ranks)
        return
    best, lines = fastest_within_limit(asked, 2 * ranks)
    assert max(best.peaks) <= limit
    assert best.simulation.merit == min(one.simulation.merit for one in fitting)
    assert len(lines) == 1 + len(asked)
    assert lines[0].endswith(": chosen")


def test_with_room_for_everything_nothing_is_gathered_twice():
    best, _ = fastest_within_limit(candidates(2, 1e6, random.Random(0), (SHARDED,)), 4)
    stages = best.spec.stages_units
    for rank, row in enumerate(best.plan.rows):
        names = {unit.name for stage in best.spec.local_stages(rank) for unit in stages[stage].units}
        assert sum(op[0] == Kind.UNSHARD for op in row) == len(names), rank


def test_less_than_the_least_is_refused_with_its_parts():
    asked = candidates(2, 50.0, random.Random(0), (SHARDED,))
    with pytest.raises(PlanError, match=r"at rest, .* of units gathered and reduced, .* activations"):
        fastest_within_limit(asked, 4)
    assert sum(least_bytes(asked[0])[0]) > 50.0


def test_what_would_hold_the_least_is_no_fixed_order_that_holds_more():
    asked = [one for one in candidates(3, 50.0, random.Random(0), (SHARDED,)) if one.schedule != "gis"]
    assert [one.schedule for one in asked] == [
        "1f1b",
        "zbv",
    ]  # the first holds three microbatches, whatever the limit
    with pytest.raises(PlanError, match="the least is that of zbv"):
        fastest_within_limit(asked, 6)


@pytest.mark.parametrize("turn", [1, -1])
def test_steps_are_compared_by_their_time_not_by_the_share_of_work_in_it(turn):
    even = candidates(2, 1e6, random.Random(0), (SHARDED,))[0]
    costs = CostModel.of_ranks(even.placement, activation=(4.0,), time_f=(1.0, 2.0), time_b=(1.0, 2.0))
    uneven = dataclasses.replace(even, schedule="zb-1p", costs=costs)
    times = {one.schedule: judge(one, 4).simulation for one in (even, uneven)}
    assert times["1f1b"].cost < times["zb-1p"].cost
    assert times["1f1b"].bubble_rate > times["zb-1p"].bubble_rate
    best, _ = fastest_within_limit([even, uneven][::turn], 4)
    assert best.spec.schedule == "1f1b"
