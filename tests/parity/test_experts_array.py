"""Experts on eight ranks, over the covering arrays of `tests.harness.experts_cases`: fp64 to 1e-10 of one process after
ten clipped steps, norms included; experts of every token and what layers count as integers. What one process computes
is held to plain PyTorch by test_reference_moe.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.core.transformer.experts.router import Router
from tests.harness.covering import read_cases, to_cover
from tests.harness.experts_cases import (
    FILE,
    INSTANCED,
    OF_LAYOUT,
    OF_MODEL,
    PARALLEL_FILE,
    ExpertParallelCase,
    ExpertsCase,
    possible_cases,
    possible_parallel_cases,
)
from tests.harness.layouts import CLIP, NO_DROPOUT, Layout, Run, Trained, assembled, plan_ahead, train_run
from tests.harness.ranks import run_ranks
from tests.harness.validated_steps import validated_results
from tests.parity.test_moe_layouts import CountingRun
from tests.parity.test_one_plan import layout_of, microbatches_of, num_layers_of

COMMON = ["--fp64", "--micro-batch-size", "2", *NO_DROPOUT]
STEPS = 10
CASES = read_cases(ExpertsCase, FILE)
PARALLEL_CASES = read_cases(ExpertParallelCase, PARALLEL_FILE)


class Outcome(NamedTuple):
    """Of a rank. counts: what layers have counted, by step. routes: (iteration, microbatch, layer) -> the experts of
    each token, as bytes."""

    trained: Trained
    counts: list
    routes: dict
    taken_back: int


class Job(NamedTuple):
    """A run. batch: microbatches of a step. validated: steps are validated behind the one after them."""

    layout: Layout
    words: tuple[str, ...]
    batch: int = 8
    masked: bool = False
    clip: float = CLIP
    validated: bool = False


def recording(routes):
    """Routers write down what they choose; what is repeated has to choose the same, unless weights changed."""
    forward = Router.forward

    def recorded(self, x):
        chosen = forward(self, x)
        key = self.context.iteration, self.context.microbatch, self.layer
        experts = chosen.experts if chosen.kept is None else chosen.experts.masked_fill(~chosen.kept, -1)
        now = experts.numpy().tobytes()
        assert routes.setdefault(key, now) == now or not self.context.counts.paused, key
        routes[key] = now
        return chosen

    return mock.patch.object(Router, "forward", recorded)


def run_job(ctx, job):
    run, routes = CountingRun(ctx, job.layout, job.words, global_batch=job.batch, masked=job.masked), {}
    with recording(routes):
        if job.validated:
            initial, results = run.main_weights(), validated_results(run, STEPS)
            sums = [result.losses["lm loss"] for result in results]
            losses = [total / count for total, count in sums]
            norms, weights = [result.grad_norm for result in results], run.main_weights()
            trained = Trained(losses, norms, [], initial, {}, weights, run.model_weights(), {})
            counts = [result.layers for result in results]
            return Outcome(trained, counts, routes, sum(result.rolled_back for result in results))
        return Outcome(train_run(run, STEPS, job.clip), run.counts, routes, 0)


def run_jobs(ctx, jobs):
    torch.set_num_threads(1)
    outcomes = []
    for job in jobs:
        try:
            outcomes.append(run_job(ctx, job))
        except Exception as error:
            error.add_note(f"{job}")
            raise
    return outcomes


def first_norms(ctx, jobs):
    """Of gradients, in the first step."""
    torch.set_num_threads(1)
    runs = (Run(ctx, job.layout, job.words, global_batch=job.batch, masked=job.masked) for job in jobs)
    return [run.step(1)[1].norm for run in runs]


def on_one(job):
    return job._replace(layout=Layout(), validated=False)


def compare(outcomes, expected, validated):
    results, routes = [one.trained for one in outcomes], {}
    for trained, counts, chosen, taken_back in outcomes:
        np.testing.assert_allclose(trained.losses, expected.trained.losses, rtol=0, atol=1e-10)
        np.testing.assert_allclose(trained.norms, expected.trained.norms, rtol=0, atol=1e-10)
        assert (taken_back > 0) == validated, f"{taken_back} steps were taken back"
        for step, (ours, theirs) in enumerate(zip(counts, expected.counts, strict=True)):
            assert ours.keys() == theirs.keys()
            for (layer, name), numbers in theirs.items():
                bound = 0 if name in ("tokens", "dropped") else 1e-10
                difference = np.abs(np.subtract(ours[layer, name], numbers)).max()
                assert difference <= bound, (step, layer, name, difference)
        assert all(routes.setdefault(key, one) == one for key, one in chosen.items())
    assert routes == expected.routes
    for kind in ("initial", "weights", "model", *([] if validated else ["grads"])):
        ours = assembled([getattr(rank, kind) for rank in results])
        theirs = assembled([getattr(expected.trained, kind)])
        assert ours.keys() == theirs.keys()
        worst = {name: np.abs(ours[name] - values).max() for name, values in theirs.items()}
        bound = 0 if kind == "initial" else 1e-10
        assert max(worst.values()) <= bound, (kind, {name: one for name, one in worst.items() if one > bound})


def check(jobs):
    for job in jobs:
        plan_ahead(job.layout, job.words, global_batch=job.batch)
    (expected,) = run_ranks(run_jobs, 1, [on_one(job) for job in jobs], timeout=1200)
    by_rank = run_ranks(run_jobs, jobs[0].layout.world_size, jobs, timeout=1200)
    wrong = []
    for job, one, *outcomes in zip(jobs, expected, *by_rank, strict=True):
        try:
            compare(outcomes, one, job.validated)
        except AssertionError as error:
            wrong.append(f"{job}: {error}")
    assert not wrong, "\n".join(wrong)


def jobs_of(cases):
    """Validated steps are clipped just below the first one's norm: it is taken back, because ranks have stepped that
    had not heard of the last one's part of it."""
    jobs = []
    for case in cases:
        words = (*COMMON, "--num-layers", str(num_layers_of(case)), *case.words)
        jobs.append(
            Job(Layout(), words, microbatches_of(case) * case.dp, case.per_token, CLIP, case.validated)
        )
    validated = [number for number, job in enumerate(jobs) if job.validated]
    if validated:
        (norms,) = run_ranks(first_norms, 1, [jobs[number] for number in validated], timeout=300)
        for number, norm in zip(validated, norms, strict=True):
            jobs[number] = jobs[number]._replace(clip=0.999999 * norm)
    layouts = [layout_of(case, job.clip) for case, job in zip(cases, jobs, strict=True)]
    return [
        job._replace(layout=dataclasses.replace(layout, more=(*layout.more, *case.layout_words)))
        for case, job, layout in zip(cases, jobs, layouts, strict=True)
    ]


def covers_all(cases, possible, layouts):
    """cases: of an array. layouts: names of choices each of which goes with every model."""
    assert all(case.is_possible for case in cases)
    wanted = to_cover(possible)
    assert to_cover(cases) == wanted
    for left, right in itertools.product(layouts, OF_MODEL):
        choices = cases[0].choices
        for one, other in itertools.product(choices[left], choices[right]):
            assert ((left, one), (right, other)) in wanted


def test_the_array_covers_every_pair():
    assert len(CASES) <= 200
    covers_all(CASES, possible_cases(), OF_LAYOUT)


@pytest.mark.grid
def test_the_array_of_experts_over_ranks_covers_every_pair_and_triples_of_size_strategy_and_schedule():
    assert len(PARALLEL_CASES) <= 250
    covers_all(
        PARALLEL_CASES, possible_parallel_cases(), ("ep", "etp", "instances", "dispatcher", "tp", *OF_LAYOUT)
    )
    triples = {
        tuple(getattr(case, name) for name in ("ep", "strategy", "schedule")) for case in PARALLEL_CASES
    }
    assert len(triples) > 200


def of_layout(case):
    """Cases of which this is equal share communicators in a fork."""
    experts = (case.ep, case.etp) if isinstance(case, ExpertParallelCase) else ()
    return case.tp, case.pp, case.strategy in INSTANCED, *experts


SIZE = 9  # of a part, some minutes: --lf goes on where a run was stopped


@pytest.mark.grid
def test_one_of_the_array_equals_one_process():
    check(jobs_of([next(case for case in CASES if case.schedule == "zbv" and case.tp == case.dp == 2)]))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, len(CASES), SIZE))
def test_the_array_equals_one_process(first):
    check(jobs_of(sorted(CASES, key=of_layout)[first : first + SIZE]))


SAMPLE = {
    "zbv": lambda case: case.schedule == "zbv" and case.tp == case.ep == 2 and case.dispatcher == "alltoall",
    "HSDP": lambda case: case.strategy == "HSDP" and case.ep == 2 and case.pp == 2 and case.validated,
    "EP 8": lambda case: case.ep == 8 and case.strategy == "optim_grads_params",
    "a stage without experts": lambda case: (
        case.pp == case.ep == case.edp == 2 and case.chunks == 1 and case.padded and case.strategy == "optim"
    ),
    "a stage without experts, which alone have peers": lambda case: (
        case.pp > 1 and case.dp == 1 and case.edp > 1 and case.chunks == 1 and case.padded
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", SAMPLE)
def test_one_of_the_array_of_experts_over_ranks_equals_one_process(name):
    check(jobs_of([next(filter(SAMPLE[name], PARALLEL_CASES))]))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, len(PARALLEL_CASES), SIZE))
def test_the_array_of_experts_over_ranks_equals_one_process(first):
    check(jobs_of(sorted(PARALLEL_CASES, key=of_layout)[first : first + SIZE]))
