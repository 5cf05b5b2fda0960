"""12: a step has one planned and one measured bubble: the log, its record, the timeline and the report's picture give
the same two numbers; the picture of the README is that of the default flags."""

import json
import re
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.measuring.measured_costs import median
from megatron.core.words import share_text
from tests.harness import launch
from tools import show_schedule
from tools.reports.pipeline import measured_step
from tools.schedules.overlay import chosen_step

ROOT = Path(__file__).parents[3]
FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 4 --pipeline-model-parallel-size 2".split(),
    *"--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --save ck --save-interval 9".split(),
    *"--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 4".split(),
    *"--log-pipeline-timeline timeline --log-interval 1".split(),
]
SAID = re.compile(r"^ pipeline bubble of iteration (\d+): planned (\S+)%, measured (\S+)%$", re.M)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two pipelines of two ranks, whose plan is made again behind iteration 3."""
    folder = tmp_path_factory.mktemp("bubbles")
    return folder, launch.ok(launch.run_forked(FLAGS, ranks=4, cwd=folder)).output


def shown(folder, iteration, capsys):
    words = ["--measured", str(folder / "timeline"), "--iteration", str(iteration), "--format", "json"]
    assert show_schedule.main(words) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.grid
def test_log_record_and_timeline_say_the_same_two_numbers_of_every_step(run, capsys):
    folder, output = run
    said = {int(one[1]): (float(one[2]), float(one[3])) for one in SAID.finditer(output)}
    assert list(said) == [1, 2, 3, 4]
    records = {
        one["iteration"]: one for one in launch.metrics_lines(folder / "ck") if "planned-bubble" in one
    }
    for iteration, both in said.items():
        recorded = [100 * records[iteration][f"{name}-bubble"] for name in ("planned", "measured")]
        assert recorded == pytest.approx(both, abs=0.006)  # of rounding to hundredths
        drawn = shown(folder, iteration, capsys)
        of_timeline = [share_text(drawn[name]["bubble_rate"], 2) for name in ("planned", "measured")]
        assert of_timeline == [f"{one:.2f}%" for one in both], iteration


@pytest.mark.grid
def test_the_picture_of_a_report_is_of_the_same_step(run, capsys):
    folder, _ = run
    rates = [shown(folder, 4, capsys)[name]["bubble_rate"] for name in ("planned", "measured")]
    note = measured_step(folder / "timeline").note
    assert [f"{rate:.2%}" in note for rate in rates] == [True, True], note


def test_the_plan_of_a_timeline_is_timed_by_medians(run, capsys):
    """As a run solves its schedule again by, which one slow microbatch does not move."""
    folder, _ = run
    step = chosen_step(folder / "timeline", 2)
    times = [
        round(1e9 * span.busy_s)
        for op, span in zip(step.plan.rows[0], step.spans[0], strict=True)
        if op[0] == 0
    ]
    found = shown(folder, 2, capsys)
    assert found["ranks"] == list(step.pipeline)
    assert found["median_time"]["F"][0] == pytest.approx(median(times) / 1e9, abs=2e-9)


def test_the_picture_of_readme_is_that_of_the_default_flags():
    picture, text = ((ROOT / name).read_text() for name in ("docs/img/timeline.svg", "README.md"))
    assert "zbv: step time 25.5, bubble 5.9%; with optimizer post-validation step time 24" in picture
    assert "the zero-bubble V takes 25.5 and waits 5.9 %](docs/img/timeline.svg)" in text
