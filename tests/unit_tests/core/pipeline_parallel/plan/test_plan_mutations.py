"""200 plans with one thing wrong, of all schedules: verify refuses at least 95 of 100, and the others are harmless."""

import functools
import random
from collections import Counter

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, WRITES_GRADS, PlanError
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import LaneCosts
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES, build_plan
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.plan_mutations import KINDS, mutated
from tests.harness.unit_stages import asked, model

COUNT = 200
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
    stages = model(plan.placement, 2, tied=bool(number % 2))
    strategy, policy, words = ASKED[number % len(ASKED)]
    residency = asked(strategy, policy, 3, **words)
    return add_residency(plan, stages, residency, costs, LaneCosts(bandwidth=50.0)), costs, stages, residency


def mutations():
    """Seeded: schedules in turn, kinds in turn."""
    names, made = sorted(SCHEDULES), 0
    for number in range(10 * COUNT):
        name, kind = names[number % len(names)], KINDS[(number // len(names)) % len(KINDS)]
        plan, *facts = planned(name, number)
        found = mutated(plan, kind, random.Random(number))
        if found is not None:
            yield name, kind, plan, *found, *facts
            made += 1
            if made == COUNT:
                return


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
    passed, kinds = [], Counter()
    for name, kind, plan, what, wrong, costs, stages, residency in mutations():
        kinds[kind] += 1
        try:
            verify(wrong, costs, stages=stages, residency=residency)
        except PlanError:
            continue
        passed.append(f"{name}, {residency.strategy}, {residency.policy}: {what}")
        # Harmless: messages meet, what is read is gathered, groups are the plan's own; and gradients are added alike.
        assert computed(wrong, stages) == computed(plan, stages), passed[-1]
    assert set(kinds) == set(KINDS)
    # What passes are a receive that is posted earlier than before, and B's and W's that come earlier than before, their
    # inputs being there: other orders of the same step.
    assert passed == [
        "gis, optim, memory: early: rank 2, 2B2 from 47 to 38",
        "zb-1p, optim, memory: early: rank 2, 2W3[0:1] from 38 to 36",
        "zbv, optim_grads, memory: early: rank 2, 3RECV_B3@1#33 from 51 to 48",
        "1f1b-v, optim_grads_params, budget: early: rank 1, 1RECV_B3@2#40 from 81 to 76",
        "v-half, optim_grads_params, budget: early: rank 2, 3RECV_B4@1#39 from 62 to 61",
    ]
    assert len(passed) <= COUNT * 0.05
