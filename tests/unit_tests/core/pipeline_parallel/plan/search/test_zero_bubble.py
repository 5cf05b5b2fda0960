"""The searched schedules: right, within memory, as good as theory and never worse than what is published."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.generators.linear import one_f_one_b
from megatron.core.pipeline_parallel.plan.ir import PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES as TABLE
from megatron.core.pipeline_parallel.plan.search import initial_orders, zero_bubble
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, fits, plan_of
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from tests.harness import known_orders

SCHEDULES = {
    name: partial(zero_bubble.searched, name) for name in ("zb-1p", "zb-2p", "zbv", "v-half", "v-min")
}
LINEAR_ONES = ("zb-1p", "zb-2p")
EQUAL = (1.0, 1.0, 1.0, 0.0)
PROFILE = (18.5, 18.1, 9.3, 0.6)


def placement_of(name, p):
    kind = TABLE[name].placement
    return Placement(kind, p) if kind == LINEAR else Placement(kind, p, 2)


def costs_of(name, p, times, *, held=1.0, slow=None, head=0.0):
    """slow: a rank that takes three times as long; head: what the last stage has more, in whole stages."""
    placement = placement_of(name, p)
    chunks = placement.num_chunks
    factors = [(3.0 if rank == slow else 1.0) / chunks for rank in placement.ranks()]
    factors[-1] += head
    sizes = [1 / chunks] * placement.num_stages
    sizes[-1] += head / 2
    f, b, w = (tuple(one * factor for factor in factors) for one in times[:3])
    return CostModel(f, b, w, tuple(sizes), tuple(size * held for size in sizes), times[3])


def whole_stage(placement, costs):
    """The activation of the rank that has the most, of each stage the larger of what F leaves and what is held."""
    held = [0.0] * placement.num_ranks
    for stage, rank in enumerate(placement.ranks()):
        held[rank] += max(costs.activation[stage], costs.held_after_b[stage])
    return max(held)


def default_limit(name, p):
    """In whole stages."""
    known = {"zb-1p": p, "zb-2p": 2 * p, "zbv": p}
    return known[name] if name in known else initial_orders.v_block_peak(p, half=name == "v-half")


def check(name, p, m, costs, limits=None):
    """The lowered plan's simulation; everything that must hold for every plan is asserted."""
    plan = SCHEDULES[name](Request(p, m, costs=costs, memory_limit=limits))
    assert plan.bitwise
    assert plan.schedule == name
    simulation = simulate(lower(plan, costs), costs)
    where = (name, p, m, costs, limits)
    assert simulation.cost == pytest.approx(simulate(plan, costs).cost, rel=1e-9), (
        where
    )  # transfers cost nothing more
    placement = placement_of(name, p)
    if limits is None:
        limits = (default_limit(name, p) * whole_stage(placement, costs),) * p
        if name in ("v-half", "v-min"):
            most = 0.5 if name == "v-min" else 0.0
            limits = costs.left_by_forwards(placement, default_limit(name, p), most)
    for peak, limit in zip(simulation.peak_activation, limits, strict=True):
        assert peak <= limit * (1 + 1e-9) + 1e-9, where
    problem = OrderProblem(placement, m, costs, limits)
    assert simulation.cost >= lower_bound(problem) * (1 - 1e-9), where
    for known in known_costs(problem):
        assert simulation.cost <= known * (1 + 1e-9), where
    if name in LINEAR_ONES:
        simple = simulate(lower(one_f_one_b(Request(p, m)), costs), costs)
        if all(a <= b + 1e-9 for a, b in zip(simple.peak_activation, limits, strict=True)):
            assert simulation.cost <= simple.cost * (1 + 1e-9), where
    return simulation


def known_costs(problem):
    """Costs of the published orders that fit."""
    p = problem.placement.num_ranks
    if problem.placement.num_chunks == 1:
        orders = [
            known_orders.zb_h(problem, 1),
            known_orders.zb_h(problem, 2),
            known_orders.one_f_one_b(problem),
        ]
    else:
        orders = [initial_orders.unit_zbv(problem)]
        orders += [initial_orders.v_block(p, half=half).order(problem) for half in (True, False)]
    return [simulate(plan_of("known", problem, o), problem.costs).cost for o in orders if fits(problem, o)]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_equal_times_give_the_bubbles_of_theory(p):
    m = 3 * p
    stage = 3.0
    simple = (p - 1) * stage  # 1F1B's
    bubbles = {name: check(name, p, m, costs_of(name, p, EQUAL)).bubble_time for name in SCHEDULES}
    assert bubbles["zb-1p"] == pytest.approx(simple / 3)
    assert bubbles["zb-2p"] == pytest.approx(0)
    assert bubbles["zbv"] == pytest.approx(0)
    assert bubbles["v-half"] <= simple / 2 + 1e-9
    assert bubbles["v-min"] <= 2 * simple / 3 + 1e-9


def test_default_limits_of_the_v_are_those_of_its_blocks():
    at = {(p, half): initial_orders.v_block_peak(p, half=half) for p in (4, 8, 16) for half in (True, False)}
    assert at == {(4, True): 3, (4, False): 2, (8, True): 5, (8, False): 4, (16, True): 9, (16, False): 6}


@pytest.mark.parametrize(("m", "rate"), [(24, 0.1588), (32, 0.124), (64, 0.0661)])
def test_zb_1p_reproduces_the_papers_rate(m, rate):
    costs = costs_of("zb-1p", 8, PROFILE)
    simulation = check("zb-1p", 8, m, costs)
    assert simulation.bubble_rate == pytest.approx(rate, abs=1e-3)


def test_zb_2p_reaches_its_bound_on_profiled_times():
    costs = costs_of("zb-2p", 8, PROFILE)
    simulation = check("zb-2p", 8, 24, costs)
    problem = OrderProblem(Placement(LINEAR, 8), 24, costs, (16.0,) * 8)
    assert simulation.cost == pytest.approx(lower_bound(problem))
    assert simulation.bubble_time == pytest.approx(
        125.1
    )  # (p-1)(F+B+2Tc) + W - 2pW: the head that memory leaves


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min"])
def test_v_schedules_beat_1f1b_on_profiled_times(name):
    costs = costs_of(name, 8, PROFILE)
    simple_costs = costs_of("zb-1p", 8, PROFILE)
    simple = simulate(lower(one_f_one_b(Request(8, 24)), simple_costs), simple_costs)
    if name != "v-min":  # the one schedule that unbalanced times hurt
        assert check(name, 8, 24, costs).cost < simple.cost
    else:
        check(name, 8, 24, costs)


def test_bubble_shrinks_as_memory_grows_between_v_min_and_zbv():
    p, m = 6, 18
    costs = costs_of("zbv", p, EQUAL)
    costs_by_limit = [check("zbv", p, m, costs, (half / 2,) * p).cost for half in range(6, 13)]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(costs_by_limit))
    assert costs_by_limit[0] > costs_by_limit[3] > costs_by_limit[-1]
    assert costs_by_limit[-1] == pytest.approx(3 * m)


def test_a_limit_by_rank_is_kept_by_each():
    limits = (4.0, 8.0, 2.5, 6.0)
    costs = costs_of("zbv", 4, PROFILE, head=0.5)
    check("zbv", 4, 12, costs, limits)
    check("zb-2p", 4, 12, costs_of("zb-2p", 4, PROFILE, head=0.5), limits)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_least_memory_does_and_less_is_refused(name):
    p = 3
    costs = costs_of(name, p, EQUAL)
    check(name, p, 5, costs, (1.0, 1.0, 1.0))
    with pytest.raises(PlanError, match=f"{name}: rank 1 may hold 0.9 .* less than 1,"):
        SCHEDULES[name](Request(p, 5, costs=costs, memory_limit=(1.0, 0.9, 1.0)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_limits_in_bytes_give_the_plan_of_limits_in_units(name):
    p, m, size = 4, 6, 3 * 2**28
    costs = costs_of(name, p, PROFILE)
    in_bytes = CostModel(
        costs.f,
        costs.b,
        costs.w,
        tuple(size * one for one in costs.activation),
        tuple(size * one for one in costs.held_after_b),
        costs.comm,
    )
    plans = [
        SCHEDULES[name](Request(p, m, costs=costs, memory_limit=(2.5,) * p)),
        SCHEDULES[name](Request(p, m, costs=in_bytes, memory_limit=(2.5 * size,) * p)),
    ]
    assert plan_hash(plans[0]) == plan_hash(plans[1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_request_gives_the_same_plan(name):
    request = Request(5, 12, costs=costs_of(name, 5, PROFILE, slow=2))
    assert plan_hash(SCHEDULES[name](request)) == plan_hash(SCHEDULES[name](request))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_long_problem_costs_what_the_short_one_and_its_work_cost(name):
    p = 4
    costs = costs_of(name, p, EQUAL)
    short, long = (check(name, p, m, costs) for m in (24, 100))
    assert long.bubble_time == pytest.approx(short.bubble_time)


def test_requests_of_other_shapes_are_refused():
    with pytest.raises(PlanError, match="zb-1p has one chunk"):
        SCHEDULES["zb-1p"](Request(4, 8, num_chunks=2))
    with pytest.raises(PlanError, match="zbv has two chunks"):
        SCHEDULES["zbv"](Request(4, 8, num_chunks=3))
    with pytest.raises(PlanError, match="costs of 4 stages for a schedule of 8"):
        SCHEDULES["zbv"](Request(4, 8, costs=costs_of("zb-1p", 4, EQUAL)))


RATIOS = [
    EQUAL,
    PROFILE,
    (1.0, 1.0, 0.0, 0.0),
    (1.0, 2.0, 1.0, 0.05),
    (1.0, 1.3, 0.8, 4.0),
    (1.0, 1.0, 2.0, 0.3),
]


def sizes(p):
    return sorted({1, max(1, p // 2), max(1, p - 1), p, 2 * p, 3 * p, 8 * p})


@pytest.mark.grid
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_every_plan_is_right(data):
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    p = data.draw(st.integers(1, 7))
    m = data.draw(st.sampled_from(sizes(p)))
    costs = costs_of(
        name,
        p,
        data.draw(st.sampled_from(RATIOS)),
        held=data.draw(st.sampled_from((1.0, 0.4, 0.0, 1.3, 3.0))),
        slow=data.draw(st.sampled_from((None, 0, p - 1))),
        head=data.draw(st.sampled_from((0.0, 1.7))),
    )
    share = data.draw(st.sampled_from((None, 0.0, 0.4, 0.75, 1.0, 2.5)))
    limits = None if share is None else (max(1.0, share * p) * whole_stage(placement_of(name, p), costs),) * p
    check(name, p, m, costs, limits)


@pytest.mark.grid
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_the_least_memory_does_where_backwards_grow(data):
    """Every rank with its own limit: from the least that one microbatch needs; a little less is refused."""
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    p = data.draw(st.integers(1, 6))
    m = data.draw(st.sampled_from((1, p, 2 * p + 1, 8 * p)))
    held = data.draw(st.sampled_from((0.0, 0.4, 1.0, 1.3, 3.0)))
    costs = costs_of(name, p, data.draw(st.sampled_from(RATIOS)), held=held, head=1.7)
    problem = OrderProblem(placement_of(name, p), m, costs, (0.0,) * p)
    least = [costs.least_activation(mine) for mine in problem.stages()]
    limits = tuple(one * data.draw(st.sampled_from((1.0, 1.1, 1.7, 2.0, 3.5))) for one in least)
    check(name, p, m, costs, limits)
    rank = data.draw(st.integers(0, p - 1))
    less = tuple(one * (0.99 if at == rank else 1.0) for at, one in enumerate(least))
    with pytest.raises(PlanError, match=f"{name}: rank {rank} may hold .* one microbatch of its"):
        SCHEDULES[name](Request(p, m, costs=costs, memory_limit=less))


# Every schedule of the registry that is no search, for `auto` to choose from beside one search a placement.
AUTO = ("zb-2p", "zbv", *(name for name, row in TABLE.items() if not row.searched))
# What differs between stages or in what is held.
SHAPES = ("even", "slow", "head", "freed")
# Limits by share of p whole stages; None: 1F1B's own peaks, rank by rank.
LIMITS = (0.0, 0.3, 0.5, 0.8, 1.0, 1.6, 2.5, None)
# Up to this P every ratio meets every shape at every M.
CROSSED = 4


def shape_of(shape, p):
    """The words of `costs_of`."""
    return {"even": {}, "slow": {"slow": p // 2}, "head": {"head": 0.7, "held": 1.3}, "freed": {"held": 0.4}}[
        shape
    ]


def grid_of(p):
    """(m, times, shape) for the schedules' own limits, and (m, times, shape, limit) for the choice under one limit.

    Beyond CROSSED, each M of a P meets one of the 24 combinations of ratio and shape, the next M the seventh from
    there, and the next P the next one: over all P's each M meets every combination, some at small and some at large P.
    Limits go round alike, with steps of their own.
    """
    combinations = list(itertools.product(RATIOS, SHAPES))
    own, shared = [], []
    for place, m in enumerate(sizes(p)):
        if p <= CROSSED:
            own += [(m, *one) for one in combinations]
        else:
            own.append((m, *combinations[(p + 7 * place) % len(combinations)]))
        limit = LIMITS[(3 * p + place) % len(LIMITS)]
        shared.append((m, *combinations[(5 * p + 11 * place) % len(combinations)], limit))
    return own, shared


def cost_of_1f1b(p, m, times, shape):
    costs = costs_of("1f1b", p, times, **shape_of(shape, p))
    return simulate(lower(one_f_one_b(Request(p, m)), costs), costs)


def is_v_as_good_in_theory(p, times):
    """Transfers, of which the V has twice as many, are shorter than what it saves."""
    f, b, _, comm = times
    return 4 * (p - 1) * comm < (p - 1) * min(f, b)


def check_own(p, m, times, shape):
    """Every searched schedule under the limit that its name says.

    v-min has a third of 1F1B's memory: that costs a longer period where times are unequal, whatever the order (proved
    without W in test_search_optimality), so it is held to 1F1B where they are equal only.
    """
    simple = cost_of_1f1b(p, m, times, shape)
    for name in SCHEDULES:
        simulation = check(name, p, m, costs_of(name, p, times, **shape_of(shape, p)))
        where = (name, p, m, times, shape, simulation.cost, simple.cost)
        equal = times == EQUAL and shape == "even"
        if name in LINEAR_ONES or ((name != "v-min" or equal) and is_v_as_good_in_theory(p, times)):
            assert simulation.cost <= simple.cost * (1 + 1e-9), where
        if equal:
            check_theory(name, p, m, simulation)


def check_theory(name, p, m, simulation):
    """With equal times, whatever the number of microbatches."""
    least = (m + p - 1) * 2 + 1  # of few microbatches: nothing can cover the first one's way
    if name == "zb-1p":
        assert simulation.cost == pytest.approx(least if m <= p else 3 * m + p - 1), (p, m)
    elif name == "zb-2p":
        assert simulation.cost == pytest.approx(max(least, 3 * m) if m < 2 * p else 3 * m), (p, m)
    elif m >= 2 * p:
        bubbles = {"zbv": 0.0, "v-half": (p - 1) * 3 / 2, "v-min": (p - 1) * 2}
        assert simulation.bubble_time <= bubbles[name] + 1e-9, (name, p, m)


def check_shared(p, m, times, shape, share):
    """All schedules under one limit, and the choice among them."""
    simple = cost_of_1f1b(p, m, times, shape)
    words = shape_of(shape, p)
    whole = simple.costs.whole_stage(placement_of("1f1b", p))
    if share is None:
        limits = simple.peak_activation
        on_v = costs_of("zbv", p, times, **words)
        least = [on_v.least_activation((rank, 2 * p - 1 - rank)) for rank in range(p)]
        limits = tuple(map(max, limits, least))
    else:
        limits = (max(1.0, share * p) * whole,) * p
    where = (p, m, times, shape, share)
    specs, costs = [], {}
    for name in AUTO:
        spec = ScheduleSpec(name, TABLE[name].placed(p), costs_of(name, p, times, **words), limits=limits)
        specs.append(spec)
        try:
            plan = plan_for(spec, m, PlanPurpose.ORDER)
            simulation = simulate(lower(plan, spec.costs), spec.costs)
        except PlanError:
            if name in (*SCHEDULES, "gpipe", "1f1b", "zb-h1", "zb-h2"):
                raise
            continue
        assert plan.bitwise, (name, where)
        peaks = zip(simulation.peak_activation, limits, strict=True)
        if all(peak <= limit + 1e-9 * max(1.0, limit) for peak, limit in peaks):
            costs[name] = simulation.cost
    assert {"zb-2p", "zbv"} <= set(costs), where  # searches fit any limit that anything fits
    best = costs[fastest(specs, m).schedule]
    assert best <= min(costs.values()) * (1 + 1e-9), (where, costs)
    for name in ("1f1b", "zb-h1", "zb-h2"):
        if name in costs:
            assert costs["zb-2p"] <= costs[name] * (1 + 1e-9), (where, costs)
    if "1f1b-v" in costs:
        assert costs["zbv"] <= costs["1f1b-v"] * (1 + 1e-9), (where, costs)
    if "1f1b" in costs and share is not None and is_v_as_good_in_theory(p, times):
        assert costs["zbv"] <= costs["1f1b"] * (1 + 1e-9), (where, costs)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("p", range(2, 34))
def test_the_whole_grid(p):
    """Thinned beyond P = 4 by the rule of `grid_of`."""
    own, shared = grid_of(p)
    for point in own:
        check_own(p, *point)
    for point in shared:
        check_shared(p, *point)
