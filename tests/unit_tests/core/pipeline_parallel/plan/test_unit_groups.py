"""Plans of stages whose units lie over groups of ranks of different size, by hand."""

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.units import Share, StageUnits
from megatron.core.pipeline_parallel.plan.held.verify_residency import verify_residency
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD, PlanError
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.text import from_json, to_json
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.core.sharding_table import RankGroup
from tests.harness.unit_stages import asked, unit

ACCESSES = ((0,), (1,), (2,))
DENSE, EXPERT = 64, 640  # bytes of weights; gradients have twice as many
WIRE = LaneCosts(latency=0.5, bandwidth=32.0)
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
POLICIES = ("memory", "step", "budget")


def shares_of(dense, expert, *, ways=8, expert_ways=2, expert_outer=1):
    """Dense weights over "dp", those of experts over "expert", of which there may be several."""
    found = []
    if dense:
        found.append(Share(RankGroup("dp", ways), dense, 2 * dense, at_rest=3 * dense // ways))
    if expert:
        group = RankGroup("expert", expert_ways)
        found.append(Share(group, expert, 2 * expert, at_rest=3 * expert // expert_ways))
        copies = RankGroup("expert_outer", expert_outer, instances=True)
        found.append(Share(copies, 0, 2 * expert // expert_ways))
    return tuple(found)


def stages_of(placement, **ranks):
    """Each a layer that is dense, experts by themselves, and a layer that has both."""
    return tuple(
        StageUnits(
            (
                unit(f"{stage}.dense", shares=shares_of(DENSE, 0, **ranks)),
                unit(f"{stage}.experts", shares=shares_of(0, EXPERT, **ranks)),
                unit(f"{stage}.layer", shares=shares_of(DENSE, EXPERT, **ranks)),
            ),
            ACCESSES,
            ACCESSES[::-1],
        )
        for stage in range(placement.num_stages)
    )


def planned(name, strategy, policy, *, wire=None, **ranks):
    order = build_plan(name, Request(2, 4))
    costs = CostModel.of_ranks(order.placement)
    stages, residency = stages_of(order.placement, **ranks), asked(strategy, policy, 2, budget=EXPERT)
    return add_residency(lower(order, costs), stages, residency, costs, wire), costs, stages, residency


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "zbv"])
def test_every_collective_is_of_the_size_and_the_ranks_of_its_group(name, strategy, policy):
    plan, costs, stages, residency = planned(name, strategy, policy, wire=WIRE)
    verify(plan, costs, stages=stages, residency=residency)
    assert from_json(to_json(plan)) == plan
    timed = simulate(plan, costs, Lanes(stages, residency, WIRE))
    walks = verify_residency(plan, stages, residency)
    # (bytes of weights, what of them a rank sends) of each unit
    sizes = [
        ((DENSE,), DENSE * 7 / 8),
        ((EXPERT,), EXPERT / 2),
        ((DENSE, EXPERT), DENSE * 7 / 8 + EXPERT / 2),
    ]
    for rank, (row, walk) in enumerate(zip(plan.rows, walks, strict=True)):
        busy, gathers, reductions = 0.0, [], []
        for op in row:
            for weights, sent in sizes[op[4] : op[5]] if op[0] in (UNSHARD, REDUCE) else ():
                twice = 2 if op[0] == REDUCE else 1
                (reductions if op[0] == REDUCE else gathers).extend(weights)
                busy += len(weights) * WIRE.latency + twice * sent / WIRE.bandwidth
        assert timed.timeline.lanes[rank].busy == pytest.approx(busy)
        assert walk.moves.gathers.payload_bytes == sum(gathers)
        assert walk.moves.gathers.calls == len(gathers)
        assert walk.moves.reductions.payload_bytes == 2 * sum(reductions)
        assert walk.moves.reductions.calls == len(reductions)


def test_what_a_rank_holds_is_of_both_groups():
    plan, _, stages, residency = planned("1f1b", "optim_grads_params", "step")
    (walk, _), rank = verify_residency(plan, stages, residency), timed_units(plan, stages)
    assert walk.most.gathered == 2 * (DENSE + EXPERT)
    assert rank.bytes_at_rest == 2 * (3 * DENSE // 8 + 3 * EXPERT // 2)


def timed_units(plan, stages):
    return (
        simulate(
            plan,
            CostModel.of_ranks(plan.placement),
            Lanes(stages, asked("optim_grads_params", "step", 2), WIRE),
        )
        .timeline.lanes[0]
        .units
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_that_no_rank_shares_are_whole_at_rest(policy):
    """As many experts as ranks: their weights and gradients neither come nor go."""
    plan, costs, stages, residency = planned("zb-1p", "optim_grads_params", policy, expert_ways=1)
    verify(plan, costs, stages=stages, residency=residency)
    experts = [op for row in plan.rows for op in row if op[0] in (UNSHARD, REDUCE) and op[4] == 1]
    assert not experts
    assert max(one.most.gathered for one in verify_residency(plan, stages, residency)) <= 2 * DENSE


@pytest.mark.parametrize("policy", POLICIES)
def test_instances_of_experts_alone_are_summed(policy):
    """Experts that are not cut but repeated: one reduction, which nobody waits for, and their sum over instances."""
    ranks = {"expert_ways": 1, "expert_outer": 4}
    plan, costs, stages, residency = planned("1f1b", "optim_grads_params", policy, **ranks)
    verify(plan, costs, stages=stages, residency=residency)
    for row in plan.rows:
        summed = [op[4] for op in row if op[0] == HSDP_ALL_REDUCE]
        assert sorted(summed) == [1, 2]
        assert [op[4] for op in row if op[0] == REDUCE].count(1) == 1
    moves = verify_residency(plan, stages, residency)[0].moves
    assert (moves.outer_sums.calls, moves.outer_sums.payload_bytes) == (2, 2 * 2 * EXPERT)


def test_a_plan_for_another_group_of_experts_is_refused():
    plan, costs, stages, residency = planned("1f1b", "optim_grads_params", "memory")
    other = stages_of(plan.placement, expert_ways=4)
    with pytest.raises(
        PlanError, match=r"8 ranks of dp and 2 ranks of expert.*8 ranks of dp and 4 ranks of exp"
    ):
        verify(plan, costs, stages=other, residency=residency)
    foreign = dataclasses.replace(plan, residency=dataclasses.replace(plan.residency, groups=()))
    with pytest.raises(PlanError, match="the plan was made for ranks"):
        verify(foreign, costs, stages=stages, residency=residency)
