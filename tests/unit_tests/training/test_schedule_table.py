"""A row in the table of schedules, and its generator, are all that a schedule needs."""

import json
import subprocess
import sys

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.generators.looped import interleaved
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from tests.harness.launch_lines import SMALL

NEW = """
import contextlib, dataclasses, io, json, sys
from megatron.core.pipeline_parallel.plan import schedules
from megatron.core.pipeline_parallel.plan.ir import BW, B, W
from megatron.core.pipeline_parallel.plan.generators.one_f_one_b_v import one_f_one_b_v

def mine(request):
    plan = one_f_one_b_v(request)
    both = lambda op: ((B, *op[1:]), (W, *op[1:])) if op[0] == BW else (op,)
    rows = tuple(tuple(one for op in row for one in both(op)) for row in plan.rows)
    return dataclasses.replace(plan, schedule="mine", rows=rows)

schedules.SCHEDULES["mine"] = schedules.Schedule("mine", "v", mine, chunks=2, microbatches_a_rank=3)

from megatron.training.run.arguments import ConfigurationError, parse_config
from megatron.training.config.launch_env import LaunchEnv
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.pipeline_summary import pipeline_facts
from tools import show_schedule

def facts(schedule, batch):
    words = f"--micro-batch-size 1 --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    words = [*sys.argv[1:], *words.split(), "--global-batch-size", str(batch)]
    try:
        return pipeline_facts(parse_config(words, env=LaunchEnv(world_size=2)).planner().spec, batch)
    except ConfigurationError as error:
        return [str(one.message) for one in error.problems]

shown = io.StringIO()
with contextlib.redirect_stdout(shown):
    show_schedule.main("--schedule mine --stages 2 --microbatches 6 --format json".split())
print(json.dumps([facts("mine", 8), facts("mine", 4), facts("auto", 8), json.loads(shown.getvalue())]))
"""


def test_a_row_is_all_that_a_new_schedule_needs():
    words = [sys.executable, "-c", NEW, *SMALL]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run, few, auto, shown = json.loads(done.stdout.splitlines()[-1])
    assert (run["schedule"], run["chunks"], len(run["stages"])) == ("mine", 2, 4)
    assert few == [
        "--global-batch-size 4 has 4 microbatches a rank, fewer than three a pipeline rank, 6, which mine needs"
    ]
    assert any(line.startswith("mine: ") for line in auto["reasons"])
    assert shown["order"][0][-2:] == ["0B5", "0W5"]


def test_the_fewest_microbatches_are_what_generators_take():
    for name, row in SCHEDULES.items():
        least = row.least_microbatches(4)
        build_plan(row.name, Request(4, least))
        if least > 1:
            with pytest.raises(PlanError, match=name):
                build_plan(row.name, Request(4, least - 1))
    assert SCHEDULES["interleaved"].least_microbatches(4, 6) == 6


def test_placements_are_those_of_plans():
    for row in SCHEDULES.values():
        assert build_plan(row.name, Request(4, 8)).placement == row.placed(4)
    assert interleaved(Request(4, 8, 3)).placement == SCHEDULES["interleaved"].placed(4, 3)
