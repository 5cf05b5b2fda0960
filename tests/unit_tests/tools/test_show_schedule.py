import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.text import from_json
from tests.harness.scripts import run_script
from tools.drawing.page import ZOOM

TOOL = Path(__file__).resolve().parents[3] / "tools" / "show_schedule.py"
SMALL = ("--schedule", "1f1b", "--stages", 3, "--microbatches", 4)


def run(*words):
    return run_script("tools/show_schedule.py", *words)


def output(*words):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_fields_and_figures():
    result = json.loads(output(*SMALL, "--format", "json"))
    seconds = result.pop("solve_seconds")
    assert 0 < seconds < 60
    assert result == {
        "schedule": "1f1b",
        "stages": 3,
        "microbatches": 4,
        "makespan": 18,
        "bubble_time": 6,
        "bubble_rate": pytest.approx(2 / 6),
        "peak_activation": [3, 2, 1],
        "order": [
            "0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3".split(),
            "1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3".split(),
            "2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3".split(),
        ],
        "p2p_messages": 16,
        "p2p_bytes": None,
    }


def test_messages_are_bytes_once_their_size_is_known():
    told = json.loads(output(*SMALL, "--format", "json", "--message-bytes", 1000))
    assert (told["p2p_messages"], told["p2p_bytes"]) == (16, 16_000)


def test_costs_a_stage_and_memory():
    words = (
        "--time-f",
        1,
        2,
        1,
        "--time-b",
        1.5,
        "--time-w",
        0.5,
        "--time-comm",
        0.25,
        "--memory-after-b",
        0.5,
    )
    result = json.loads(output(*SMALL, *words, "--format", "json"))
    # the middle stage is busy from 1.25 on: 4 x (2 + 2), and waits once for the way to the last stage and back
    assert result["bubble_time"] == pytest.approx(result["makespan"] - 16)
    commas = json.loads(output(*SMALL, "--time-f", "1,2,1", *words[4:], "--format", "json"))
    assert {**commas, "solve_seconds": 0} == {**result, "solve_seconds": 0}
    assert json.loads(output(*SMALL, "--memory-limit", 3, "--format", "json"))["makespan"] == 18
    refused = run(*SMALL, "--memory-limit", 2.5)
    assert refused.returncode == 2
    told = (
        "1f1b needs 3 activations on rank 0, more than --memory-limit 2.5: v-half, v-min, zb-1p, zb-2p, zbv "
    )
    assert (
        f"{told}keep to a limit; --schedule auto takes the fastest that does, or give 3 or more"
        in refused.stderr
    )


def test_other_formats():
    assert from_json(output(*SMALL, "--format", "plan")).has_transfers
    assert output(*SMALL, "--format", "torch-csv").splitlines()[2] == "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3"
    ET.fromstring(output(*SMALL, "--format", "svg"))
    assert json.loads(output(*SMALL, "--format", "trace"))["traceEvents"]
    assert output(*SMALL).startswith(
        "1f1b: 3 ranks x 1 chunk, 4 microbatches, step time 18, bubble 6 (33.33%)"
    )


def test_text_has_a_largest_width():
    lines = output(*SMALL, "--time-f", 1e-9, "--time-b", 1000).splitlines()[1:]
    assert [len(line.split("|")[1]) for line in lines] == [20_000] * 3
    assert "0BW0" in lines[0]


def test_groups_larger_than_the_pipeline_hide_latency():
    """The figures of docs/pipelines.md."""
    words = (
        "--schedule",
        "interleaved",
        "--stages",
        4,
        "--microbatches",
        16,
        "--chunks",
        2,
        "--time-comm",
        0.25,
    )
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    results = [json.loads(output(*words, *more, "--format", "json")) for more in ((), (group, 4), (group, 8))]
    assert [result["bubble_rate"] for result in results] == pytest.approx([1 / 7, 1 / 7, 1 / 9])
    assert [result["peak_activation"][0] for result in results] == [5.5, 5.5, 7.5]


def test_the_same_words_give_the_same_plan():
    words = ("--schedule", "interleaved", "--stages", 2, "--microbatches", 3, "--format", "plan")
    first, second = output(*words), output(*words)
    assert first == second
    assert plan_hash(from_json(first)) in first
    assert from_json(first).placement.num_chunks == 2
    assert from_json(output(*words, "--chunks", 3)).placement.num_chunks == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "2f2b", "--stages", 2, "--microbatches", 2), "unknown; there are gpipe, 1f1b"),
        (("--schedule", "interleaved", "--stages", 4, "--microbatches", 3), "group size, 4, of microbatches"),
        (("--schedule", "gpipe", "--stages", 0, "--microbatches", 3), "ranks must be at least 1, not 0"),
        ((*SMALL, "--time-f", 1, 2), "time of F: 2 numbers for 3 stages"),
        ((*SMALL, "--time-w", -1), "--time-w: -1: must be finite and at least 0"),
        ((*SMALL, "--time-f", "1,-1,1"), "--time-f: 1,-1,1: must be finite and at least 0"),
        ((*SMALL, "--time-b", "nan"), "--time-b: nan: must be finite and at least 0"),
        ((*SMALL, "--time-b", "inf"), "--time-b: inf: must be finite and at least 0"),
        ((*SMALL, "--time-comm", "inf"), "--time-comm: inf: must be finite and at least 0"),
        ((*SMALL, "--memory-limit", "nan"), "--memory-limit: nan: must be finite and at least 0"),
        ((*SMALL, "--memory-limit", -1), "--memory-limit: -1: must be finite and at least 0"),
        ((*SMALL, "--time-f", 1.7e308, "--format", "json"), "must be 0, or from 1e-150 to 1e+150"),
        ((*SMALL, "--time-f", 1e307, "--format", "trace"), "in another unit"),
        ((*SMALL, "--time-w", "1,x"), "--time-w: invalid"),
        ((*SMALL, "--format", "png"), "invalid choice"),
        (("--schedule", "1f1b"), "--stages and --microbatches must be given"),
        ((*SMALL, "--microbatch-group-size-per-virtual-pipeline-stage", 4), "no microbatch groups"),
        ((*SMALL, "--memory-limit", 3, 2), "--memory-limit: 2 numbers for 3 ranks; give 1 or all"),
        (
            (*SMALL, "--memory-limit", "3,2,0.5"),
            "1f1b needs 1 activations on rank 2, more than --memory-limit 0.5",
        ),
        (("--schedule", "1f1b", "zbv", "1f1b"), "--schedule names 1f1b twice"),
        (("--schedule", "1f1b", "zbv", "--stages", 2), "--microbatches must be given"),
        (
            ("--schedule", "1f1b", "zbv", "--stages", 2, "--microbatches", 2, "--format", "plan"),
            "of one schedule",
        ),
        ((*SMALL, "--html", "/proc/no/page.html"), "--html /proc/no/page.html: "),
        ((*SMALL, "--playground", "page.html"), "leave the other flags out"),
        (
            ("--schedule", "auto", "--stages", 2, "--microbatches", 4, "--memory-limit", 0.1),
            "no pipeline schedule can run within the memory limit",
        ),
        (
            ("--schedule", "v-min", "zb-1p", "--stages", 2, "--microbatches", 4, "--memory-limit", 0.1),
            "v-min: ",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


@pytest.mark.grid
def test_auto_says_why_and_keeps_to_the_limit_of_each_rank():
    words = ("--schedule", "auto", "--stages", 4, "--microbatches", 8)
    lines = output(*words).splitlines()
    reasons = lines[: len(SCHEDULES)]
    assert {line.split(":")[0] for line in reasons} == set(SCHEDULES)
    (chosen,) = [line for line in reasons if line.endswith("chosen")]
    assert chosen.startswith(lines[len(SCHEDULES)].split(":")[0])
    limited = json.loads(output(*words, "--memory-limit", 3, 2, 3, 4, "--format", "json"))
    free = json.loads(output(*words, "--format", "json"))
    assert all(peak <= limit for peak, limit in zip(limited["peak_activation"], (3, 2, 3, 4), strict=True))
    assert limited["makespan"] > free["makespan"]
    assert any("too much memory" in reason for reason in limited["reasons"])
    plan = run(*words, "--memory-limit", 3, "--format", "plan")  # a file on stdout, the reasons beside it
    assert from_json(plan.stdout).schedule == limited["schedule"]
    assert "chosen" in plan.stderr


def test_a_searched_schedule_is_made_for_costs_and_limit():
    words = ("--schedule", "zbv", "--stages", 4, "--microbatches", 8, "--format", "json")
    tight = json.loads(output(*words, "--memory-limit", 2.5))
    assert max(tight["peak_activation"]) <= 2.5
    assert tight["order"] != json.loads(output(*words))["order"]


def test_several_schedules_beside_each_other(tmp_path):
    words = ("--schedule", "1f1b", "zb-1p", "gpipe", "--stages", 3, "--microbatches", 4)
    text = output(*words)
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert rows == ["schedule", "-" * 10, "1f1b", "zb-1p", "gpipe"] or rows[2:] == ["1f1b", "zb-1p", "gpipe"]
    # one scale: an operation of the same time is as wide
    first = [line for line in text.splitlines() if line.startswith("0 |")]
    assert len({line.index("0F1") - line.index("0F0") for line in first}) == 1
    told = json.loads(output(*words, "--memory-limit", 3, "--format", "json"))
    assert [one["name"] for one in told] == ["1f1b", "zb-1p", "gpipe"]
    assert [bool(one["problem"]) for one in told] == [False, False, True]
    assert told[0]["bubble_rate"] > told[1]["bubble_rate"]
    table = output(*words, "--format", "table", "--memory-limit", 3)
    assert "needs 4 activations on rank 0, the limit is 3" in table
    assert table.count("\n") == 5


def test_one_page_and_pictures_on_one_axis(tmp_path):
    page, folder = tmp_path / "new" / "page.html", tmp_path / "pictures"
    words = ("--schedule", "all", "auto", "--stages", 2, "--microbatches", 4, "--memory-limit", 2)
    done = run(*words, "--html", page, "--pictures", folder)
    assert done.returncode == 0, done.stderr
    assert f"wrote {page}" in done.stderr
    text = page.read_text()
    assert "<script" not in text.replace(ZOOM, "")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "chosen" in text
    names = {path.stem for path in folder.iterdir()}
    assert set(SCHEDULES) <= names
    widest = {name: (folder / f"{name}.svg").read_text() for name in ("1f1b", "zbv")}
    ends = {
        name: max(int(right) for right in re.findall(r"M\d+ \d+H(\d+)V\d+H\d+z", svg))
        for name, svg in widest.items()
    }
    makespans = {
        name: json.loads(output("--schedule", name, *words[3:-2], "--memory-limit", 2, "--format", "json"))[
            "makespan"
        ]
        for name in ends
    }
    assert ends["zbv"] / ends["1f1b"] == pytest.approx(makespans["zbv"] / makespans["1f1b"], rel=2e-3)


def test_table_and_pictures_of_the_document_are_those_of_the_tool():
    text = (TOOL.parents[1] / "docs" / "pipelines.md").read_text()
    command = next(line for line in text.splitlines() if "--format table`" in line)
    words = shlex.split(command.split("`")[1])[2:]
    assert output(*words) in text
    commands = [line.split("`")[1] for line in text.splitlines() if "--pictures docs/" in line]
    words = shlex.split(commands[0])[2:]
    folder = TOOL.parents[1] / words[words.index("--pictures") + 1]
    told = json.loads(output(*words[: words.index("--pictures")], "--format", "json"))
    assert {path.stem for path in folder.iterdir()} == set(SCHEDULES)
    for one in told:
        svg = (folder / f"{one['name']}.svg").read_text()
        assert f"{one['name']}, bubble {one['bubble_rate']:.1%}</text>" in svg
        assert f"({folder.parent.name}/{folder.name}/{one['name']}.svg)" in text


def test_it_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy here')")
    code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(TOOL), *map(str, SMALL)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
