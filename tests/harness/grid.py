"""Tests marked `grid`: layouts, kills, many seeds. A suite runs as many of them as its budget has room for.

What each takes is in tests/grid_seconds.csv: processor seconds, its forked ranks' among them, and in the first row
those of all tests that every run has. `tools/run_tests.py` chooses by the commit, says which, and writes the file
(`--record-seconds`). A plain pytest, and with it `make test-all`, runs every one.
"""

from __future__ import annotations

import csv
import hashlib
import math
import resource
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

SECONDS = Path(__file__).resolve().parents[1] / "grid_seconds.csv"
OTHERS = "every run"  # the row of tests that are not marked
COMMITS = 20  # of so many in a row, each test is in one suite at least: tests of this file see to it


def read_seconds(path: Path = SECONDS) -> dict[str, float]:
    """Test -> seconds, OTHERS among them."""
    with path.open(newline="") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def write_seconds(seconds: Mapping[str, float], path: Path = SECONDS) -> None:
    """In the order of names, OTHERS first."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("test", "seconds"))
        for test in sorted(seconds, key=lambda test: (test != OTHERS, test)):
            table.writerow((test, f"{seconds[test]:.2f}"))


def commits(root: Path) -> list[str]:
    """Hashes of this commit and those before it, the newest first; none outside a repository."""
    words = ["git", "rev-list", "--first-parent", "HEAD"]
    listed = subprocess.run(words, cwd=root, capture_output=True, text=True)
    return listed.stdout.split() if listed.returncode == 0 else []


def rounds(seconds: Mapping[str, float], room: float) -> int:
    """After how many commits each test has been in a suite, counted from the first of them on."""
    least = room - max(seconds.values(), default=0.0)  # of a suite that has no room for another test
    assert least > 0, f"{room:.0f} s for the grid, of which one test takes {room - least:.0f}"
    return max(1, math.ceil(sum(seconds.values()) / least))


def choose(seconds: Mapping[str, float], room: float, hashes: Sequence[str]) -> list[str]:
    """Tests that take `room` seconds at most.

    The hash of every n-th commit, n of `rounds`, shuffles all tests, and it and those behind it take a part each: of
    2 n - 1 commits in a row, each test is in one suite at least. What room a part leaves is filled by the commit's own
    hash. seconds: of each test, without OTHERS. hashes: of this commit and all before it.
    """
    hashes = hashes or [""]
    part = (len(hashes) - 1) % rounds(seconds, room)
    parts: list[list[str]] = [[]]
    for test in _shuffled(seconds, hashes[part]):
        if sum(map(seconds.__getitem__, parts[-1])) + seconds[test] > room:
            parts.append([])
        parts[-1].append(test)
    chosen = parts[part] if part < len(parts) else []
    room -= sum(map(seconds.__getitem__, chosen))
    for test in _shuffled(seconds.keys() - set(chosen), hashes[0]):
        if seconds[test] <= room:
            chosen.append(test)
            room -= seconds[test]
    return sorted(chosen)


def _shuffled(tests: Iterable[str], commit: str) -> list[str]:
    return sorted(tests, key=lambda test: hashlib.sha256(f"{commit} {test}".encode()).digest())


class Grid:
    """A pytest plugin: of the tests marked `grid` those that were chosen, None for all; writes what each test has taken
    to a file that processes share, and whether it is marked."""

    def __init__(self, chosen: Collection[str] | None, seconds: Mapping[str, float], taken: IO[str]) -> None:
        self._chosen, self._seconds, self._taken = chosen, seconds, taken

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._chosen is None:
            return
        marked = [item for item in items if in_grid(item)]
        check_listed({item.nodeid for item in marked}, {item.nodeid for item in items}, self._seconds)
        left = {item.nodeid for item in marked} - set(self._chosen)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        before = _processor_s()
        result = yield
        row = item.nodeid, _processor_s() - before, "grid" if in_grid(item) else ""
        csv.writer(self._taken, lineterminator="\n").writerow(row)
        self._taken.flush()  # a line in one write: parts end beside each other
        return result


def in_grid(item: pytest.Item) -> bool:
    """What is marked `full` is run by `make test-all` alone."""
    return bool(item.get_closest_marker("grid")) and not item.get_closest_marker("full")


def check_listed(marked: Iterable[str], collected: Iterable[str], seconds: Mapping[str, float]) -> None:
    """Raises UsageError where the file lacks a marked test, or has one of these test files that is not there."""
    marked = set(marked)
    files = {test.partition("::")[0] for test in collected}
    listed = {test for test in seconds if test.partition("::")[0] in files}
    if different := sorted(marked ^ listed):
        raise pytest.UsageError(
            f"{SECONDS.name} and the marks `grid` differ in {', '.join(different[:4])}"
            f"{' ...' if different[4:] else ''}: python tools/run_tests.py --record-seconds"
        )


def _processor_s() -> float:
    kinds = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in kinds)
