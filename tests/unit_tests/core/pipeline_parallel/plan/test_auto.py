"""The choice among schedules: the fastest that fits, and the reasons."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec

ALL = ("gpipe", "1f1b", "zb-1p", "zb-2p", "zbv", "v-half", "v-min")


def specs(*names, limit=None, **costs):
    """Of 4 ranks."""
    made = []
    for name in names:
        placement = SCHEDULES[name].placed(4)
        limits = None if limit is None else (limit,) * 4
        made.append(ScheduleSpec(name, placement, CostModel.of_ranks(placement, **costs), limits=limits))
    return made


def line_of(best, name):
    return next(line for line in best.reasons if line.startswith(f"{name}: "))


def test_of_equally_fast_ones_the_smaller_is_chosen():
    best = fastest(specs(*ALL), 12)
    assert best.schedule == "zbv"  # zb-2p has no bubble either, and holds 7 where zbv holds 4
    assert plan_for(best, 12, PlanPurpose.TRAIN).schedule == "zbv"
    line = line_of(best, "zb-2p")
    assert line.startswith("zb-2p: step time 36")
    assert line.endswith("as fast as zbv, and holds no less")
    assert "zbv: step time 36, bubble 0.0%, peak 4 (rank 0): chosen" in best.reasons
    assert line_of(best, "1f1b").startswith("1f1b: step time 45, bubble 20.0%, peak 4")
    assert "25.0% slower" in line_of(best, "1f1b")


def test_searches_use_the_limit_and_fixed_orders_are_held_to_it():
    best = fastest(specs(*ALL, limit=3.0), 12)
    assert best.schedule in ("zbv", "v-half", "v-min")
    over = {line.partition(":")[0] for line in best.reasons if "too much memory" in line}
    assert over == {"gpipe", "1f1b"}
    simulation = simulate(plan_for(best, 12, PlanPurpose.TRAIN), best.costs)
    assert all(peak <= 3 for peak in simulation.peak_activation)
    assert "too much memory: rank 0 would hold 12 of 3" in line_of(best, "gpipe")
    assert "peak 3 of 3 (rank" in line_of(best, best.schedule)


@pytest.mark.parametrize(
    ("facts", "cost", "held"),
    [
        ({}, "36", "peak 4 of 4"),
        ({"estimated": True}, "36 x F of a layer", "peak 4 MiB of 4 MiB"),
        ({"estimated": True, "measured": True}, "36 us", "peak 4 MiB of 4 MiB"),
        ({"measured": True}, "36 us", "peak 4 of 4"),
    ],
)
def test_times_and_activations_are_told_in_the_units_of_costs(facts, cost, held):
    in_bytes = facts.get("estimated", False)
    time, size = (1e3 if facts.get("measured") else 1.0), (2.0**20 if in_bytes else 1.0)
    candidates = specs(
        *("gpipe", "1f1b", "zbv"),
        limit=4 * size,
        time_f=(time,),
        time_b=(time,),
        time_w=(time,),
        activation=(size,),
    )
    best = fastest([dataclasses.replace(one, **facts) for one in candidates], 12)
    assert best.reasons[0] == f"zbv: step time {cost}, bubble 0.0%, {held} (rank 0): chosen"
    over = "12 MiB of 4 MiB" if in_bytes else "12 of 4"
    assert f"rank 0 would hold {over}" in line_of(best, "gpipe")


def test_sizes_are_told_in_the_unit_that_fits():
    spec = dataclasses.replace(specs("1f1b")[0], estimated=True)
    told = {1.31789e6: "1.257 MiB", 972800: "950 KiB", 2**32: "4 GiB", 1024: "1 KiB", 0: "0 bytes"}
    assert {size: spec.describe_activation(size) for size in told} == told


def test_1f1b_wins_where_transfers_cost_much():
    """On the V every microbatch crosses ranks twice as often."""
    assert fastest(specs("1f1b", "v-min", comm=20.0), 4).schedule == "1f1b"


def test_schedules_that_cannot_be_had_say_why():
    best = fastest(specs("1f1b", "interleaved"), 2)
    assert best.schedule == "1f1b"
    assert best.reasons[-1].startswith("interleaved: not possible: ")


def test_nothing_that_fits_is_an_error_with_all_reasons():
    told = r"no pipeline schedule .*gpipe: rank 0 would hold .*zbv: rank 0 may hold"
    with pytest.raises(PlanError, match=told):
        fastest(specs("gpipe", "zbv", limit=0.5), 8)
