"""Predictions of a step: the tables of the facts, and a run of the rule, collective by collective."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp.reshard_plan import Keep, UnitPolicy
from megatron.core.distributed.custom_fsdp.traffic import (
    UnitSize,
    default_bound,
    demand_order,
    gathers_of,
    peak_gathered,
    persistent_bytes,
    predict_step,
    run_gathers,
)
from megatron.core.distributed.sharding import ShardPlace, sharding_of
from megatron.core.distributed.traffic import Traffic
from megatron.core.traffic_counter import Moved

PARAMETERS = 3_421_696
LAYER, EMBEDDING = 789_504, 263_680
# The model of facts 4.2: four layers and one unit of all else, in fp32.
FIVE = [UnitSize("rest", 4 * EMBEDDING, 4 * EMBEDDING, EMBEDDING)]
FIVE += [UnitSize(f"layer {i}", 4 * LAYER, 4 * LAYER, LAYER) for i in range(4)]

unit_lists = st.lists(
    st.tuples(st.integers(1, 50), st.booleans(), st.booleans()), min_size=1, max_size=8
).map(lambda rows: [UnitSize(f"u{i}", 2 * n, 4 * n * t, n, reads) for i, (n, reads, t) in enumerate(rows)])


def step(strategy: str, ga: int, units=FIVE, inner: int = 2, **kwargs) -> Traffic:
    return predict_step(units, sharding_of(strategy), inner_size=inner, num_microbatches=ga, **kwargs)


def gpt(layers: int = 6) -> list[UnitSize]:
    """Embedding, layers, head, in bf16 with gradients in fp32."""
    sizes = [
        ("embedding", 500, False),
        *((f"layer {i}", 300, True) for i in range(layers)),
        ("head", 450, True),
    ]
    return [UnitSize(name, 2 * n, 4 * n, n, reads) for name, n, reads in sizes]


def test_confirmed_counts():
    """Facts 4.2: calls and bytes per parameter of a step at DP 2, GA 2."""
    assert sum(unit.numel for unit in FIVE) == PARAMETERS
    whole = 4 * PARAMETERS
    assert step("no_shard", 2) == Traffic(all_reduce=Moved(5, whole))
    assert step("optim", 2) == Traffic(all_gather=Moved(5, whole), reduce_scatter=Moved(5, whole))
    assert step("optim_grads", 2) == Traffic(all_gather=Moved(5, whole), reduce_scatter=Moved(10, 2 * whole))
    assert step("optim_grads_params", 2).reduce_scatter == Moved(10, 2 * whole)


@pytest.mark.parametrize("ga", [1, 2, 4])
def test_sharded_weights_are_gathered_twice_but_for_the_ends(ga):
    units = gpt()
    n = len(units)
    moved = step("optim_grads_params", ga, units).all_gather
    assert moved.calls == ga * (2 * n - 2)
    assert moved.payload_bytes == ga * 2 * (500 + 2 * 6 * 300 + 450)
    # Facts 4.2's table, all in units: never more.
    assert step("optim_grads_params", ga).all_gather.calls == ga * (2 * 5 - 1) <= 2 * ga * 5


def test_example_volume():
    """Facts 4.2: GB sent by a rank, 8.03e9 parameters in bf16 with fp32 gradients, N 8, GA 1, 4, 16."""
    units = [UnitSize(f"u{i}", 2 * 1_003_750, 4 * 1_003_750, 1_003_750) for i in range(8000)]
    table = {
        "no_shard": (56.2, 56.2, 56.2),
        "optim": (42.2, 42.2, 42.2),
        "optim_grads": (42.2, 126.5, 463.7),
        "optim_grads_params": (56.2, 224.8, 899.4),
    }
    for strategy, row in table.items():
        for ga, printed in zip((1, 4, 16), row, strict=True):
            moved = step(strategy, ga, units, inner=8)
            payloads = (moved.all_gather, moved.reduce_scatter, moved.all_reduce, moved.all_reduce)
            # In rings: an all-reduce goes round twice.
            sent = sum(one.payload_bytes for one in payloads) * 7 / 8 / 1e9
            # One unit of 8000 is gathered once: below the printed digit.
            assert sent == pytest.approx(printed, abs=0.05 + 0.003 * ga)


def test_policies():
    units, ga = gpt(), 4
    n = len(units)
    base = step("optim_grads_params", ga, units)
    step_kept = step("optim_grads_params", ga, units, policies=[UnitPolicy(Keep.STEP, reduce_late=True)] * n)
    assert (step_kept.all_gather.calls, step_kept.reduce_scatter.calls) == (n, n)
    backward = step("optim_grads_params", ga, units, policies=[UnitPolicy(Keep.TO_BACKWARD)] * n)
    assert (backward.all_gather.calls, backward.reduce_scatter.calls) == (ga * n, ga * n)
    # Facts 4.3, k = 2 layers: (2 GA - 1) k gathers and (GA - 1) k reductions less.
    some = [UnitPolicy(Keep.STEP, reduce_late=True) if i in (1, 2) else UnitPolicy() for i in range(n)]
    less = step("optim_grads_params", ga, units, policies=some)
    assert base.all_gather.calls - less.all_gather.calls == 2 * (2 * ga - 1)
    assert base.reduce_scatter.calls - less.reduce_scatter.calls == 2 * (ga - 1)
    # Where gradients are summed whole, they are reduced once in any case.
    assert step("optim", ga, units).reduce_scatter == Moved(n, sum(u.wire_bytes for u in units))


def test_a_tied_unit_is_gathered_once_a_microbatch():
    units = gpt()[:-1]
    forward = [*range(len(units)), 0]
    moved = step("optim_grads_params", 3, units, kept_to_last_use={0}, forward_order=forward).all_gather
    assert moved == Moved(3 * (1 + 2 * 6), 3 * 2 * (500 + 2 * 6 * 300))
    assert gathers_of(units, forward, kept_to_last_use={0}) == (1, 2, 2, 2, 2, 2, 2)


def test_frozen_buckets_and_units():
    units = [
        UnitSize("frozen", 100, 0, 50, frozen_bytes=100),
        UnitSize("partly", 100, 80, 50, frozen_bytes=60),
        UnitSize("empty", 0, 0, 0),
    ]
    assert step("no_shard", 2, units) == Traffic(all_reduce=Moved(1, 80))
    assert step("optim", 2, units) == Traffic(all_gather=Moved(1, 40), reduce_scatter=Moved(1, 80))
    cut = step("optim_grads_params", 2, units)
    assert cut == Traffic(all_gather=Moved(8, 800), reduce_scatter=Moved(2, 160))


def test_one_rank_moves_nothing():
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        assert step(strategy, 4, inner=1) == Traffic()


@pytest.mark.parametrize("ga", [1, 4])
def test_instances_sum_once_a_step(ga):
    inner = step("optim_grads_params", ga)
    outer = {"outer_size": 2, "outer_grad_bytes": [600, 40]}
    summed = step("optim_grads_params", ga, **outer)
    assert summed == inner + Traffic(outer_all_reduce=Moved(2, 640))
    cut = predict_step(
        FIVE,
        sharding_of("optim_grads_params", "optim"),
        inner_size=2,
        num_microbatches=ga,
        outer_weight_bytes=[300, 20],
        **outer,
    )
    assert cut == inner + Traffic(outer_reduce_scatter=Moved(2, 640), outer_all_gather=Moved(2, 320))
    alone = step("optim_grads", ga, inner=1, **outer)
    assert alone == Traffic(outer_all_reduce=Moved(2, 640))


@pytest.mark.parametrize("grad_itemsize", [2, 4])
@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_persistent_bytes(n, grad_itemsize):
    """Facts 4.1: bytes per parameter with bf16 weights, fp32 main weights and Adam."""
    numel, g = 128 * 64 * 10, grad_itemsize
    table = {
        "no_shard": 14 + g,
        "optim": 2 + g + 12 / n,
        "optim_grads": 2 + (12 + g) / n,
        "optim_grads_params": (14 + g) / n,
    }
    sizes = {"weight_itemsize": 2, "main_itemsize": 4, "grad_itemsize": g}
    for strategy, expected in table.items():
        held = persistent_bytes(numel, sharding_of(strategy), ShardPlace(0, n), **sizes)
        assert sum(held.values()) == expected * numel
    if n > 1:
        place = ShardPlace(0, n // 2, 0, 2)
        held = persistent_bytes(numel, sharding_of("optim_grads_params", "optim"), place, **sizes)
        assert sum(held.values()) == numel * (12 / n + (2 + g) / (n // 2))


def test_check_values_of_a_70b_model():
    """Facts 4.1: Llama3-70B over 64 ranks, in GB; HFSDP 8 x 8 against HSDP over 8."""
    numel, sizes = 70_560_000_000 // 128 * 128, {"weight_itemsize": 2, "main_itemsize": 4}

    def gigabytes(sharding, place, g):
        held = persistent_bytes(numel, sharding, place, grad_itemsize=g, **sizes)
        return sum(held.values()) / 1e9

    zero3 = sharding_of("optim_grads_params")
    assert gigabytes(zero3, ShardPlace(0, 64), 4) == pytest.approx(19.845, abs=5e-4)
    assert gigabytes(zero3, ShardPlace(0, 64), 2) == pytest.approx(17.64, abs=5e-3)
    hsdp = ShardPlace(0, 8, 0, 8)
    assert gigabytes(zero3, hsdp, 4) == pytest.approx(158.8, abs=0.05)
    assert gigabytes(sharding_of("optim_grads_params", "optim"), hsdp, 4) == pytest.approx(66.1, abs=0.06)


def test_frozen_elements_have_weights_only():
    sizes = {"weight_itemsize": 4, "main_itemsize": 0, "grad_itemsize": 4, "moment_itemsize": 2}
    held = persistent_bytes(80, sharding_of("optim_grads_params"), ShardPlace(0, 4), frozen_numel=40, **sizes)
    assert held == {"weights": 120, "main_weights": 0, "main_grads": 80, "moments": 80}


def test_peak_of_a_model():
    units = [UnitSize(f"u{i}", 2 * n, 4 * n, n) for i, n in enumerate((500, 300, 300, 300, 450))]
    order = demand_order(units)
    assert order == (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)
    assert default_bound(units) == 740
    assert peak_gathered(units, order, 0) == 500  # nothing ahead
    # 500 + 300 would be too much, 300 + 300 is not; the head with a layer is not below 740 either.
    assert peak_gathered(units, order) == 600
    assert peak_gathered(units, order, 800) == 800
    assert peak_gathered(units, order, 900) == 900
    everything = [UnitPolicy(Keep.STEP)] * 5
    assert peak_gathered(units, order, policies=everything) == 1850
    # A tied unit 0 stays beside the units that come and go.
    tied = (*range(5), 0, 0, *range(4, -1, -1))
    assert peak_gathered(units, tied, 0, kept_to_last_use={0}) == 950


def test_the_mean_unit_is_rounded_up():
    assert default_bound([UnitSize("a", 2, 2, 1), UnitSize("b", 2, 2, 2), UnitSize("c", 2, 2, 2)]) == 4
    assert default_bound([]) == 0


@settings(derandomize=True, max_examples=300, deadline=None)
@given(unit_lists, st.none() | st.integers(0, 300), st.booleans())
def test_peak_is_within_the_bound_or_one_unit(units, bound, training):
    order = demand_order(units) if training else tuple(range(len(units)))
    limit = default_bound(units) if bound is None else bound
    assert peak_gathered(units, order, bound) <= max(limit, *(unit.numel for unit in units), 0)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12), st.lists(st.integers(1, 9), min_size=5, max_size=5)
)
def test_peak_is_within_the_bound_for_any_order(order, numels):
    """Also where units are used many times, in an order that is no forward and backward."""
    units = [UnitSize(f"u{i}", n, n, n) for i, n in enumerate(numels)]
    for bound in range(0, 46, 5):
        assert peak_gathered(units, order, bound) <= max(bound, *numels)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(unit_lists, st.data(), st.integers(1, 4), st.none() | st.integers(0, 300))
def test_predicted_gathers_are_those_of_a_run(units, data, ga, bound):
    """Gathering ahead changes when a unit is gathered, never how often, whatever is kept."""
    policy = st.builds(UnitPolicy, st.sampled_from(Keep), st.booleans())
    policies = data.draw(st.lists(policy, min_size=len(units), max_size=len(units)))
    kept = data.draw(st.sets(st.sampled_from(range(len(units))), max_size=2))
    forward = [*range(len(units)), *sorted(kept)]
    peak, gathers = run_gathers(
        units,
        demand_order(units, forward),
        bound,
        kept_to_last_use=kept,
        policies=policies,
        num_microbatches=ga,
    )
    predicted = step(
        "optim_grads_params", ga, units, policies=policies, kept_to_last_use=kept, forward_order=forward
    )
    assert gathers == predicted.all_gather.calls
    assert peak <= sum(unit.numel for unit in units)
    reductions = sum(1 if p.reduce_late else ga for u, p in zip(units, policies, strict=True) if u.wire_bytes)
    assert predicted.reduce_scatter.calls == reductions
