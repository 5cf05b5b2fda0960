"""Run the CPU suite in parts, some at a time: `make test`.

Options are pytest's: `python tools/run_tests.py -m "not full" --durations=10`. Parts are forks of this process, which
has imported what takes seconds. What a part says is printed when it has ended, with the time of all its processes on a
core; the exit status is 1 if any failed.

Of the tests marked `grid` (tests/harness/grid.py) as many are run as BUDGET_S has room for beside the others.
`--record-seconds` runs all of them, writes tests/grid_seconds.csv anew, and says which others take longest.
"""

from __future__ import annotations

import csv
import gc
import importlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
AT_ONCE = len(os.sched_getaffinity(0)) + 2  # tests wait for other ranks, for files and for time to pass
BUDGET_S = 1050.0  # of a core, as tests/grid_seconds.csv counts: within 11 minutes of two free ones
RECORD = "--record-seconds"
LONG = 100  # tests that are named where they are recorded
# The longest first, so that the last ones end together; then each folder of what these do not name. A file is in the
# first part that names it. What imports transformers, which takes 4 s, is one part.
LONGEST = (
    "functional_tests/front_door",
    "functional_tests/test_[m-p]*.py",
    "functional_tests/doors_again",
    "unit_tests/training",
    "**/interchange parity/*hugging*.py",
    "parity/test_[a-o]*.py",
    "parity/test_[p-z]*.py",
    "functional_tests/test_[q-z]*.py",
    "functional_tests/test_*.py",
    "unit_tests/core/pipeline_parallel/plan/test_budget_search*.py",
    "unit_tests/core/pipeline_parallel/plan/test_*.py",
    "unit_tests/core/pipeline_parallel/plan",
    "unit_tests/core/test_*.py",
    "unit_tests/core/distributed/custom_fsdp",
    "unit_tests/core/distributed",
    "unit_tests/tools unit_tests/docs",
    "functional_tests/what_is_seen",
    "unit_tests/estimate unit_tests/harness",
    "unit_tests/core/dist_checkpointing",
    "unit_tests/core/pipeline_parallel",
    "unit_tests/core",
    "unit_tests",
)
IMPORTED = (
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.testing",
    "megatron.training.run.training",
)
SAID = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


class Running(NamedTuple):
    """A part under way. output: what it says."""

    name: str
    output: IO[bytes]


def parts(tests: Path = TESTS) -> dict[str, list[Path]]:
    """Test files of each part: every one is in exactly one of them."""
    left = dict.fromkeys(files_of(tests))
    made = {}
    for patterns in LONGEST:
        paths = [path for pattern in patterns.split() for path in sorted(tests.glob(pattern))]
        named = [file for path in paths for file in files_of(path) if file in left]
        made[patterns] = named
        left = {file: None for file in left if file not in set(named)}
    for file in left:
        made.setdefault(str(file.parent.relative_to(tests)), []).append(file)
    return {name: files for name, files in made.items() if files}


def files_of(path: Path) -> list[Path]:
    """Test files at or below a path."""
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def main(options: Sequence[str]) -> int:
    """Run all parts; the exit status."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    with tempfile.TemporaryFile("w+", newline="") as taken:
        plugin = _grid(None if RECORD in options else BUDGET_S, taken)
        status, used = _run_parts([option for option in options if option != RECORD], plugin)
        if RECORD in options:
            _record(taken, used)
    return status


def _grid(budget: float | None, taken: IO[str]) -> Any:
    """The plugin for each part, once it is said what it runs. budget: None for all. taken: what all parts write to."""
    grid = importlib.import_module("tests.harness.grid")
    if budget is None:
        return grid.Grid(None, {}, taken)
    seconds = grid.read_seconds()
    room = budget - seconds.pop(grid.OTHERS)
    commits = grid.commits(ROOT)
    chosen = grid.choose(seconds, room, commits)
    print("\n".join(f"grid: {test}" for test in chosen))
    need, of = sum(map(seconds.__getitem__, chosen)), sum(seconds.values())
    by = f"by commit {commits[0][:12]}" if commits else "by no commit: this is no repository"
    print(
        f"grid: {len(chosen)} of {len(seconds)} tests, {need:.0f} of {of:.0f} s of a core, {by}\n", flush=True
    )
    return grid.Grid(chosen, seconds, taken)


def _record(taken: IO[str], used: float) -> None:
    """Write tests/grid_seconds.csv, and print the longest tests that every run has. used: by all tests."""
    grid = importlib.import_module("tests.harness.grid")
    taken.seek(0)
    rows = [(test, float(took), bool(marked)) for test, took, marked in csv.reader(taken)]
    seconds = {test: took for test, took, marked in rows if marked}
    grid.write_seconds({grid.OTHERS: used - sum(seconds.values()), **seconds})
    others = sorted(((took, test) for test, took, marked in rows if not marked), reverse=True)
    print("\n".join(["in every run:", *(f"{took:8.2f} s of a core  {test}" for took, test in others[:LONG])]))


def _run_parts(options: Sequence[str], plugin: Any) -> tuple[int, float]:
    """The exit status, and seconds of a core."""
    start, counts, failed, used = time.monotonic(), Counter[str](), False, 0.0
    waiting, running = parts(), dict[int, Running]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = next(iter(waiting))
            one, files = Running(name, tempfile.TemporaryFile()), waiting.pop(name)  # noqa: SIM115
            if (pid := os.fork()) == 0:
                sys.exit(_run(files, options, one.output, plugin))
            running[pid] = one
        pid, status, spent = os.wait4(-1, 0)
        name, output = running.pop(pid)
        with output:
            output.seek(0)
            said = output.read().decode(errors="replace").rstrip()
        seconds = spent.ru_utime + spent.ru_stime
        print(f"{said} ({seconds:.0f} s of a core): {name}\n", flush=True)
        failed, used = failed or status not in (0, _NOTHING << 8), used + seconds
        counts.update({what: int(number) for number, what in SAID.findall(said.rpartition("\n")[2])})
    summary = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{summary} in {time.monotonic() - start:.0f} s, {used:.0f} s of a core")
    return int(failed), used


_NOTHING = 5  # pytest's status where no test of a part is asked for


def _run(files: Sequence[Path], options: Sequence[str], output: IO[bytes], plugin: Any) -> int:
    """In a part's own process: pytest's exit status."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins that are imported already
    return int(importlib.import_module("pytest").main([*quiet, *options, *map(str, files)], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
