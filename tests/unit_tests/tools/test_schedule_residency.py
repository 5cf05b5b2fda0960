"""What show_schedule says of gathers and reductions: counts by hand, bytes, time, and the row that the docs explain."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.unit_tests.tools.test_show_schedule import SMALL, TOOL, output, run
from tools import show_schedule

# Two stages of two layers; each rank goes through its layers a, b up in F and down in BW.
TWO = ("--schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--data-parallel-size", 2, "--num-layers", 4)
ROOT = TOOL.parents[1]


def residency(*words):
    return json.loads(output(*TWO, *words, "--format", "json"))["residency"]


def counts(found):
    return [(one["gathers"], one["reductions"]) for one in found["ranks"]]


def test_memory_gathers_for_each_use_and_step_once():
    found = residency()
    # Rank 0: F0 F1 BW0 BW1 = ab ab ba ba, which is a b a b a b a with neighbours together; rank 1: ab ba ab ba.
    assert counts(found) == [(7, 4), (5, 4)]
    assert [one["moved"] for one in found["ranks"]] == [11, 9]
    assert (found["strategy"], found["policy"], found["unit"]) == ("optim_grads_params", "memory", "layers")
    assert all(one["most_gathered"] <= 2 for one in found["ranks"])
    kept = residency("--fsdp-reshard-policy", "step")
    assert counts(kept) == [(2, 2), (2, 2)]
    assert [(one["most_gathered"], one["most_gradients"]) for one in kept["ranks"]] == [(2, 2), (2, 2)]


def test_a_budget_lies_between_and_other_strategies_gather_once_or_never():
    budget = ("--fsdp-reshard-policy", "budget", "--fsdp-memory-budget")
    assert counts(residency(*budget, 0)) == counts(residency())
    assert counts(residency(*budget, 100)) == [(2, 2), (2, 2)]
    sums = [sum(map(sum, counts(residency(*budget, most)))) for most in range(5)]
    assert sums == sorted(sums, reverse=True)
    strategy = "--data-parallel-sharding-strategy"
    assert counts(residency(strategy, "optim")) == [(2, 2), (2, 2)]
    assert counts(residency(strategy, "optim_grads")) == [(2, 4), (2, 4)]
    assert counts(residency(strategy, "no_shard")) == [(0, 2), (0, 2)]


def test_bytes_and_time():
    free, busy = residency("--layer-bytes", 1000), residency("--layer-bytes", 1000, "--time-gather", 0.5)
    assert free["unit"] == "bytes"
    assert [one["moved"] for one in free["ranks"]] == [11_000, 9_000]
    assert [(one["lane_share"], one["exposed"]) for one in free["ranks"]] == [(0, 0), (0, 0)]
    assert free["makespan"] == 9
    assert busy["makespan"] > 9
    assert busy["ranks"][0]["exposed"] >= 0.5  # nothing hides the first gather
    assert sum(one["lane_share"] for one in busy["ranks"]) > 0


def test_todays_figures_stay():
    plain = json.loads(output(*TWO[:6], "--format", "json"))
    with_residency = json.loads(output(*TWO, "--time-gather", 0.5, "--format", "json"))
    found = with_residency.pop("residency")
    assert {**with_residency, "solve_seconds": 0} == {**plain, "solve_seconds": 0}
    row = found["ranks"][1]["order"]
    assert [op for op in row if "UN" not in op and "RE" not in op] == plain["order"][1]
    assert row[0].startswith("1UNSHARD")
    assert row[-1] == "1REDUCE[0:1]"
    assert output(*TWO).startswith(output(*TWO[:6]))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*SMALL, "--num-layers", 6), "take both --data-parallel-size and --num-layers"),
        ((*TWO, "--num-layers", 5), "--num-layers 5: 2 stages of equal layers"),
        ((*TWO, "--num-layers", 0), "--num-layers 0: 2 stages of equal layers"),
        ((*TWO, "--data-parallel-size", 1), "--data-parallel-size 1: one rank has nobody"),
        (("--fsdp-reshard-policy", "step"), "--fsdp-reshard-policy without --data-parallel-size"),
        ((*TWO, "--fsdp-memory-budget", 1), "budget and --fsdp-memory-budget go together"),
        ((*TWO, "--fsdp-reshard-policy", "backward"), "use policy budget"),
        ((*TWO, "--format", "svg"), "show the plan of one --schedule"),
        ((*TWO, "--schedule", "1f1b", "gpipe"), "show the plan of one --schedule"),
    ],
)
def test_what_cannot_be_shown_is_refused(words, told):
    refused = run(*words)
    assert refused.returncode == 2
    assert told in refused.stderr


def test_the_life_of_a_step_in_the_docs_is_what_the_tool_says():
    page = (ROOT / "docs" / "pipelines.md").read_text()
    section = page[page.index("## Life of a step") :]
    command, row = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[:2]
    words = command.replace("\\\n", " ").split()
    assert words[:2] == ["python", "tools/show_schedule.py"]
    assert row in output(*words[2:])


# One limit of all that a rank holds: a model of four small layers, and activations in bytes.
LIMITED = (
    *"--schedule auto --stages 2 --microbatches 2 --data-parallel-size 2 --num-layers 8 --hidden-size 256".split(),
    *"--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 127 --bf16".split(),
)


@pytest.mark.grid
def test_one_limit_chooses_and_says_why(tmp_path):
    page = tmp_path / "page.html"
    words = (
        *LIMITED,
        "--rank-memory-limit",
        "64M",
        "--achieved-tflops",
        1,
        "--html",
        page,
        "--format",
        "json",
    )
    without = "sys.modules['torch'] = sys.modules['numpy'] = None; "
    program = f"import sys; {{}}sys.argv[0] = {str(TOOL)!r}\n"
    program += f"sys.path.insert(0, {str(ROOT)!r}); from tools.show_schedule import main; sys.exit(main())"
    for said, status in ((without, 2), ("", 0)):
        command = [sys.executable, "-c", program.format(said), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert ("torch is not there: pip install torch" in done.stderr) == (status == 2)
    told = json.loads(done.stdout)
    head, best, *others = told["reasons"]
    assert head.startswith("1 TFLOP/s and 45 GB/s to data parallel peers")
    assert best.endswith(": chosen")
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        assert any(f", {strategy}: " in line for line in others)
    assert all(0 < one["peak"] <= one["limit"] == 64 * 2**20 for one in told["residency"]["ranks"])
    assert 0 < told["makespan"] < 1  # seconds
    text = page.read_text()
    assert best.removesuffix(": chosen") in text
    assert ">limit 64 MiB<" in text


@pytest.mark.grid
def test_a_named_schedule_under_a_limit_chooses_the_rest(capsys):
    assert show_schedule.main([*LIMITED, "--schedule", "zb-1p", "--rank-memory-limit", "64M"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^zb-1p, \w+: chosen$", told, re.MULTILINE)
    groups = ("--microbatch-group-size-per-virtual-pipeline-stage", "1", "--chunks", "2", "--schedule", "gis")
    assert show_schedule.main([*LIMITED, "--rank-memory-limit", "64M", *groups]) == 0
    assert re.search(r"^gis, 2 chunks, groups of 1, \w+: chosen$", capsys.readouterr().out, re.MULTILINE)
    assert re.search(r"^rank 1: holds [\d.]+ MiB of 64 MiB; ", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory-limit", 3), "--rank-memory-limit with --memory-limit: "),
        (("--fsdp-memory-budget", 3), "--rank-memory-limit with --fsdp-memory-budget: "),
        (("--pipeline-memory-limit", "3G"), "with --pipeline-memory-limit 3221225472"),
        (("--data-parallel-size", 1), "takes --data-parallel-size N"),
        (("--schedule", "all"), "one --schedule, auto or by name"),
        (("--hiden-size", 8), "--hiden-size"),
        (("--rank-memory-limit", "2M"), "nothing fits; the least is that of"),
    ],
)
def test_what_does_not_go_with_one_limit_is_refused(words, told, capsys):
    line = [*LIMITED, "--rank-memory-limit", "64M", *words]
    assert show_schedule.main([*map(str, line)]) == 2
    assert told in capsys.readouterr().err


def test_the_trainers_flags_and_a_choice_of_strategies_are_of_a_limit(capsys):
    with pytest.raises(SystemExit, match="2"):
        show_schedule.main([*LIMITED])
    assert "unrecognized arguments: --hidden-size" in capsys.readouterr().err
    assert show_schedule.main([*map(str, TWO), "--data-parallel-sharding-strategy", "auto"]) == 2
    assert "auto without --rank-memory-limit" in capsys.readouterr().err


def test_gathers_are_drawn_below_computations(tmp_path):
    told = json.loads(output(*TWO, "--html", tmp_path / "page.html", "--format", "json"))
    text = (tmp_path / "page.html").read_text()
    assert ">memory: gathered weights<" in text
    peaks = [f"peak {one['most_transient']}" for one in told["residency"]["ranks"]]
    assert re.findall(r">(peak \d+)<", text) == peaks
