"""The suite's parts have every test file once, and as much of the grid as the budget has room for."""

import collections
import subprocess
import sys

import pytest

from tests.harness import grid
from tools import run_tests


def test_every_file_is_in_one_part():
    parts = run_tests.parts()
    assert list(parts)[: len(run_tests.LONGEST)] == list(run_tests.LONGEST), "each of them names some file"
    found = [file for files in parts.values() for file in files]
    assert sorted(found) == sorted(run_tests.TESTS.rglob("test_*.py"))


RUN = """
import sys, pathlib
from tools import run_tests
run_tests.IMPORTED = ("pytest",)
folder = pathlib.Path(sys.argv[1])
run_tests.parts = lambda: {name: [folder / f"test_{name}.py"] for name in sys.argv[2].split(",")}
sys.exit(run_tests.main(sys.argv[3:]))
"""


def run(folder, names, *options):
    """(status, output, counts of the last line) of a suite of these files."""
    words = [sys.executable, "-c", RUN, folder, names, "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run([*words, *options], capture_output=True, text=True, cwd=run_tests.ROOT)
    *_, last = done.stdout.splitlines() or [done.stderr]
    counted = dict(reversed(one.split(" ")) for one in last.partition(" in ")[0].split(", "))
    return done.returncode, done.stdout, collections.Counter({k: int(v) for k, v in counted.items()})


def test_a_failure_fails_and_all_parts_are_counted(tmp_path):
    (tmp_path / "test_good.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_bad.py").write_text("def test_three(): assert False\ndef test_four(): pass\n")
    (tmp_path / "test_none.py").write_text("def test_two(): pass\n")
    (tmp_path / "test_ends.py").write_text("import os\ndef test_five(): os.kill(os.getpid(), 9)\n")
    status, said, counts = run(tmp_path, "good,bad", "-k", "not two")
    assert status == 1
    assert "def test_three(): assert False" in said
    assert counts == {"passed": 2, "failed": 1, "deselected": 1}
    assert run(tmp_path, "good,none", "-k", "not two")[::2] == (0, {"passed": 1, "deselected": 2})
    assert run(tmp_path, "good,ends")[0] == 1


SECONDS = {f"tests/test_a.py::test_it[{number}]": 1.0 + number % 7 for number in range(200)}
COMMITS = [f"{number:040x}" for number in range(100)]  # the newest first


def test_what_is_left_of_the_budget_is_filled_by_the_commit():
    chosen = grid.choose(SECONDS, 100.0, COMMITS)
    taken = sum(map(SECONDS.__getitem__, chosen))
    assert 99.0 <= taken <= 100.0, "a test of a second is there for any gap"
    assert chosen == grid.choose(dict(reversed(SECONDS.items())), 100.0, COMMITS)
    assert chosen != grid.choose(SECONDS, 100.0, COMMITS[1:])
    assert grid.choose(SECONDS, 1000.0, COMMITS) == sorted(SECONDS)
    assert grid.choose(SECONDS, 100.0, []), "outside a repository"


@pytest.mark.parametrize("room", [95.0, 160.0, 790.0])
def test_twenty_commits_in_a_row_see_all(room):
    """An eighth or a fifth of 800 seconds a commit, from any commit on."""
    assert grid.rounds(SECONDS, room) <= 10
    for begin in range(0, 60, 7):
        runs = [grid.choose(SECONDS, room, COMMITS[at:]) for at in range(begin, begin + grid.COMMITS)]
        assert set(SECONDS) == set().union(*runs)


GRID = """
import pytest
@pytest.mark.grid
@pytest.mark.parametrize("n", range(3))
def test_many(n): pass
@pytest.mark.grid
@pytest.mark.full
def test_full(): pass
def test_always(): pass
"""


def test_marked_tests_that_are_not_chosen_are_left_out_and_seconds_are_recorded(tmp_path):
    (tmp_path / "test_grid.py").write_text(GRID)
    names = [f"test_grid.py::test_many[{n}]" for n in range(3)]
    for chosen, passed in ((names[1:2], 2), (None, 4)):
        with (tmp_path / "seconds.csv").open("w+") as taken:
            plugin = grid.Grid(chosen, dict.fromkeys(names, 1.0), taken)
            words = [str(tmp_path), f"--rootdir={tmp_path}", "-m", "not full", "-p", "no:cacheprovider"]
            counted = Counted()
            assert pytest.main([*words, "-q", "-c", "/dev/null"], plugins=[plugin, counted]) == 0
            assert counted.passed == passed
            taken.seek(0)
            rows = [row.split(",") for row in taken.read().splitlines()]
        assert [name for name, _, marked in rows if marked] == (chosen or names)
        assert [name for name, _, marked in rows if not marked] == ["test_grid.py::test_always"]
        assert all(0 <= float(took) < 5 for _, took, _ in rows)


class Counted:
    """How many tests have passed."""

    passed = 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed


def test_marks_and_the_file_are_the_same():
    seconds = {"a.py::test_one": 1.0, "b.py::test_two": 1.0}
    grid.check_listed(["a.py::test_one"], ["a.py::test_one", "a.py::test_other"], seconds)
    with pytest.raises(
        pytest.UsageError, match=r"grid_seconds.csv and the marks `grid` differ in a.py::test_new"
    ):
        grid.check_listed(["a.py::test_one", "a.py::test_new"], ["a.py::test_one", "a.py::test_new"], seconds)
    with pytest.raises(pytest.UsageError, match=r"differ in a.py::test_one: python tools"):
        grid.check_listed([], ["a.py::test_other"], seconds)


def test_the_committed_seconds_leave_room():
    """Of the budget, so that twenty commits see all."""
    seconds = grid.read_seconds()
    room = run_tests.BUDGET_S - seconds.pop(grid.OTHERS)
    assert 2 * grid.rounds(seconds, room) - 1 <= grid.COMMITS
