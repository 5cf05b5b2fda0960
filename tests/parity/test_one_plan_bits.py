"""Sharded pipelines with the same groups of microbatches have the same bits, whatever else their plans say.

Groups are the microbatches whose gradients a rank adds up before each reduction. Clipped steps in fp32, and in bf16
with fp32 main weights, with dropout: main weights, moments, the model's weights and losses of

    all at once   `optim`, and policy `step` of optim_grads and optim_grads_params
    one by one    policy `memory`, whatever is gathered ahead, and `budget` with these groups

are each those of 1F1B, under every schedule. So are those of a plan that is made again for other costs while the run
goes on, and of steps that are validated afterwards. A tied matrix with its ends on two ranks is summed over these
behind its reductions, in another order than `optim`'s: its runs have bits of their own, which no schedule changes. With
both ends on one rank of a V its two uses are reduced one by one in the order of their W's, which is the schedule's: its
groups, and with them its bits, are those of the schedule, whatever else its plan says.
"""

from __future__ import annotations

import dataclasses
import operator

import numpy as np
import pytest
import torch

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from tests.harness.layouts import Layout, Run, assembled, train, train_run
from tests.harness.planned_steps import plan_of
from tests.harness.ranks import run_ranks
from tests.harness.same_bits import differing, outcome_of
from tests.harness.validated_steps import train_validated

WORLD, GLOBAL_BATCH, LAYERS = 4, 8, 4  # 4 microbatches
FSDP = ("--use-custom-fsdp", "--data-parallel-sharding-strategy")
OPTIM = (*FSDP, "optim")
ZERO2, ZERO3 = (*FSDP, "optim_grads"), (*FSDP, "optim_grads_params")
STEP = ("--fsdp-reshard-policy", "step")
EAGER = ("--suggested-communication-unit-size", "0")
AHEAD = ("--suggested-communication-unit-size", "1000000")
BUDGET = ("--fsdp-reshard-policy", "budget", "--fsdp-memory-budget", "40000")
UNTIED = ("--untie-embeddings-and-output-weights",)
MODELS = {"fp32": UNTIED, "bf16": (*UNTIED, "--bf16"), "tied": ()}
ALL_AT_ONCE = {"optim": OPTIM, "ZeRO-2 step": (*ZERO2, *STEP), "ZeRO-3 step": (*ZERO3, *STEP)}
ONE_BY_ONE = {
    "ZeRO-2": ZERO2,
    "ZeRO-3": ZERO3,
    "ZeRO-3 eager": (*ZERO3, *EAGER),
    "ZeRO-3 ahead": (*ZERO3, *AHEAD),
    "ZeRO-3 budget": (*ZERO3, *BUDGET),
}
V = [name for name, one in SCHEDULES.items() if one.placement == "v"]
LINEAR = [name for name, one in SCHEDULES.items() if one.placement == "linear"]


def layout_of(schedule: str, more: tuple[str, ...]) -> Layout:
    looped = SCHEDULES[schedule].placement == "looped"
    return Layout(pp=2, dp=2, schedule=schedule, chunks=2 if looped else 1, more=more)


@dataclasses.dataclass(frozen=True)
class Klass:
    """Runs of the same bits. runs: (schedule, name of the flags). all_at_once: whether a step's microbatches are one
    group, else each is its own."""

    runs: tuple[tuple[str, str], ...]
    all_at_once: bool
    model: str = "fp32"


def run_classes(ctx, classes, steps):
    """By class and run: what came of it, and the sizes of its groups."""
    torch.set_num_threads(1)
    found = []
    for klass in classes:
        flags = ALL_AT_ONCE if klass.all_at_once else ONE_BY_ONE
        words = ["--num-layers", str(LAYERS), *MODELS[klass.model]]
        ran = []
        for schedule, name in klass.runs:
            run = Run(ctx, layout_of(schedule, flags[name]), words, global_batch=GLOBAL_BATCH, masked=True)
            if name == "ZeRO-3 budget":
                run.runner.planner.adopt(with_groups_of_memory(run.runner.spec))
            ran.append((train_run(run, steps), group_sizes(run, by_rank=not klass.all_at_once)))
        found.append(ran)
    return found


def with_groups_of_memory(spec: ScheduleSpec) -> ScheduleSpec:
    """Each microbatch is reduced by itself, in the order of policy `memory`: where two stages of a rank share a
    matrix, theirs alternate."""
    count = GLOBAL_BATCH // 2
    assert spec.residency is not None, "data parallelism has nothing to do"
    memory = dataclasses.replace(spec.residency, policy="memory", budget=None)
    planned = plan_for(dataclasses.replace(spec, residency=memory), count, PlanPurpose.TRAIN).residency
    return dataclasses.replace(spec, groupings=((count, planned.grouping),))


def group_sizes(run: Run, *, by_rank: bool) -> set[int]:
    """How many microbatches a REDUCE sums up, of each stage; by_rank: of all stages of a rank that share the unit."""
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    placed = enumerate(run.runner.spec.placement.ranks())
    stages = zip(placed, run.runner.spec.stages_units, plan_of(run).residency.grouping, strict=True)
    for (stage, rank), units, groups in stages:
        for unit, sizes in zip(units.units, groups, strict=True):
            key = (rank if by_rank else -stage, unit.name)
            others = found.get(key, (0,) * len(sizes))
            found[key] = tuple(map(operator.add, others, sizes))
    return {size for sizes in found.values() for size in sizes}


def check(classes, steps, timeout=110):
    """Returns the first outcome of each."""
    by_rank = run_ranks(run_classes, WORLD, classes, steps, timeout=timeout)
    firsts, failed = [], []
    for number, klass in enumerate(classes):
        outcomes = []
        for at, run in enumerate(klass.runs):
            ranks = [rank[number][at] for rank in by_rank]
            sizes = set().union(*(sizes for _, sizes in ranks))
            assert sizes == {GLOBAL_BATCH // 2 if klass.all_at_once else 1}, (run, sizes)
            outcomes.append(outcome_of([trained for trained, _ in ranks]))
        failed += [
            f"{klass.model}: {run} and {klass.runs[0]}: {why}"
            for run, outcome in zip(klass.runs[1:], outcomes[1:], strict=True)
            if (why := differing(outcomes[0], outcome))
        ]
        firsts.append(outcomes[0])
    assert not failed, "\n".join(failed)
    return firsts


@pytest.mark.grid
def test_a_sample_has_the_bits_of_its_groups():
    at_once, one_by_one = check(
        [
            Klass((("1f1b", "optim"), ("zbv", "ZeRO-3 step"), ("zb-1p", "ZeRO-3 step")), True),
            Klass((("1f1b", "ZeRO-3"), ("zbv", "ZeRO-3"), ("interleaved", "ZeRO-3 eager")), False),
            Klass((("zbv", "optim"), ("zbv", "ZeRO-3 step")), True, "tied"),
            Klass((("1f1b", "ZeRO-3"), ("v-half", "ZeRO-3 budget"), ("zbv", "ZeRO-2")), False, "bf16"),
        ],
        steps=3,
    )[:2]
    assert differing(at_once, one_by_one), "the orders of addition do not show: this test proves nothing"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flags", [ALL_AT_ONCE, ONE_BY_ONE], ids=["all at once", "one by one"])
def test_every_schedule_has_the_bits_of_its_groups(model, flags):
    at_once = flags is ALL_AT_ONCE
    if model != "tied":
        classes = [tuple(SCHEDULES)]
    else:
        # One rank's two uses of a matrix that are reduced one by one alternate as its schedule has them.
        v = [tuple(V)] if at_once else [(name,) for name in V]
        classes = [*v, tuple(name for name in SCHEDULES if name not in V)]
    runs = [
        tuple(
            (schedule, name) for schedule in schedules for name in flags if of_class(model, schedules, name)
        )
        for schedules in classes
    ]
    check([Klass(one, at_once, model) for one in runs], steps=10, timeout=1700)


def of_class(model, schedules, name):
    """Not `optim` where a tied matrix is summed in another order, see above."""
    return not (model == "tied" and "1f1b" in schedules and name == "optim")


# Plans that are made again ----------------------------------------------------------------------------


def run_replanned(ctx, more, steps):
    """As it was planned first, and made again behind the second step for stages whose times are others. Returns both,
    and the plans' hashes."""
    torch.set_num_threads(1)
    layout, words = layout_of("zbv", more), ["--num-layers", str(LAYERS), *UNTIED]
    found, hashes = [], set()
    for again in (False, True):
        run = Run(ctx, layout, words, global_batch=GLOBAL_BATCH)

        def between(step, run=run, again=again):
            hashes.add(plan_hash(plan_of(run)))
            if again and step == 2:
                planner = run.runner.planner
                planner.keep_groupings(planner.ran)
                planner.adopt(planner.spec.under(skewed(planner.spec.costs)))

        found.append(train_run(run, steps, between=between))
    return found, hashes


def skewed(costs: CostModel) -> CostModel:
    """Backwards of some stages take far longer than they were thought to."""
    return dataclasses.replace(
        costs, b=tuple(time * (5.0 if stage % 2 else 0.3) for stage, time in enumerate(costs.b))
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", ["ZeRO-3", *(pytest.param(name, marks=pytest.mark.full) for name in ("ZeRO-3 budget",))]
)
def test_a_plan_made_again_changes_no_bit(name):
    by_rank = run_ranks(run_replanned, WORLD, ONE_BY_ONE[name], 4)
    one, other = (outcome_of([found[number] for found, _ in by_rank]) for number in range(2))
    assert len(by_rank[0][1]) == 2, "the plan stayed what it was"
    assert differing(one, other) == ""


# Steps that are validated afterwards ------------------------------------------------------------------


def run_validated(ctx, cases, steps):
    torch.set_num_threads(1)
    words = ["--num-layers", str(LAYERS), *UNTIED]
    found = []
    for schedule, more in cases:
        layout = layout_of(schedule, more)
        norm = train(ctx, layout, words, global_batch=GLOBAL_BATCH).norms[0]
        clip = 0.97 * norm  # below the norm, above what all ranks but one make of it
        plain = train(ctx, layout, words, global_batch=GLOBAL_BATCH, steps=steps, clip=clip)
        flags = ("--enable-optimizer-post-validation", "--post-validation-after", "0", "--clip-grad")
        layout = dataclasses.replace(layout, more=(*more, *flags, str(clip)))
        found.append((plain, train_validated(ctx, layout, words, GLOBAL_BATCH, steps)))
    return found


VALIDATED = [("zbv", ZERO3), ("zb-1p", (*ZERO3, *STEP))]
OTHERS = [
    (schedule, more)
    for schedule in (*V, *LINEAR)
    for more in (ZERO2, ZERO3, (*ZERO3, *STEP), (*ZERO3, *BUDGET))
]


@pytest.mark.grid
@pytest.mark.parametrize(
    "cases", [VALIDATED, pytest.param(OTHERS, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_validated_steps_have_the_bits_of_others(cases):
    """The first one is clipped, which a rank hears of that has stepped: it is taken back."""
    by_rank = run_ranks(run_validated, WORLD, cases, 3, timeout=1100)
    for number, case in enumerate(cases):
        ranks = [found[number] for found in by_rank]
        taken_back = [validated[3] for _, validated in ranks]
        assert max(taken_back) > 0, (case, taken_back)
        for plain, (losses, norms, _, _) in ranks:
            assert (losses, norms) == (plain.losses, plain.norms), case
        expected, found = (
            assembled([one.weights for one, _ in ranks]),
            assembled([two[2] for _, two in ranks]),
        )
        for name, values in expected.items():
            assert np.array_equal(found[name], values), (case, name)
