"""The joint choice against the proved optimum of small pipelines, and against simple choices of random ones.

The choice is a heuristic that is held to within 1 % of the optimum. Where it is known to miss that by more, in 4 of
69 settings of three microbatches and in none of 70 of two, GAPS says by how much, and it may not become more.
"""

import dataclasses
import random

import pytest

from megatron.core.pipeline_parallel.plan.budget_search import fastest_within_limit
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from tests.harness import unit_stages
from tests.harness.joint_oracle import fastest

OPTIM, SHARDED = "optim", "optim_grads_params"
# Microbatches, units a stage, seed -> the choice over the optimum.
GAPS = {(3, 2, 22): 1.041, (3, 2, 44): 1.036, (3, 3, 4): 1.045, (3, 3, 8): 1.034}


def most_held(plan, spec):
    """By rank, the most bytes at any boundary."""
    found = []
    for rank, row in enumerate(plan.rows):
        units = RankUnits(rank, plan.placement, spec.stages_units)
        walk = walk_row(row, units, spec.residency, spec.costs, boundaries=True)
        found.append(units.bytes_at_rest + max(one.total for one in walk.boundaries))
    return found


def small(count, draw):
    """1f1b and zb-1p on two ranks, stages of so many layers; from hardly any room to room for everything, from a wire
    that hides nothing to one that hides all. Times are such that sums of them are exact."""
    placement = SCHEDULES["1f1b"].placed(2)
    costs = CostModel.of_ranks(
        placement,
        time_f=(12.0,),
        time_b=(draw.choice((12.0, 18.0)),),
        time_w=(draw.choice((6.0, 12.0)),),
        activation=(draw.choice((20.0, 60.0)),),
        memory_after_b=draw.choice((0.5, 1.0)),
    )
    stages = tuple(unit_stages.layers(stage, count) for stage in range(2))
    least = 3 * count + unit_stages.W_BYTES + 2 * unit_stages.G_BYTES + costs.activation[0]
    limit = round(least * draw.uniform(1, 2.5))
    asked = Residency(SHARDED, policy="budget", limit=(limit,) * 2)
    words = {
        "stages_units": stages,
        "residency": asked,
        "lanes": LaneCosts(bandwidth=draw.choice((1.0, 2.0, 5.0))),
    }
    return [ScheduleSpec(name, placement, costs, estimated=True, **words) for name in ("1f1b", "zb-1p")]


def against_the_optimum(total, count, seed):
    """The choice over the optimum; None where nothing fits."""
    asked = small(count, random.Random(seed))
    try:
        best, _ = fastest_within_limit(asked, total)
    except PlanError:
        assert fastest(asked[0], total, 1e4) is None, (total, count, seed)
        return None
    spec, cost = best.spec, best.simulation.cost
    found = fastest(spec, total, cost * (1 + 1e-9))
    assert found is not None, f"{cost} is less than the optimum: {best.plan.rows}"
    proved, optimal = found
    assert simulate(optimal, spec.costs, spec.with_lanes(spec.lanes)).cost == pytest.approx(proved, rel=1e-9)
    for plan in (best.plan, optimal):
        assert max(most_held(plan, spec)) <= spec.residency.limit[0]
    return cost / proved


def held_to(total, count, seed):
    gap = against_the_optimum(total, count, seed)
    assert gap is None or gap <= GAPS.get((total, count, seed), 1.01), (total, count, seed, gap)


def print_gaps(total, count, first, end):
    """Settings without a plan are left out."""
    found = {seed: against_the_optimum(total, count, seed) for seed in range(first, end)}
    gaps = {seed: gap for seed, gap in found.items() if gap is not None}
    within = {least: sum(gap <= least for gap in gaps.values()) for least in (1 + 1e-9, 1.01)}
    print(f"{len(gaps)} settings: {within[1 + 1e-9]} are the optimum, {within[1.01]} within 1 %")
    print({seed: round(gap, 4) for seed, gap in gaps.items() if gap > 1 + 1e-9})


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(8))
def test_two_microbatches_of_two_units(seed):
    held_to(2, 2, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8, 60))
def test_more_limits_and_costs_of_two_microbatches(seed):
    held_to(2, 2, seed)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
def test_three_microbatches_of_two_units(seed):
    held_to(3, 2, seed)


@pytest.mark.full
@pytest.mark.parametrize(("count", "seeds"), [(2, range(3, 50)), (3, range(9))], ids=str)
def test_more_of_three_microbatches(count, seeds):
    for seed in seeds:
        held_to(3, count, seed)


def random_candidates(draw):
    """Schedules of one number of chunks under two rows of the sharding table, and a number of microbatches."""
    ranks, chunks = draw.choice((2, 2, 3, 4)), draw.choice((1, 2))
    total, layers = draw.randint(ranks, ranks + 3), draw.randint(1, 3)
    figures = {
        name: tuple(round(draw.uniform(*span), 1) for _ in range(ranks))
        for name, span in (
            ("time_f", (8, 12)),
            ("time_b", (8, 14)),
            ("time_w", (4, 12)),
            ("activation", (10, 60)),
        )
    }
    shared = {"memory_after_b": draw.choice((0.5, 1.0)), "comm": draw.choice((0.0, 1.0))}
    wire, ends, share = (
        LaneCosts(bandwidth=draw.choice((1.0, 3.0, 10.0))),
        draw.randint(1, 4),
        draw.uniform(0.3, 1.5),
    )
    found = []
    for name in ("1f1b", "zb-1p") if chunks == 1 else ("gis", "1f1b-v", "zbv"):
        placement = SCHEDULES[name].placed(ranks, chunks)
        costs = CostModel.of_ranks(placement, **figures, **shared)
        for strategy in (OPTIM, SHARDED):
            stages = unit_stages.model(placement, layers, ends=ends)
            if strategy == OPTIM:
                stages = unit_stages.whole_at_rest(stages)
            every = [sum(unit.weight_bytes + unit.grad_bytes for unit in stage.units) for stage in stages]
            limit = share * (max(every) * chunks + ranks * max(figures["activation"]))
            asked = Residency(strategy, policy="budget", limit=(limit,) * ranks)
            words = {"stages_units": stages, "residency": asked, "lanes": wire}
            found.append(ScheduleSpec(name, placement, costs, estimated=True, **words))
    return found, total


def simple_costs(asked, total):
    """Of what fits: `optim` under every schedule, all gathered for each use, all kept."""
    for spec in asked:
        for policy in ("memory", "step") if spec.residency.strategy == SHARDED else ("memory",):
            plain = dataclasses.replace(
                spec, residency=dataclasses.replace(spec.residency, policy=policy, limit=None)
            )
            try:
                plan = plan_for(plain, total, PlanPurpose.TRAIN)
            except PlanError:
                continue
            if max(most_held(plan, plain)) <= spec.residency.limit[0]:
                yield simulate(plan, plain.costs, plain.with_lanes(plain.lanes)).cost, spec.schedule, policy


def keeps_its_promises(seed):
    asked, total = random_candidates(random.Random(seed))
    simple = min(simple_costs(asked, total), default=None)
    try:
        best, _ = fastest_within_limit(asked, total)
    except PlanError:
        assert simple is None, (seed, simple)
        return
    assert max(most_held(best.plan, best.spec)) <= best.spec.residency.limit[0]
    assert simple is None or best.simulation.cost <= simple[0] * (1 + 1e-9), (
        seed,
        best.simulation.cost,
        simple,
    )


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(9))
def test_never_over_the_limit_nor_slower_than_what_is_simple(seed):
    keeps_its_promises(seed)


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(start, start + 13) for start in range(9, 204, 13)], ids=str)
def test_the_same_of_many(seeds):
    for seed in seeds:
        keeps_its_promises(seed)
