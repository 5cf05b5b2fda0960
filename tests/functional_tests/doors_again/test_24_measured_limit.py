"""24: a limit that measured activations break is chosen under again, or ends the run with status 2."""

import dataclasses
import re

import pytest

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.measuring.replan import RankLimitError, solve_again
from megatron.core.pipeline_parallel.plan.planned_residency import peak_bytes
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.planner import on_the_stages_of
from tests.harness import launch
from tests.harness.described import planned_config

FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 6 --log-interval 1 --global-batch-size 16".split(),
    *"--pipeline-model-parallel-size 2 --use-custom-fsdp --data-parallel-sharding-strategy auto".split(),
    *"--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 4".split(),
]
MICROBATCHES = 4


def of_measured(limit, factor):
    """A choice under a limit, and its costs once activations were measured to be so many times as large."""
    config = planned_config([*FLAGS, "--rank-memory-limit", str(limit)], env=LaunchEnv(world_size=4))
    spec = config.planner().spec
    sizes = (tuple(factor * one for one in of) for of in (spec.costs.activation, spec.costs.held_after_b))
    activation, held = sizes
    costs = dataclasses.replace(spec.costs, activation=activation, held_after_b=held)
    return spec, costs, on_the_stages_of(config.staged_model, spec)


def held(spec, costs):
    plan = plan_for(spec, MICROBATCHES, PlanPurpose.TRAIN)
    return max(peak_bytes(dataclasses.replace(spec, costs=costs), plan))


@pytest.mark.grid
def test_the_choice_is_made_again_with_what_was_measured():
    limit = 1_000_000
    spec, costs, alike = of_measured(limit, 1.06)
    assert held(spec, spec.costs) <= limit < held(spec, costs)
    sizes = MICROBATCHES, MICROBATCHES
    again, kept, reasons = solve_again(spec, costs, *sizes, splits=True, lanes=spec.lanes, alike=alike)
    assert kept is None
    assert held(again, costs) <= limit
    assert (again.placement, again.stages) == (spec.placement, spec.stages)
    assert again.residency.strategy == spec.residency.strategy  # shards stay as they are cut
    assert reasons[0].endswith(": chosen")


@pytest.mark.grid
def test_where_nothing_keeps_to_it_both_figures_and_the_flag_are_named():
    spec, costs, alike = of_measured(1_000_000, 3.0)
    with pytest.raises(RankLimitError) as refused:
        solve_again(spec, costs, MICROBATCHES, MICROBATCHES, splits=True, lanes=spec.lanes, alike=alike)
    said = re.search(
        r"holds (\S+) MiB by measured .* planned to hold (\S+) KiB by estimated", str(refused.value)
    )
    assert float(said[1]) * 2**20 > 1_000_000 > float(said[2]) * 2**10
    assert "--rank-memory-limit 1000000" in str(refused.value)


@pytest.mark.grid
def test_a_run_ends_with_status_2_and_keeps_what_it_trained(tmp_path):
    words = [*FLAGS, "--rank-memory-limit", "860000", "--save", "ck", "--save-interval", "100"]
    run = launch.ended(launch.run_forked(words, ranks=4, cwd=tmp_path), 2)
    (said,) = set(re.findall(r"^ERROR: (--rank-memory-limit 860000: .*)$", run.output, re.M))
    assert "by measured activations" in said
    assert "by estimated ones" in said
    assert launch.exit_record(tmp_path / "ck")["reason"] == said
    assert list(run.losses()) == [1, 2, 3]
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "3"
