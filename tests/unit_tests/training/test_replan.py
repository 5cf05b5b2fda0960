"""When the pipeline is measured and solved again, and what is said of it; ranks are played by one process."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest

from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.plan.text import from_json
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.exit_status import ExitStatus, TrainingExit
from megatron.training.report.plan_facts import check_same_plan
from megatron.training.run.arguments import parse_config
from megatron.training.run.measuring import PLAN_FILE, Measuring
from megatron.training.run.parts import RunParts
from megatron.training.state import StepTask
from tests.harness import launch
from tests.harness.measured_runs import figures_of_run

RANKS, MICROBATCHES = 3, 8


class World:
    """A run of several ranks, of which this is the last: what they measured is made of costs."""

    def __init__(self, flags, first=1, log_interval=1):
        words = [
            *launch.TINY,
            *f"--num-layers 6 --train-iters 4 --pipeline-model-parallel-size {RANKS}".split(),
        ]
        words += f"--global-batch-size {MICROBATCHES} --log-interval {log_interval}".split()
        words += "--zero-bubble-pipeline-timers-start-iter 3 --zero-bubble-pipeline-timers-end-iter 6".split()
        env = LaunchEnv(world_size=RANKS, rank=0)
        config = parse_config([*words, "--padded-vocab-size", "128", *flags.split()], env=env)
        self.planner = config.planner()
        self.costs = CostModel.of_ranks(self.spec.placement, time_w=(0.3,), time_f=(1.0, 3.0, 1.0), comm=0.2)
        self.steps, self.ran, self.window = [], {}, None
        self.said, self.hashes, self.lost = [], [], False
        ps = SimpleNamespace(
            pp_rank=RANKS - 1, is_last_rank=True, is_fake=False, pp_group=SimpleNamespace(ranks=range(RANKS))
        )
        self.session = SimpleNamespace(
            config=config,
            ps=ps,
            gather=self.gather,
            watchdog=SimpleNamespace(phase=lambda _name: contextlib.nullcontext()),
            print_rank_0=lambda *_, **__: None,
        )
        engine = SimpleNamespace(chunks=[])
        self.profiler, self.first = self, self.spec
        parts = RunParts(self.session, engine, self, None, None)
        parts.reporter = self
        self.measuring = Measuring(parts)
        self.measuring.begin(first)

    # the runner
    wire = None

    @property
    def spec(self):
        return self.planner.spec

    @property
    def plan(self):
        return plan_for(self.spec, MICROBATCHES, PlanPurpose.TRAIN)

    # the profiler
    def measure_link(self):
        pass  # figures have that of the costs

    def step_of(self, iteration):
        return SimpleNamespace(plan=self.ran[iteration]) if iteration in self.ran else None

    def figures_of_step(self, iteration):
        return self.figures(iteration)[-1] if iteration in self.steps else None

    def figures(self, iteration=None):
        made = figures_of_run(self.plan, self.costs)
        for one in made:
            one["steps"] = [[iteration or self.steps[-1], *one["steps"][-1][1:]]]
        return made

    def local_figures(self, until, link_ns):
        return self.figures()[-1]

    def forget(self, until=10**9):
        self.steps = [step for step in self.steps if step > until]

    def move_window(self, start, end):
        self.window = start, end

    # the reporter
    def planned_again(self, plan):
        self.said.append(plan)

    # the other ranks
    def gather(self, value):
        value = json.loads(json.dumps(value))
        if isinstance(value, str):
            self.hashes.append(value)
            return [value] * RANKS
        if not isinstance(value, list):  # a log interval
            return self.figures(value["steps"][0][0] if value else None)
        first, second = value
        if self.lost:
            return [[first, second], [None, True], [None, True]]
        return [[figures, second] for figures in self.figures()]

    def run(self, iteration):
        if (
            self.window[0] <= iteration < self.window[1]
            or not iteration % self.session.config.logging.log_interval
        ):
            self.steps.append(iteration)
            self.ran[iteration] = self.plan

    def step(self, iteration, ahead=False):
        """ahead: the one behind it has run by then, as with post-validation; this one then had."""
        self.run(iteration + ahead)
        bubbles, _ = self.measuring.after_step(StepTask(iteration, MICROBATCHES))
        self.measuring.between_steps(StepTask(iteration, MICROBATCHES))
        return bubbles


def test_solved_once_at_the_end_of_the_window(tmp_path):
    world = World(f"--pipeline-schedule zb-1p --save {tmp_path} --save-interval 100")
    old = world.plan
    bubbles = [world.step(iteration) for iteration in range(1, 5)]
    assert not world.said
    assert [one.iteration for one in bubbles] == [1, 2, 3, 4]
    world.step(5)
    (told,) = world.said
    new = world.plan
    assert (told.iteration, told.kept, told.solved) == (5, None, True)
    assert told.f_ms == pytest.approx((1000, 3000, 1000))
    assert told.comm_ms == pytest.approx(200)
    assert told.planned_bubble < told.planned_bubble_before
    assert new.rows != old.rows
    assert world.hashes == [told.hash] == [plan_hash(new)]
    assert world.spec != world.first
    assert from_json((tmp_path / PLAN_FILE).read_text()).rows == new.rows
    # what runs as planned is measured as planned
    after = world.step(6)
    assert after.planned == pytest.approx(told.planned_bubble) == pytest.approx(after.measured, abs=1e-6)
    world.step(7)
    world.costs = dataclasses.replace(world.costs, f=(3.0, 1.0, 1.0))
    for iteration in range(8, 12):
        world.step(iteration)
    assert len(world.said) == 1


def test_fixed_orders_are_measured_only():
    world = World("--pipeline-schedule zb-h1")
    for iteration in range(1, 6):
        world.step(iteration)
    (told,) = world.said
    assert (told.kept, told.solved, world.spec) == ("zb-h1 is a fixed order", False, world.first)
    assert told.path is None


def test_steps_that_are_decided_on_while_the_next_one_runs():
    """Each has its bubble, and the window all of its iterations."""
    world = World("--pipeline-schedule zb-1p")
    world.run(1)
    told = [world.step(iteration, ahead=True) for iteration in range(1, 3)]
    assert [one.iteration for one in told] == [1, 2]
    assert world.steps == [3]
    world.step(3, ahead=True)
    world.step(4, ahead=True)
    assert world.steps == [3, 4, 5]
    assert not world.said
    world.step(5, ahead=True)
    assert [one.iteration for one in world.said] == [5]


def test_bubbles_are_told_at_log_intervals():
    world = World("--pipeline-schedule zb-1p", log_interval=4)
    told = [world.step(iteration) for iteration in range(1, 9)]
    assert [one.iteration for one in told if one is not None] == [4, 8]
    assert len(world.said) == 1


def test_a_window_in_which_a_rank_measured_nothing_is_repeated():
    world = World("--pipeline-schedule zb-1p", log_interval=100)
    world.lost = True
    for iteration in range(1, 6):
        world.step(iteration)
    assert (world.said, world.window) == ([], (6, 9))
    world.lost = False
    for iteration in range(6, 9):
        world.step(iteration)
    assert [one.iteration for one in world.said] == [8]


@pytest.mark.parametrize(
    ("first", "window"),
    [(1, (100, 10)), (100, (100, 10)), (101, (102, 10)), (500, (501, 10))],
)
def test_a_run_resumed_behind_the_start_measures_later(first, window):
    assert ModelParallelConfig().measured_window(first) == window


def test_a_resumed_run_has_a_window_of_its_own():
    assert World("", first=50).window == (51, 54)


def test_ranks_with_different_plans_are_refused_and_named():
    check_same_plan(["a" * 64] * 4)
    with pytest.raises(TrainingExit, match=r"rank 0 has aaaaaaaaaaaa, rank 2 has bbbbbbbbbbbb") as refused:
        check_same_plan(["a" * 64, "a" * 64, "b" * 64, "a" * 64])
    assert refused.value.status is ExitStatus.CONFIGURATION
    assert "--pipeline-schedule-file" in refused.value.reason
