"""Plans with one thing wrong, of all schedules: verify refuses at least 95 of 100, and the others are harmless."""

import functools
import itertools
import random
import zlib
from collections import Counter

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, WRITES_GRADS, PlanError
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.plan_mutations import KINDS, mutated
from tests.harness.unit_stages import asked, model

ASKED = (
    ("optim_grads_params", "memory", {}),
    ("optim_grads_params", "budget", {}),
    ("optim_grads_params", "step", {"outer": 2}),
    ("optim_grads", "memory", {}),
    ("optim", "memory", {}),
)


@functools.cache
def lowered(name):
    plan = build_plan(name, Request(3, max(6, SCHEDULES[name].least_microbatches(3))))
    costs = CostModel.of_ranks(plan.placement)
    return lower(plan, costs), costs


def planned(name, number):
    """(plan, costs, what verify needs to know) of a schedule, with one strategy and policy after the other."""
    plan, costs = lowered(name)
    if number % 4 == 3:
        plan = post_validation(plan, costs)
    strategy, policy, ranks = ASKED[number % len(ASKED)]
    stages = model(plan.placement, 2, tied=bool(number % 2), **ranks)
    residency = asked(strategy, policy, 3)
    return add_residency(plan, stages, residency, costs, LaneCosts(bandwidth=50.0)), costs, stages, residency


def mutations():
    """Seeded by names: a schedule that comes or goes changes nothing about the others'."""
    for name in SCHEDULES:
        for turn, kind in itertools.product(range(2), KINDS):
            first = zlib.crc32(f"{name} {kind} {turn}".encode())
            for number in range(first, first + 20):  # the first that the plan has something of this kind for
                plan, *facts = planned(name, number)
                found = mutated(plan, kind, random.Random(number))
                if found is not None:
                    yield name, kind, plan, *found, *facts
                    break


def computed(plan, stages):
    """What decides losses and bits: who computes what, and in which order each unit's gradients are added."""
    done = [{op[:3] for op in row if IS_COMPUTE[op[0]]} for row in plan.rows]
    added = {}
    for row in plan.rows:
        for op in row:
            if WRITES_GRADS[op[0]]:
                units = range(len(stages[op[1]].units)) if op[4] < 0 else range(op[4], op[5])
                for unit in units:
                    added.setdefault((op[1], unit), []).append(op[2])
    return done, added


def test_mutations_are_refused_or_harmless():
    passed, made = [], Counter()
    for name, kind, plan, what, wrong, costs, stages, residency in mutations():
        made[name, kind] += 1
        try:
            verify(wrong, costs, stages=stages, residency=residency)
        except PlanError:
            continue
        # Harmless: messages meet, what is read is gathered, groups are the plan's own; and gradients are added alike.
        said = f"{name}, {residency.strategy}, {residency.policy}: {what}"
        assert computed(wrong, stages) == computed(plan, stages), said
        passed.append((kind, said))
    # What passes are other orders of the same step: receives, computations and decisions that come earlier than before,
    # what they need being there, and forwards in another order.
    assert {kind for kind, _ in passed} <= {"early", "swapped microbatches"}, passed
    assert {name for name, _ in made} == set(SCHEDULES)
    assert {kind for _, kind in made} == set(KINDS)
    assert len(passed) <= made.total() * 0.05, passed
