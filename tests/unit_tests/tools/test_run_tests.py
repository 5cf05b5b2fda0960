"""The suite's parts have every test file once."""

import collections
import subprocess
import sys

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
