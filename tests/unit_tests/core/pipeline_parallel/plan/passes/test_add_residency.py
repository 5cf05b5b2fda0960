"""Every schedule under every strategy and policy: verified, counted by closed forms, and by hand."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import (
    IS_BESIDE,
    READS_WEIGHTS,
    B,
    F,
    PlanError,
    plan_hash,
    row_texts,
)
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only, lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.text import from_json, to_json
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.unit_stages import G_BYTES, W_BYTES, asked, layers, model

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED = "optim_grads_params"


def lowered(name, p, m, chunks=None):
    plan = build_plan(name, Request(p, m, chunks))
    costs = CostModel.of_ranks(plan.placement)
    return lower(plan, costs), costs


def walks(plan, stages, residency, costs=None):
    return [
        walk_row(
            row, RankUnits(rank, plan.placement, stages), residency, costs, forward_only=plan.forward_only
        )
        for rank, row in enumerate(plan.rows)
    ]


def bare(plan):
    """Without operations of data parallelism."""
    rows = tuple(tuple(op for op in row if not IS_BESIDE[op[0]]) for row in plan.rows)
    return dataclasses.replace(plan, rows=rows, residency=None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_schedule_strategy_and_policy(data):
    """add_residency verifies what it makes, V1-V12, with messages and collectives that block; nothing else of
    the plan changes; files bring back the same plan; DP peers have the same rows because nothing else goes
    in."""
    name = data.draw(st.sampled_from(sorted(SCHEDULES)), "schedule")
    schedule = SCHEDULES[name]
    p = data.draw(st.sampled_from([one for one in (1, 2, 3, 4, 8) if one > 1 or schedule.alone]), "ranks")
    m = data.draw(st.integers(1, 2 * p + 2), "microbatches")
    m = max(m, schedule.least_microbatches(p))
    plan, costs = lowered(name, p, m)
    if data.draw(st.booleans(), "post-validation") and p > 1:
        plan = post_validation(plan, costs)
    strategy = data.draw(st.sampled_from(STRATEGIES), "strategy")
    ways = data.draw(st.sampled_from((1, 4)), "ways")
    outer = 1 if strategy == "no_shard" else data.draw(st.sampled_from((1, 2)), "instances")
    stages = model(
        plan.placement,
        data.draw(st.integers(1, 4), "layers"),
        tied=data.draw(st.booleans(), "tied"),
        group=data.draw(st.sampled_from((1, 2)), "recomputed together"),
        ends=data.draw(st.sampled_from((1, 3, 20)), "size of both ends"),
        ways=ways,
        outer=outer,
        outer_optimizer=strategy == SHARDED and data.draw(st.booleans(), "optimizer over instances"),
    )
    policies = ("memory", "step", "budget", *(("backward",) if plan.placement.num_stages == 1 else ()))
    residency = asked(
        strategy,
        data.draw(st.sampled_from(policies), "policy"),
        p,
        data.draw(st.sampled_from((0, 15, 60, 300, 10_000)), "budget"),
        ahead=data.draw(st.sampled_from((0, 1, 25, 200)), "ahead"),
        overlap_gather=data.draw(st.booleans(), "overlap gathers"),
        overlap_reduce=data.draw(st.booleans(), "overlap reductions"),
    )
    planned = add_residency(plan, stages, residency, costs)
    assert bare(planned) == plan
    assert (planned is plan) == (ways == outer == 1)
    assert from_json(to_json(planned)) == planned
    assert plan_hash(bare(planned)) == plan_hash(plan)
    verify(planned, costs)  # without units, by the plan's own words


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "zbv", "dualpipe-v", "interleaved"])
def test_evaluation_gathers_and_never_reduces(name, strategy):
    plan = forward_only(build_plan(name, Request(2, 4)))
    costs = CostModel.of_ranks(plan.placement)
    plan = lower(plan, costs)
    stages = model(plan.placement, 3)
    planned = add_residency(plan, stages, asked(strategy, "memory", 2), costs)
    kinds = {text.lstrip("0123456789").partition("[")[0] for row in planned.rows for text in row_texts(row)}
    gathers = {"UNSHARD", "RESHARD"} if strategy == SHARDED else set()
    assert {kind for kind in kinds if kind in ("UNSHARD", "RESHARD", "REDUCE", "HSDP_ALL_REDUCE")} == gathers


def turnarounds(row, stage, count):
    """Gathers that `memory` saves in a row by unit: a stage's last unit is used in F and at once in B, its
    first in B and at once in F; what reads no weights may stand between."""
    saved = [0] * count
    reading = [op for op in row if READS_WEIGHTS[op[0]]]
    for one, other in itertools.pairwise(reading):
        if one[1] == other[1] == stage and (one[0] == F) != (other[0] == F):
            saved[-1 if one[0] == F else 0] += 1
    return saved


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8), (4, 3)])
def test_closed_forms_of_memory_and_step(name, p, m):
    m = max(m, SCHEDULES[name].least_microbatches(p))
    plan, costs = lowered(name, p, m)
    stages = [layers(stage, 3) for stage in range(plan.placement.num_stages)]
    memory = asked(SHARDED, "memory", p)
    planned = add_residency(plan, stages, memory, costs)
    for rank, walk in enumerate(walks(planned, stages, memory, costs)):
        mine = [stage for stage, one in enumerate(plan.placement.ranks()) if one == rank]
        gathers = sum(2 * m - saved for stage in mine for saved in turnarounds(plan.rows[rank], stage, 3))
        assert (walk.moves.gathers.calls, walk.moves.gathers.payload_bytes) == (gathers, gathers * W_BYTES)
        reductions = 3 * m * len(mine)
        assert (walk.moves.reductions.calls, walk.moves.reductions.payload_bytes) == (
            reductions,
            reductions * G_BYTES,
        )
        # a unit in use and one ahead; one that is added to and two that are reduced
        assert walk.most.gathered == 2 * W_BYTES
        assert walk.most_transient <= 2 * W_BYTES + 3 * G_BYTES
    step = asked(SHARDED, "step", p)
    planned = add_residency(plan, stages, step, costs)
    for rank, walk in enumerate(walks(planned, stages, step, costs)):
        units = 3 * plan.placement.ranks().count(rank)
        assert walk.moves.gathers.calls == walk.moves.reductions.calls == units
        assert walk.most.gathered == units * W_BYTES
        assert walk.most.gradients <= units * G_BYTES
    assert walk.moves.outer_sums.calls == walk.moves.outer_gathers.calls == 0


def test_strategies_by_hand():
    plan, costs = lowered("1f1b", 1, 2)

    def row(strategy, policy="memory", outer=1, **words):
        stages = (layers(0, 2, outer=outer),)
        return " ".join(
            row_texts(add_residency(plan, stages, asked(strategy, policy, 1, **words), costs).rows[0])
        )

    assert row("no_shard") == "0F0 0BW0 0F1 0REDUCE[1:2].2 0BW1 0REDUCE[0:1]"
    assert row("no_shard", overlap_reduce=False) == "0F0 0BW0 0F1 0BW1 0REDUCE[1:2] 0REDUCE[0:1]"
    assert row("optim") == "0UNSHARD[0:1] 0UNSHARD[1:2] 0F0 0BW0 0F1 0REDUCE[1:2].2 0BW1 0REDUCE[0:1]"
    assert row("optim_grads") == (
        "0UNSHARD[0:1] 0UNSHARD[1:2] 0F0 0REDUCE[1:2].2 0BW0 0REDUCE[0:1] 0F1 0REDUCE[1:2].2 0BW1 0REDUCE[0:1]"
    )
    assert row("optim", outer=2).endswith(
        "0REDUCE[1:2].2 0BW1 0REDUCE[0:1] 0HSDP_ALL_REDUCE[1:2] 0HSDP_ALL_REDUCE[0:1]"
    )
    assert row(SHARDED, ahead=W_BYTES) == (
        "0UNSHARD[0:1] 0RESHARD[0:1].2 0UNSHARD[1:2].2 0F0"
        " 0RESHARD[1:2].2 0UNSHARD[0:1].2 0REDUCE[1:2].2 0BW0"
        " 0REDUCE[0:1] 0RESHARD[0:1].2 0UNSHARD[1:2].2 0F1"
        " 0RESHARD[1:2].2 0UNSHARD[0:1].2 0REDUCE[1:2].2 0BW1"
        " 0RESHARD[0:1] 0REDUCE[0:1]"
    )
    assert row(SHARDED, "step") == (
        "0UNSHARD[0:1] 0UNSHARD[1:2] 0F0 0BW0 0F1 0RESHARD[1:2].2 0REDUCE[1:2].2 0BW1 0RESHARD[0:1] 0REDUCE[0:1]"
    )
    assert row(SHARDED, "backward", ahead=W_BYTES) == (
        "0UNSHARD[0:1] 0UNSHARD[1:2].2 0F0 0RESHARD[1:2].2 0REDUCE[1:2].2 0BW0"
        " 0REDUCE[0:1] 0UNSHARD[1:2].2 0F1 0RESHARD[1:2].2 0REDUCE[1:2].2 0BW1 0RESHARD[0:1] 0REDUCE[0:1]"
    )


def test_an_unread_backward_frees_early():
    """The embedding's backward reads no weights: it is gathered once a microbatch, and freed behind its
    forward."""
    plan, costs = lowered("1f1b", 1, 3)
    stages = model(plan.placement, 2, ends=1)
    residency = asked(SHARDED, "memory", 1)
    (walk,) = walks(add_residency(plan, stages, residency, costs), stages, residency)
    assert walk.moves.gathers.calls == 3 * (1 + 2 + 2 + 1)  # embedding, two layers, head


@pytest.mark.parametrize("policy", ["memory", "budget"])
def test_prefetch_moves_gathers_and_changes_no_count(policy):
    plan, costs = lowered("zbv", 4, 8)
    stages = model(plan.placement, 4, ends=2)
    found = []
    for ahead in (1, 3 * W_BYTES, 8 * W_BYTES):
        residency = asked(SHARDED, policy, 4, ahead=ahead)
        planned = add_residency(plan, stages, residency, costs)
        found.append([walk.moves.gathers for walk in walks(planned, stages, residency)])
    assert found[0] == found[1] == found[2]


def test_one_tied_unit_of_two_chunks_has_one_residency():
    """On a V the last chunk's head reads the first chunk's embedding, which is held once, and summed with
    what both chunks have added."""
    plan, costs = lowered("zbv", 2, 4)
    stages = model(plan.placement, 1, tied=True)
    step = asked(SHARDED, "step", 2)
    walk = walks(add_residency(plan, stages, step, costs), stages, step)[0]
    assert walk.moves.gathers.calls == 2 + 2  # a layer a chunk, head, embedding
    units = RankUnits(0, plan.placement, stages)
    (embedding,) = (number for number, unit in enumerate(units.units) if unit.name == "embedding")
    assert walk.groups[embedding] == ({0: 4, 3: 4},)
    memory = asked(SHARDED, "memory", 2)
    walk = walks(add_residency(plan, stages, memory, costs), stages, memory)[0]
    assert len(walk.groups[embedding]) == 8


def test_a_stored_grouping_is_kept_whatever_the_schedule_and_the_budget():
    plan, costs = lowered("1f1b", 2, 6)
    stages = model(plan.placement, 2)
    first = add_residency(plan, stages, asked(SHARDED, "budget", 2, budget=100), costs)
    groups = first.residency.grouping
    assert {len(one) for stage in groups for one in stage} - {1, 6}, (
        "the budget keeps some gradients, not all"
    )
    for name, budget in (("zb-h1", 100), ("gpipe", 2_000)):
        other, _ = lowered(name, 2, 6)
        residency = asked(SHARDED, "budget", 2, budget=budget)
        freely = add_residency(other, stages, residency, costs)
        assert freely.residency.grouping != groups
        assert add_residency(other, stages, residency, costs, grouping=groups).residency.grouping == groups
    with pytest.raises(PlanError, match="7 reductions in a row, policy memory has 18"):
        add_residency(plan, stages, asked(SHARDED, "memory", 2), costs, grouping=groups)


def test_what_a_pipeline_cannot_have_is_refused():
    plan, costs = lowered("1f1b", 2, 4)
    stages = model(plan.placement, 2)
    with pytest.raises(PlanError, match="use policy budget"):
        add_residency(plan, stages, asked(SHARDED, "backward", 2), costs)
    with pytest.raises(PlanError, match="units of 1 stages, the plan has 2"):
        add_residency(plan, stages[:1], asked(SHARDED, "memory", 2), costs)


def test_a_limit_in_bytes_is_kept_to_and_used():
    """Room is what activations leave: the plateau of 1F1B keeps less than its ends."""
    plan, _ = lowered("1f1b", 4, 12)
    costs = CostModel.of_ranks(plan.placement, activation=[100.0])
    stages = [layers(stage, 8) for stage in range(4)]
    gathers = []
    for limit in (24 + 400 + 80, 24 + 400 + 130, 24 + 400 + 400):
        residency = asked(SHARDED, "budget", 4, limit=(float(limit),) * 4, budget=10_000)
        planned = add_residency(plan, stages, residency, costs)
        found = walks(planned, stages, residency, costs)
        assert all(24 + walk.peak.total <= limit for walk in found)
        gathers.append([walk.moves.gathers.calls for walk in found])
    assert gathers[0][0] > gathers[1][0] > gathers[2][0] == 8
    assert gathers[0][1:] == [8] * 3  # later ranks hold fewer activations


def test_post_validated_rows_reduce_before_they_decide():
    plan, costs = lowered("zbv", 4, 8)
    plan = post_validation(plan, costs)
    stages = model(plan.placement, 2, outer=2)
    planned = add_residency(plan, stages, asked(SHARDED, "memory", 4), costs)
    for row in planned.rows:
        texts = [text.lstrip("0123456789").partition("[")[0] for text in row_texts(row)]
        validate, step = texts.index("VALIDATE"), texts.index("STEP")
        assert "REDUCE" not in texts[:validate]
        assert "UNSHARD" in texts[:validate] or validate == 0 or not any(op[0] == F for op in row[:validate])
        reductions = [place for place, text in enumerate(texts) if text in ("REDUCE", "HSDP_ALL_REDUCE")]
        states = [place for place, text in enumerate(texts) if text.startswith("SEND_STATE")]
        assert max(reductions) < step
        assert max(reductions) < max(states) or max(states) < validate


def test_large_plan_is_fast_enough_to_be_made_at_start_up():
    """p 8, m 64, 20 units a stage: 50 thousand operations. No time is asserted: the suite's own limit is."""
    plan, costs = lowered("zb-1p", 8, 64)
    stages = [layers(stage, 20) for stage in range(8)]
    planned = add_residency(plan, stages, asked(SHARDED, "memory", 8), costs)
    assert planned.num_ops > 50_000
    assert B in {op[0] for op in planned.rows[0]}


def test_units_of_one_slot_are_gathered_one_behind_the_other():
    """Without slots two units are gathered ahead where there is room for them; the third waits for the first's slot."""
    plan, costs = lowered("1f1b", 1, 2)
    stages = (layers(0, 4, ways=2),)
    turns = (dataclasses.replace(stages[0], units=tuple(
        dataclasses.replace(unit, slot=place % 2) for place, unit in enumerate(stages[0].units)
    )),)  # fmt: skip
    residency = dataclasses.replace(asked(SHARDED, "memory", 1), ahead=10 * W_BYTES)
    free, taken = (add_residency(plan, its, residency, costs) for its in (stages, turns))
    most = [walks(made, its, residency)[0].most.gathered for made, its in ((free, stages), (taken, turns))]
    assert most == [4 * W_BYTES, 2 * W_BYTES]
    with pytest.raises(PlanError, match=r"is gathered into slot 0, which another unit still uses"):
        verify(free, costs, stages=turns, residency=residency)


def test_units_of_one_slot_that_are_needed_together_are_refused():
    plan, costs = lowered("1f1b", 1, 2)
    stage = layers(0, 2, ways=2)
    units = tuple(dataclasses.replace(unit, slot=0) for unit in stage.units)
    together = dataclasses.replace(stage, units=units, forward=((0, 1),))
    with pytest.raises(
        PlanError, match=r"--fsdp-double-buffer: unit '.*' needs its slot while unit '.*' still uses"
    ):
        add_residency(plan, (together,), asked(SHARDED, "memory", 1), costs)
