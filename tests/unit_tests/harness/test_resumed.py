"""Interrupted suites go on where they stopped; failed tests are run again; another source begins anew."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ("-p", "no:hypothesispytest")  # most of a start's time
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("n", range(3))
def test_some(n):
    assert n != 1 or Path("mended").exists()
    with open("log", "a") as log:
        log.write(str(n))
"""


def suite(folder, seconds="1000"):
    """(status, whether it says how many are left, and what ran) of a call."""
    (folder / "log").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "-q", "-p", "tests.harness.resumed", "test_some.py"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TEST_PART_SECONDS": seconds},
        capture_output=True,
        text=True,
    )
    left = re.search(r"^(\d+) tests left", done.stdout, re.MULTILINE)
    assert left, done.stdout + done.stderr
    return done.returncode, int(left[1]), (folder / "log").read_text()


@pytest.mark.grid
def test_a_suite_goes_on_until_all_have_passed(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], cwd=tmp_path, check=True)

    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / ".gitignore").write_text(".pytest_cache\n__pycache__\nlog\nmended\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert suite(tmp_path, seconds="0") == (2, 2, "0")
    assert suite(tmp_path) == (1, 1, "2")
    assert suite(tmp_path) == (1, 1, "")
    (tmp_path / "mended").touch()
    assert suite(tmp_path) == (0, 0, "1")
    assert suite(tmp_path) == (0, 0, "")
    (tmp_path / "test_some.py").write_text(TESTS + "\n")
    assert suite(tmp_path) == (0, 0, "012")
