"""tools/show_schedule.py --measured, over timelines written as a run writes them."""

import contextlib
import io
import json
import runpy
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import file_name, header_line, op_lines
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only, lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate

MAIN = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "show_schedule.py"))["main"]
COMM_S = 0.25


def run(*words):
    """In this process, with what the tool prints: a fifth of the time of a process each."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = MAIN([str(word) for word in words])
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def output(*words):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lowered(name, *words):
    plan = build_plan(name, Request(*words))
    return lower(plan, CostModel.of_ranks(plan.placement))


def write(folder, plan, pipeline, iterations, *, slower=1.0):
    """A run whose transfers take COMM_S and whose computations are `slower` than one second; ranks' clocks differ."""
    costs = CostModel.of_ranks(plan.placement, time_f=[slower], time_b=[slower], time_w=[slower], comm=COMM_S)
    simulation = simulate(plan, costs)
    for rank, row in enumerate(plan.rows):
        lines = [header_line(plan, rank, pipeline, 1000.0 - rank)]
        templates = op_lines(row)
        for iteration in iterations:
            begin = free = 100.0 * iteration + rank
            for place, template in enumerate(templates):
                start = begin + simulation.timeline.starts[rank][place]
                end = begin + simulation.timeline.ends[rank][place]
                lines.append(template % (iteration, free, end, start - free))
                free = end
        with (folder / file_name(pipeline[rank])).open("a") as file:
            file.writelines(lines)


@pytest.fixture
def folder(tmp_path):
    """Two pipelines of two ranks, of which the second is slower, and an evaluation in between. The slower
    one's are the figures."""
    plan = lowered("1f1b", 2, 4)
    write(tmp_path, plan, (0, 2), (1, 2), slower=0.5)
    evaluation = forward_only(build_plan("1f1b", Request(2, 4)))
    evaluation = lower(evaluation, CostModel.of_ranks(plan.placement))
    write(tmp_path, evaluation, (0, 2), (3,))
    write(tmp_path, plan, (1, 3), (1, 2))
    return tmp_path


def test_json_is_the_prediction_beside_the_run(folder):
    result = json.loads(output("--measured", folder, "--format", "json"))
    assert (result["iteration"], result["ranks"], result["schedule"]) == (2, [1, 3], "1f1b")
    assert result["hash"] == plan_hash(lowered("1f1b", 2, 4))
    assert result["median_time"] == {"F": pytest.approx([1, 1]), "BW": pytest.approx([2, 2])}
    assert (result["stages"], result["chunks"], result["microbatches"]) == (2, 1, 4)
    # the simulator knows of no latency: (p-1)/(m+p-1)
    assert result["planned"]["bubble_rate"] == pytest.approx(1 / 5)
    assert result["planned"]["cost"] == pytest.approx(15)
    plan = lowered("1f1b", 2, 4)
    real = simulate(plan, CostModel.of_ranks(plan.placement, comm=COMM_S))
    assert result["measured"]["cost"] == pytest.approx(real.cost, abs=1e-5)
    assert result["measured"]["bubble_rate"] == pytest.approx(real.bubble_rate, abs=1e-5)
    assert result["measured"]["idle"] == pytest.approx(real.idle, abs=1e-5)
    assert result["measured"]["bubble_rate"] > result["planned"]["bubble_rate"] + 0.01
    # told of the latency, the plan is what was measured
    told = json.loads(output("--measured", folder, "--format", "json", "--time-comm", COMM_S))
    assert told["planned"]["bubble_rate"] == pytest.approx(result["measured"]["bubble_rate"], abs=1e-5)


def test_flags_in_place_of_medians(folder):
    words = ("--measured", folder, "--iteration", 1, "--format", "json", "--time-f", 2, "--time-w", "0,0")
    result = json.loads(output(*words))
    assert result["iteration"] == 1
    assert result["planned"]["cost"] == pytest.approx(5 * (2 + 1))  # B is half of the measured BW
    assert result["measured"]["cost"] < 17


def test_drawings(folder):
    lines = output("--measured", folder).splitlines()
    assert lines[0] == "iteration 2, ranks 1, 3, seconds"
    assert lines[1].startswith(
        "planned 1f1b: 2 ranks x 1 chunk, 4 microbatches, step time 15, bubble 3 (20.00%)"
    )
    assert lines[4].startswith(
        "measured 1f1b: 2 ranks x 1 chunk, 4 microbatches, step time 16, bubble 4 (25.00%)"
    )
    assert [line.split("|")[1].split()[0] for line in lines[2:4]] == ["0F0", "....1F0"]
    root = ET.fromstring(output("--measured", folder, "--format", "svg"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}title"))) == 2 * 16
    events = json.loads(output("--measured", folder, "--format", "trace"))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"planned stage 0", "planned stage 1", "measured stage 0", "measured stage 1"}
    assert any(event["name"] == "wait for 1F0" for event in events)


def test_page_has_planned_measured_and_what_others_would_take(folder):
    page = folder / "page.html"
    words = ("--measured", folder, "--html", page, "--memory-limit", 2)
    table = output(*words, "--schedule", "1f1b", "zb-1p", "zbv", "gpipe")
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:]]
        for line in table.splitlines()
    }
    assert rows["1f1b"][:2] == ["15", "20.00%"]
    assert rows["1f1b, measured"][:2] == ["16", "25.00%"]
    assert float(rows["zbv"][0]) < float(rows["zb-1p"][0]) < 15  # of ranks that take 3 a microbatch
    assert rows["gpipe"][-2] == "needs 4 activations on rank 0, the limit is 2"
    text = page.read_text()
    assert text.count("From the run&#x27;s measured times of each stage.") == 2
    assert text.count("divided evenly over its chunks here") == 1
    assert ">measured<" in text
    refused = run(*words, "--schedule", "auto")
    assert refused.returncode == 2
    assert "compares schedules by name, not auto" in refused.stderr


def test_interleaving_is_rebuilt_from_the_files(tmp_path):
    plan = lowered("interleaved", 2, 7, 2, 4)
    write(tmp_path, plan, (0, 1), (5,))
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    words = ("--measured", tmp_path, "--format", "json")
    free = json.loads(output(*words))
    flags = ("--schedule", "interleaved", "--stages", 2, "--microbatches", 7, "--chunks", 2)
    assert json.loads(output(*words, *flags, group, 4)) == free
    assert (free["chunks"], len(free["median_time"]["F"])) == (2, 4)
    other = run(*words, *flags, group, 2)
    assert other.returncode == 2
    assert plan_hash(plan) in other.stderr
    assert plan_hash(lowered("interleaved", 2, 7, 2, 2)) in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--iteration", 9), "--iteration 9"),
        (("--format", "plan"), "--format plan says nothing of times"),
        (("--format", "torch-csv"), "use text, json, svg or trace"),
        (("--schedule", "1f1b"), "--stages and --microbatches must be given"),
        (
            ("--schedule", "gpipe", "--stages", 2, "--microbatches", 4),
            "is not that of the flags: its hash is",
        ),
        (("--schedule", "1f1b", "zbv"), "with --html others are compared with it"),
        (("--memory-limit", 1), "1f1b needs 2 activations on rank 0, more than --memory-limit 1"),
        (("--time-f", "1,2,3"), "time of F: 3 numbers for 2 stages"),
    ],
)
def test_what_does_not_fit_is_refused(folder, words, message):
    done = run("--measured", folder, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


def test_unusable_folders(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    broken = tmp_path_factory.mktemp("broken")
    (broken / "rank-00000.jsonl").write_bytes(b"\xff\xfe\n")
    short = tmp_path_factory.mktemp("short")
    write(short, lowered("1f1b", 1, 2), (0,), (1,))
    lines = (short / "rank-00000.jsonl").read_text().splitlines(keepends=True)
    (short / "rank-00000.jsonl").write_text("".join(lines[:-1]))
    (folder / file_name(2)).unlink()
    for where, message in (
        (empty / "nowhere", "there is no such folder"),
        (empty, "no timeline"),
        (broken, "--measured"),
        (short, "no step that all ranks"),
        (folder, "rank-00002.jsonl is missing"),
    ):
        done = run("--measured", where)
        assert done.returncode == 2, (where, done.stderr)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    alone = run("--iteration", 3)
    assert alone.returncode == 2
    assert "--iteration chooses a step of --measured" in alone.stderr
