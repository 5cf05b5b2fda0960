"""The automaton of a rank's row: held to a naive walk, which shares nothing with it; lanes as rows of its table; and
the clocks of searches, held to it."""

import copy
import itertools
import random

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LANES, LaneCosts, LaneRow, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk, walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import (
    HSDP_ALL_REDUCE,
    NAMES,
    PEERS,
    REDUCE,
    RESHARD,
    UNSHARD,
    Kind,
    PlanError,
    op_text,
)
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, order_of, plan_of
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.timeline import execute
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.naive_walk import Naive, Settings, Stage, Unit
from tests.harness.unit_stages import model

FIXED = [name for name, row in SCHEDULES.items() if not row.searched]


def drawn(seed):
    """(plan, stages, residency, costs, what the wire costs): each strategy, policy and order comes up."""
    rng = random.Random(seed)
    name, p = rng.choice(FIXED), rng.choice([1, 2, 3])
    plan = build_plan(name, Request(max(p, 2), max(4, SCHEDULES[name].least_microbatches(max(p, 2)))))
    times = {f"time_{kind}": [rng.choice([1.0, 1.5, 3.0])] for kind in "fbw"}
    held = {"activation": [rng.choice([0.0, 40.0])], "memory_after_b": rng.choice([0.5, 1.3])}
    costs = CostModel.of_ranks(plan.placement, **times, comm=rng.choice([0.0, 0.25]), **held)
    plan = lower(plan, costs)
    words = {"tied": rng.random() < 0.5, "group": rng.choice([1, 2]), "ends": rng.choice([1, 3])}
    outer = rng.choice([1, 2])
    words |= {"ways": rng.choice([2, 4]), "outer": outer, "outer_optimizer": outer > 1 and rng.random() < 0.5}
    stages = model(plan.placement, rng.choice([1, 2, 3]), **words)
    policy = rng.choice(["memory", "step", "budget", "limit"])
    bounds = {"policy": policy}
    ranks = plan.placement.num_ranks
    if policy == "budget":
        bounds["budget"] = (rng.choice([0, 40, 90]),) * ranks
    if policy == "limit":
        bounds = {"policy": "budget", "limit": (rng.choice([600.0, 900.0, 3000.0]),) * ranks}
    residency = Residency(
        rng.choice(["no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params"]),
        overlap_reduce=rng.random() < 0.8,
        **bounds,
    )
    wire = LaneCosts(latency=rng.choice([0.0, 0.125]), bandwidth=rng.choice([8.0, 40.0, 150.0]))
    return plan, stages, residency, costs, wire


def made(seed):
    """As `drawn`, with the plan's gathers and reductions; the next that fits."""
    for one in itertools.count(1000 * seed):
        plan, stages, residency, costs, wire = drawn(one)
        try:
            return add_residency(plan, stages, residency, costs), stages, residency, costs, wire
        except PlanError:
            continue


def naively(plan, rank, stages, residency, costs, wire, starts=None):
    """What the naive walk finds, by what the planner was given."""
    units = RankUnits(rank, plan.placement, stages)
    by_name = {unit.name: unit for stage in stages for unit in stage.units}

    def seconds(kind, name, first):
        if kind == "UNSHARD":
            return wire.unshard(by_name[name], first=first)
        reduces = kind == "REDUCE"
        return wire.reduce(by_name[name], residency) if reduces else wire.outer_sum(by_name[name])

    its = {}
    for stage in units.of:
        described = [
            Unit(
                unit.name,
                unit.weight_bytes,
                unit.grad_bytes,
                unit.extra_grad_bytes,
                unit.backward_reads,
                unit.begins_with_lookup,
                {"F": unit.f, "B": unit.b, "W": unit.w, "BW": unit.b + unit.w},
            )
            for unit in stages[stage].units
        ]
        its[stage] = Stage(described, stages[stage].forward, stages[stage].backward)
    asked = Settings(
        residency.weights_sharded,
        residency.grads_sharded,
        {NAMES[kind]: (lane.name, lane.most_under_way) for lane in LANES.values() for kind in lane.kinds},
        costs.activation,
        costs.held_after_b,
        seconds,
        {name: costs.durations()[Kind[name]] for name in ("F", "B", "W", "BW")},
        starts,
        not residency.overlap_reduce,
        plan.forward_only,
    )
    return Naive([op_text(op) for op in plan.rows[rank]], its, asked).walk()


def walked(plan, stages, residency, costs, wire):
    """Every rank's automaton, run with the others on the clock, and the times of the plan."""
    lanes = Lanes(stages, residency, wire)
    walks = [
        RowWalk(
            row,
            RankUnits(rank, plan.placement, stages),
            lanes,
            costs.durations(),
            costs=costs,
            forward_only=plan.forward_only,
            every=True,
        )
        for rank, row in enumerate(plan.rows)
    ]
    return walks, execute(plan, costs, walks=walks)


def check(plan, stages, residency, costs, wire):
    """The automaton's boundaries, bytes and times, are those of the naive walk."""
    walks, timeline = walked(plan, stages, residency, costs, wire)
    for rank, walk in enumerate(walks):
        expected = naively(plan, rank, stages, residency, costs, wire, timeline.starts[rank])
        assert [tuple(one) for one in walk.boundaries] == [one[:6] for one in expected]
        *times, _ = walk.clocks
        assert times == pytest.approx([one[6] for one in expected[:-1]], rel=1e-9)
        assert walk.peak.total == max(sum(one[2:6]) for one in expected)
    return walks


@pytest.mark.parametrize("seed", range(40))
def test_bytes_and_times_at_every_boundary_are_those_of_a_naive_walk(seed):
    check(*made(seed))


@pytest.mark.parametrize("most", [1, 3])
def test_how_many_are_under_way_stands_in_one_place(monkeypatch, most):
    """Rows within a limit are made for it, proved by it, timed by it; the engine: tests/parity/test_under_way.py."""
    before = [walk_of_rank(0, *made(seed)[:4]).most.under_way for seed in range(12)]
    monkeypatch.setitem(LANES, PEERS, LANES[PEERS]._replace(most_under_way=most))
    after = []
    for seed in range(12):
        plan, stages, residency, costs, wire = made(seed)
        verify(plan, costs, stages=stages, residency=residency)
        check(plan, stages, residency, costs, wire)
        after.append(walk_of_rank(0, plan, stages, residency, costs).most.under_way)
    assert sum(after) != sum(before)
    assert all((one <= other) == (most < 2) or one == other for one, other in zip(after, before, strict=True))


def walk_of_rank(rank, plan, stages, residency, costs):
    return walk_row(plan.rows[rank], RankUnits(rank, plan.placement, stages), residency, costs)


def test_copies_to_the_host_are_a_second_row_of_the_table(monkeypatch):
    """Weights come from the host, over a wire of its own and one gradient sum at a time: nothing but the table says
    so. Gathers and reductions run beside each other then, each at its own pace."""
    host = LaneRow("host", (UNSHARD, RESHARD), 1, LaneCosts(bandwidth=100.0))
    compared = []
    for seed in range(12):
        plan, stages, residency, costs, wire = made(seed)
        if not residency.weights_sharded:
            continue
        compared.append(
            (simulate(plan, costs, Lanes(stages, residency, wire)), (plan, stages, residency, costs, wire))
        )
    assert len(compared) > 2
    peers = LANES[PEERS]._replace(kinds=(REDUCE, HSDP_ALL_REDUCE))
    monkeypatch.setitem(LANES, PEERS, peers)
    monkeypatch.setitem(LANES, "host", host)
    for before, (plan, stages, residency, costs, wire) in compared:
        found = simulate(plan, costs, Lanes(stages, residency, wire))
        walks, _ = walked(plan, stages, residency, costs, wire)
        for rank, walk in enumerate(walks):
            own = walk.times.items()
            gathers = [at for place, at in own if plan.rows[rank][place][0] == UNSHARD]
            sums = [at for place, at in own if plan.rows[rank][place][0] in peers.kinds]
            for one in (gathers, sums):  # each wire does one thing at a time
                assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sorted(one)))
            assert walk.busy == found.timeline.lanes[rank].busy != before.timeline.lanes[rank].busy
        assert found.timeline.ends == walked(plan, stages, residency, costs, wire)[1].ends


def test_a_state_is_copied_and_gone_back_to():
    plan, stages, residency, costs, wire = made(3)
    row, units = plan.rows[0], RankUnits(0, plan.placement, stages)
    lanes = Lanes(stages, residency, wire)
    walk, states, clock = RowWalk(row, units, lanes, costs.durations(), costs=costs, every=True), [], 0.0
    for place, op in enumerate(row):
        states.append((copy.deepcopy(walk), clock))
        clock = walk.do(place, op, clock)
    walk.end(clock)
    for start in (0, len(row) // 3, len(row) - 1):
        again, clock = states[start]
        for place in range(start, len(row)):
            clock = again.do(place, row[place], clock)
        again.end(clock)
        assert (again.boundaries, again.clocks, again.times) == (walk.boundaries, walk.clocks, walk.times)
        assert (again.moves, again.groups, again.exposed) == (walk.moves, walk.groups, walk.exposed)


# Clocks of searches -------------------------------------------------------------------------------------


def test_the_lanes_clock_comes_to_the_times_of_the_automaton():
    """`quick` passes over computations of which no lane asks anything; 300 seeded rows."""
    rows = 0
    for seed in itertools.count(100):
        plan, stages, residency, costs, wire = made(seed)
        if seed % 4 == 0:
            plan, stages, residency, costs, wire = drawn(seed)
            decided = post_validation(plan, costs)
            try:
                plan = add_residency(decided, stages, residency, costs)
            except PlanError:
                continue
        quick = execute(plan, costs, Lanes(stages, residency, wire))
        walks, slow = walked(plan, stages, residency, costs, wire)
        assert (quick.starts, quick.ends) == (slow.starts, slow.ends)
        for lane, walk in zip(quick.lanes, walks, strict=True):
            assert (lane.free, lane.busy, lane.exposed) == (walk.free, walk.busy, walk.exposed)
        rows += len(walks)
        if rows >= 300:
            return


def test_the_clock_of_orders_comes_to_the_times_of_the_timeline():
    """`search/clock.py` times orders for searches by code; 300 seeded rows, without lanes."""
    rows = 0
    for seed in itertools.count():
        rng = random.Random(seed)
        name, p = rng.choice(FIXED), rng.choice([2, 3, 4])
        plan = build_plan(name, Request(p, max(rng.choice([4, 6]), SCHEDULES[name].least_microbatches(p))))
        times = {f"time_{kind}": [rng.uniform(0.5, 2.0) for _ in range(p)] for kind in "fbw"}
        costs = CostModel.of_ranks(plan.placement, **times, comm=rng.uniform(0, 0.5))
        problem = OrderProblem(plan.placement, plan.num_microbatches, costs, (float("inf"),) * p)
        order = order_of(plan)
        found, timed = Clock(problem).times(order), execute(plan_of(name, problem, order), costs)
        assert not timed.stopped
        for rank in range(p):
            assert found.starts[rank] == pytest.approx(timed.starts[rank], rel=1e-12)
        rows += p
        if rows >= 300:
            return
