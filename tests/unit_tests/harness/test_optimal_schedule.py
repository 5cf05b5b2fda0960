"""The proved optimum against every order there is, against a search without HiGHS, and against closed forms."""

import itertools
import math
import random

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel, peak_activation
from megatron.core.pipeline_parallel.plan.generators.linear import one_f_one_b
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, PlanError, W, compute
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.optimal_schedule import optimum
from tests.harness.schedules import verified_peaks


def random_costs(placement, rng, example):
    """Stages that differ in all; whose W's are alike; whose W's take no time; one stage of which is empty."""
    mode = example % 4
    number = placement.num_stages

    def draw(low):
        return [rng.uniform(low, 2) for _ in range(number)]

    f, b, w, activation = draw(0.2), draw(0.2), draw(0), draw(0.5)
    held = [size * rng.choice((0, 0.3, 1)) for size in activation]
    if mode == 1:
        w, held = [rng.uniform(0, 2)] * number, [rng.choice((0, 0.3, 0.5))] * number
    elif mode == 2:
        w = [0.0] * number
    elif mode == 3:
        empty = rng.randrange(number)
        for figures in (f, b, w, activation, held):
            figures[empty] = 0.0
    comm = rng.choice((0, rng.uniform(0, 1)))
    return CostModel(tuple(f), tuple(b), tuple(w), tuple(activation), tuple(held), comm)


def random_limits(placement, costs, rng):
    """Between the least and what two microbatches take; sometimes none."""
    if rng.random() < 0.25:
        return None
    least = [0.0] * placement.num_ranks
    for stage, rank in enumerate(placement.ranks()):
        least[rank] += costs.activation[stage]
    return tuple(one * rng.uniform(1, 2.2) for one in least)


def orders_of_rank(placement, rank, total, fused):
    """Every order of a rank's computations that no dependency within the rank forbids."""
    queues = [(placement.stage_of(rank, c), k) for c in range(placement.num_chunks) for k in (F, B, W)]
    queues = [
        (stage, BW if fused and kind == B else kind) for stage, kind in queues if not (fused and kind == W)
    ]
    back = BW if fused else B
    done = dict.fromkeys(queues, 0)

    def sources(stage, kind):
        mine = [placement.stage_of(rank, c) for c in range(placement.num_chunks)]
        chunk = mine.index(stage)
        if kind == W:
            yield (stage, B)
        elif kind == F:
            if chunk:
                yield (mine[chunk - 1], F)
        else:
            yield (stage, F)
            if chunk + 1 < len(mine):
                yield (mine[chunk + 1], back)

    def extend(row):
        if len(row) == total * len(queues):
            yield tuple(row)
            return
        for queue in queues:
            at = done[queue]
            if at < total and all(done[source] > at for source in sources(*queue)):
                done[queue] += 1
                yield from extend([*row, compute(queue[1], queue[0], at)])
                done[queue] -= 1

    return list(extend([]))


def cheapest_of_all(placement, total, costs, limits, fused):
    """Least cost over every combination of orders, by the simulator; combinations that deadlock are none."""
    rows = [
        [
            row
            for row in orders_of_rank(placement, rank, total, fused)
            if limits is None or peak_activation(rank, row, costs) <= limits[rank]
        ]
        for rank in range(placement.num_ranks)
    ]
    best = math.inf
    for combination in itertools.product(*rows):
        try:
            best = min(best, simulate(Plan("any", placement, total, combination), costs).cost)
        except PlanError:
            continue
    return best


@pytest.mark.parametrize(
    ("placement", "total", "fused", "examples"),
    [
        (Placement(LINEAR, 1), 3, False, 3),
        (Placement(LINEAR, 2), 2, False, 15),
        (Placement(LINEAR, 2), 3, False, 4),
        (Placement(LINEAR, 3), 2, False, 8),
        (Placement(LINEAR, 2), 4, True, 4),
        (Placement(LINEAR, 3), 3, True, 8),
        (Placement(V_SHAPED, 2, 2), 1, False, 6),
        (Placement(V_SHAPED, 2, 2), 2, True, 6),
        (Placement(LOOPED, 2, 2), 2, True, 6),
        (Placement(V_SHAPED, 1, 2), 2, False, 4),
    ],
    ids=str,
)
def test_no_order_at_all_is_cheaper(placement, total, fused, examples):
    rng = random.Random(f"{placement} {total} {fused}")
    for example in range(examples):
        costs = random_costs(placement, rng, example)
        limits = random_limits(placement, costs, rng)
        found = optimum(placement, total, costs, limits, fused)
        by_hand = cheapest_of_all(placement, total, costs, limits, fused)
        assert found.cost == pytest.approx(by_hand, rel=1e-6), (costs, limits)


def exists_below(placement, total, costs, limits, bound):
    """Whether an order costs less: computations are put down by increasing start, as early as what is down permits,
    and left where the rank's remaining work alone would cost too much."""
    last, ranks = placement.num_stages - 1, placement.ranks()
    durations = costs.durations()
    kinds = (F, B, W)
    ends = {}
    done = {(stage, kind): 0 for stage in range(last + 1) for kind in kinds}
    firsts = [sum(costs.f[:rank]) + rank * costs.comm for rank in range(placement.num_ranks)]
    clock, held = list(firsts), [0.0] * placement.num_ranks
    left = [total * one for one in costs.rank_times(placement)]

    def ready(stage, kind, at):
        """When its input is there, or None."""
        if kind == F and stage == 0:
            return 0.0
        source = (stage, B) if kind == W else (stage - 1, F) if kind == F else (stage + 1, B)
        source = (stage, F) if kind == B and stage == last else source
        if (*source, at) not in ends or (kind == B and (stage, F, at) not in ends):
            return None
        return ends[(*source, at)] + (costs.comm if ranks[source[0]] != ranks[stage] else 0.0)

    def extend(before, missing):
        if not missing:
            return True
        for (stage, kind), at in list(done.items()):
            rank = ranks[stage]
            there = ready(stage, kind, at) if at < total else None
            if there is None:
                continue
            start, takes = max(clock[rank], there), durations[kind][stage]
            change = costs.activation[stage] if kind == F else -costs.released(kind, stage)
            fits = kind != F or limits is None or held[rank] + change <= limits[rank]
            if start < before - 1e-12 or start + left[rank] - firsts[rank] >= bound or not fits:
                continue
            was = clock[rank], held[rank], left[rank]
            clock[rank], held[rank], left[rank] = start + takes, held[rank] + change, left[rank] - takes
            ends[stage, kind, at] = start + takes
            done[stage, kind] += 1
            if extend(start, missing - 1):
                return True
            done[stage, kind] -= 1
            del ends[stage, kind, at]
            clock[rank], held[rank], left[rank] = was
        return False

    return extend(0.0, 3 * total * (last + 1))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("placement", "total", "examples"),
    [
        (Placement(LINEAR, 2), 4, 4),
        (Placement(LINEAR, 3), 3, 4),
        (Placement(V_SHAPED, 2, 2), 2, 4),
        (Placement(LOOPED, 2, 2), 2, 2),
    ],
    ids=str,
)
def test_a_search_without_the_solver_finds_nothing_cheaper(placement, total, examples):
    rng = random.Random(f"{placement} {total}")
    for example in range(examples):
        costs = random_costs(placement, rng, example)
        limits = random_limits(placement, costs, rng)
        found = optimum(placement, total, costs, limits)
        assert exists_below(placement, total, costs, limits, found.cost * (1 + 2e-6)), (costs, limits)
        assert not exists_below(placement, total, costs, limits, found.cost * (1 - 2e-6)), (costs, limits)


def whole_limits(p, number):
    return (float(number),) * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 4), (4, 7)])
def test_closed_forms_of_linear_schedules(p, m):
    """F = B = W: 1F1B's (p-1)(F+B+W) bubble when fused, ZB-1P's (p-1)(F+B-W) at the same memory, none at 2p-1
    (arXiv 2401.10241, table 1); for m <= p no memory helps: (m+p-1)(F+B) + W."""
    placement = Placement(LINEAR, p)
    costs = CostModel.of_ranks(placement)
    assert optimum(placement, m, costs, whole_limits(p, p), fused=True).cost == 3 * (m + p - 1)
    at_p = 2 * (m + p - 1) + 1 if m <= p else 3 * m + p - 1
    assert optimum(placement, m, costs, whole_limits(p, p)).cost == at_p
    for limits in (whole_limits(p, 2 * p - 1), None):
        least = 2 * (m + p - 1) + 1 if m < 2 * p - 1 else 0
        assert optimum(placement, m, costs, limits).cost == max(3 * m, least)


@pytest.mark.parametrize(
    ("f", "b", "w", "comm"), [(1, 1, 1, 0), (1, 2, 1, 0), (1, 1, 1, 0.5), (1, 1, 2, 0.5)]
)
def test_least_memory_without_bubble(f, b, w, comm):
    """((p-1)(B + 2Tc) + pF) / F activations, where F is at most B and W (with W < F that is too few: 27, not 25, at
    p = 2, m = 5, F = B = 2, W = 1)."""
    m = 9
    for p in (2, 3):
        placement = Placement(LINEAR, p)
        costs = CostModel.of_ranks(placement, time_f=(f,), time_b=(b,), time_w=(w,), comm=comm)
        enough = ((p - 1) * (b + 2 * comm) + p * f) // f
        work = m * (f + b + w)
        assert optimum(placement, m, costs, whole_limits(p, enough)).cost == work
        assert optimum(placement, m, costs, whole_limits(p, enough - 1)).cost > work
    placement = Placement(LINEAR, 2)
    costs = CostModel.of_ranks(placement, time_f=(2,), time_b=(2,), time_w=(1,))
    assert [optimum(placement, 5, costs, limit).cost for limit in ((3, 3), None)] == [27, 25]


def test_the_v_has_no_bubble_in_the_memory_of_1f1b():
    """And with less memory it costs more, down to the least that there is."""
    placement, m = Placement(V_SHAPED, 2, 2), 3
    costs = CostModel.of_ranks(placement)
    found = [optimum(placement, m, costs, whole_limits(2, limit)) for limit in (2, 1.5, 1)]
    assert [one.cost for one in found] == [9, 10.5, 12.5]
    for one, limit in zip(found, (2, 1.5, 1), strict=True):
        assert max(verified_peaks(one.plan, costs)) <= limit
        assert one.cost == simulate(one.plan, costs).cost


def test_a_limit_below_one_microbatch_is_refused():
    placement = Placement(V_SHAPED, 2, 2)
    costs = CostModel.of_ranks(placement)
    with pytest.raises(PlanError, match=r"no order of rank 1 holds 0\.9 or less: one microbatch .* is 1\.0"):
        optimum(placement, 2, costs, (1.0, 0.9))
    at_least = cheapest_of_all(placement, 2, costs, (1.0, 1.0), True)
    assert optimum(placement, 2, costs, (1.0, 1.0), True).cost == at_least
    assert cheapest_of_all(placement, 2, costs, (1.0, 0.9), True) == math.inf


def test_a_start_is_checked_and_never_the_answer_where_there_is_better():
    placement, m = Placement(LINEAR, 3), 4
    costs = CostModel.of_ranks(placement)
    start = one_f_one_b(Request(3, m))
    assert (
        optimum(placement, m, costs, whole_limits(3, 3), start=start).cost == 14 < simulate(start, costs).cost
    )
    with pytest.raises(AssertionError):
        optimum(placement, m, costs, whole_limits(3, 2), start=start)


def test_running_out_of_time_is_said():
    placement = Placement(LINEAR, 4)
    costs = CostModel.of_ranks(placement)
    with pytest.raises(PlanError, match=r"no proof within 0\.0 s"):
        optimum(placement, 8, costs, whole_limits(4, 4), time_limit_s=0.0)
