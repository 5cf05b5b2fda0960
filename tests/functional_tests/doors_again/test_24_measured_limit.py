"""24: a choice by measured costs keeps to the limit, and what was measured stands beside what was planned."""

import dataclasses
import re

import pytest

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.measuring.replan import solve_again
from megatron.core.pipeline_parallel.plan.planned_residency import peak_bytes
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.training.config.launch_env import LaunchEnv
from tests.harness import launch
from tests.harness.described import planned_config

FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 6 --log-interval 1 --global-batch-size 16".split(),
    *"--pipeline-model-parallel-size 2 --use-custom-fsdp --data-parallel-sharding-strategy auto".split(),
    *"--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 4".split(),
]
MICROBATCHES = 4
LIMIT = 860_000


def held(spec):
    return max(peak_bytes(spec, plan_for(spec, MICROBATCHES, PlanPurpose.TRAIN)))


@pytest.mark.grid
@pytest.mark.parametrize("slow", range(4))
def test_what_is_chosen_by_measured_times_holds_what_it_may(slow):
    """Times move, bytes do not: whatever a stage takes, the plan of it is one that the limit has room for."""
    config = planned_config([*FLAGS, "--rank-memory-limit", str(LIMIT)], env=LaunchEnv(world_size=4))
    spec = config.planner().spec
    assert held(spec) <= LIMIT
    slower = {
        name: tuple(
            time * (1 + 3 * (stage == slow % len(spec.stages)))
            for stage, time in enumerate(getattr(spec.costs, name))
        )
        for name in "fbw"
    }
    again, _, _ = solve_again(
        spec, dataclasses.replace(spec.costs, **slower), *(MICROBATCHES,) * 2, splits=True, lanes=spec.lanes
    )
    assert held(again) <= LIMIT
    assert (again.placement, again.stages) == (spec.placement, spec.stages)


@pytest.mark.grid
def test_a_run_under_a_tight_limit_says_what_it_measured_beside_what_it_planned(tmp_path):
    words = [*FLAGS, "--rank-memory-limit", str(LIMIT), "--save", "ck", "--save-interval", "100"]
    run = launch.ok(launch.run_forked(words, ranks=4, cwd=tmp_path))
    assert list(run.losses()) == [*range(1, 7)]
    assert re.search(r"^ > pipeline (solved again|measured) after iteration 3 ", run.output, re.MULTILINE)
    (told,) = re.findall(
        r"^ memory of pipeline rank \d by iteration 2, planned / measured: (.*)$", run.output, re.M
    )
    planned, measured = re.search(r"activations ([\d.]+ \w+) / ([\d.]+ \w+)", told).groups()
    assert planned != measured  # by the heap, with what kernels and messages take
