"""What units keep: against all choices, and the closed forms of the facts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp.reshard_policy import (
    Keep,
    ReshardPlanError,
    UnitFacts,
    UnitPolicy,
    check_policy,
    policies,
)

CUT = {"weights_sharded": True, "grads_sharded": True}
CHOICES = [UnitPolicy(keep, reduce_late=late) for keep in Keep for late in (False, True)]
units_lists = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 2)),
    min_size=1,
    max_size=4,
).map(lambda rows: [UnitFacts(*row) for row in rows])


def held_bytes(facts, chosen):
    """What is held beyond the least, at most: whole weights and whole gradients."""
    weights = sum(
        unit.gather_bytes for unit, p in zip(facts, chosen, strict=True) if p.keep is not Keep.NOTHING
    )
    return weights + sum(unit.reduce_bytes for unit, p in zip(facts, chosen, strict=True) if p.reduce_late)


def travelling(facts, chosen, num_microbatches, *, weights_sharded=True, grads_sharded=True):
    """Bytes of a step, counted use by use."""
    total = 0
    for unit, policy in zip(facts, chosen, strict=True):
        gathered = reduced = False
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            for _ in range(unit.gathers):
                total += weights_sharded * (not gathered) * unit.gather_bytes
                gathered = policy.keep is not Keep.NOTHING
            gathered = policy.keep is Keep.STEP
            reduced = is_last or not policy.reduce_late
            total += grads_sharded * reduced * unit.reduce_bytes
    return total


@settings(derandomize=True, max_examples=120, deadline=None)
@given(units_lists, st.integers(0, 200), st.integers(1, 4), st.booleans(), st.booleans())
def test_no_choice_within_the_budget_moves_much_less(
    facts, budget, num_microbatches, weights_sharded, grads_sharded
):
    """The best choice saves less than one more unit, where that is the largest, would."""
    cut = {"weights_sharded": weights_sharded, "grads_sharded": grads_sharded or not weights_sharded}
    found = policies(facts, "budget", num_microbatches=num_microbatches, budget_bytes=budget, **cut)
    assert held_bytes(facts, found) <= budget
    least = min(
        travelling(facts, chosen, num_microbatches, **cut)
        for chosen in itertools.product(CHOICES, repeat=len(facts))
        if held_bytes(facts, chosen) <= budget
    )
    most = max(max(unit.gather_bytes, unit.reduce_bytes) for unit in facts)
    within = travelling(facts, found, num_microbatches, **cut) - least
    assert within <= (2 * num_microbatches - 1) * most


def test_equal_layers_are_chosen_best():
    for num_microbatches in (1, 2, 3):
        for budget in range(0, 40, 3):
            facts = [UnitFacts(4, 8)] * 3
            found = policies(facts, "budget", num_microbatches=num_microbatches, budget_bytes=budget, **CUT)
            least = min(
                travelling(facts, chosen, num_microbatches)
                for chosen in itertools.product(CHOICES, repeat=3)
                if held_bytes(facts, chosen) <= budget
            )
            assert travelling(facts, found, num_microbatches) == least, (num_microbatches, budget)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(units_lists, st.integers(0, 200), st.integers(1, 4))
def test_nothing_is_held_that_saves_nothing(facts, budget, num_microbatches):
    found = policies(facts, "budget", num_microbatches=num_microbatches, budget_bytes=budget, **CUT)
    before = travelling(facts, found, num_microbatches)
    for index, policy in enumerate(found):
        for less in (UnitPolicy(Keep.NOTHING, policy.reduce_late), UnitPolicy(policy.keep, False)):
            if less != policy:
                chosen = [*found[:index], less, *found[index + 1 :]]
                assert travelling(facts, chosen, num_microbatches) > before


def layers(n: int, numel: int = 1000) -> list[UnitFacts]:
    """Units of bf16 weights and fp32 gradients."""
    return [UnitFacts(2 * numel, 4 * numel)] * n


def test_extension_formulas():
    """By hand: k units of U elements, GA microbatches."""
    facts, ga, k = layers(10), 4, 3

    def saved(chosen):
        return travelling(facts, [UnitPolicy()] * 10, ga) - travelling(facts, chosen, ga)

    rest = [UnitPolicy()] * (10 - k)
    late = [UnitPolicy(reduce_late=True)] * k + rest
    step = [UnitPolicy(Keep.STEP)] * k + rest
    to_backward = [UnitPolicy(Keep.TO_BACKWARD)] * k + rest
    assert (held_bytes(facts, late), saved(late)) == (4000 * k, (ga - 1) * k * 4000)
    assert (held_bytes(facts, step), saved(step)) == (2000 * k, (2 * ga - 1) * k * 2000)
    assert (held_bytes(facts, to_backward), saved(to_backward)) == (2000 * k, ga * k * 2000)
    for keep, chosen in ((Keep.STEP, step), (Keep.TO_BACKWARD, to_backward)):
        assert saved(chosen) == k * 2000 * facts[0].saved_gathers(keep, ga)


def test_weights_are_kept_before_gradients():
    """At equal bytes keeping weights saves more: 2 GA - 1 times what is held instead of GA - 1 times."""
    facts = layers(4)
    keep_all = policies(facts, "budget", num_microbatches=4, budget_bytes=8000, **CUT)
    assert keep_all == (UnitPolicy(Keep.STEP),) * 4
    more = policies(facts, "budget", num_microbatches=4, budget_bytes=8000 + 4000, **CUT)
    assert [p.reduce_late for p in more] == [False, False, False, True]


def test_one_microbatch_keeps_the_last_layers_to_their_backward():
    facts = layers(4)
    found = policies(facts, "budget", num_microbatches=1, budget_bytes=5000, **CUT)
    assert found == (UnitPolicy(),) * 2 + (UnitPolicy(Keep.TO_BACKWARD),) * 2
    # A unit gathered once anyway is not kept; nor are gradients, which are reduced once.
    once = [UnitFacts(10, 10, gathers=1)]
    assert policies(once, "budget", num_microbatches=1, budget_bytes=100, **CUT) == (UnitPolicy(),)


def test_a_budget_for_all_is_the_policy_step():
    facts = layers(5)
    every = policies(facts, "step", num_microbatches=2, **CUT)
    assert every == (UnitPolicy(Keep.STEP, reduce_late=True),) * 5
    assert (
        policies(facts, "budget", num_microbatches=2, budget_bytes=held_bytes(facts, every), **CUT) == every
    )
    assert held_bytes(facts, every) == 5 * 6000


def test_the_policies_without_a_budget():
    facts = layers(3)
    common = {"num_microbatches": 2}
    both = {**common, "weights_sharded": True, "grads_sharded": True}
    grads = {**common, "weights_sharded": False, "grads_sharded": True}
    assert policies(facts, "memory", **both) == (UnitPolicy(),) * 3
    assert policies(facts, "backward", **both) == (UnitPolicy(Keep.TO_BACKWARD),) * 3
    assert policies(facts, "step", **grads) == (UnitPolicy(reduce_late=True),) * 3
    assert (
        policies(facts, "step", **common, weights_sharded=False, grads_sharded=False) == (UnitPolicy(),) * 3
    )


def test_a_model_of_200_units_and_gigabytes():
    """Two embeddings and 198 layers in three sizes: filled to less than the smallest unit that was left out."""
    facts = [UnitFacts(2_102_001_664, 4_204_003_328, gathers=1)]
    facts += [UnitFacts(1_711_276_032 + 4096 * (i % 3), 3_422_552_064) for i in range(198)]
    facts += [UnitFacts(2_102_018_048, 4_204_036_096, gathers=1)]
    for gigabytes in (0, 3, 77, 250, 500, 5000):
        budget = gigabytes * 10**9
        found = policies(facts, "budget", num_microbatches=8, budget_bytes=budget, **CUT)
        held = held_bytes(facts, found)
        assert held <= budget
        left_out = [u.gather_bytes for u, p in zip(facts, found, strict=True) if p.keep is Keep.NOTHING]
        left_out += [u.reduce_bytes for u, p in zip(facts, found, strict=True) if not p.reduce_late]
        assert not left_out or budget - held < min(left_out)


@pytest.mark.parametrize(
    ("policy", "budget", "cut", "told"),
    [
        ("budget", None, (True, True), "needs --fsdp-memory-budget BYTES"),
        ("memory", 5, (True, True), "--fsdp-memory-budget 5 with --fsdp-reshard-policy memory"),
        ("step", 0, (True, True), "--fsdp-memory-budget 0 with --fsdp-reshard-policy step"),
        ("budget", -1, (True, True), "--fsdp-memory-budget -1: give 0 bytes or more"),
        ("backward", None, (False, True), "does not shard weights"),
        ("step", None, (False, False), "--fsdp-reshard-policy step: this strategy"),
        ("budget", 9, (False, False), "--fsdp-reshard-policy budget: this strategy"),
    ],
)
def test_senseless_combinations(policy, budget, cut, told):
    with pytest.raises(ReshardPlanError, match=told):
        check_policy(policy, budget, weights_sharded=cut[0], grads_sharded=cut[1])
