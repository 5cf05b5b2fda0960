"""A pytest plugin for suites of hours: what has passed on this very source is not run again, and a call ends in time.

`python -m pytest -p tests.harness.resumed` runs what has not passed yet and stops behind the first test that ends after
half an hour: within the hour, unless one test takes longer than the other half. What passed is recorded in pytest's
cache folder, in a file named after the commit and what differs from it. Failed tests are run again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

STOP_AFTER_S = float(os.environ.get("TEST_PART_SECONDS", 1800))


def source(root: Path) -> str:
    """The commit, and a digest of what differs from it."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout

    differs = git("diff", "HEAD") + git("status", "--porcelain")
    return git("rev-parse", "HEAD").decode().strip() + "-" + hashlib.sha256(differs).hexdigest()[:8]


class Resumed:
    """Deselects what a file lists, adds to it what passes."""

    def __init__(self, record: Path) -> None:
        self._record, self._start = record, time.monotonic()
        self._passed = set(record.read_text().splitlines()) if record.exists() else set()
        self._failed: set[str] = set()
        self.left = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self._passed]
        items[:] = [item for item in items if item.nodeid not in self._passed]
        config.hook.pytest_deselected(items=done)
        self.left = len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._record.open("a") as file:
                file.write(report.nodeid + "\n")
            self.left -= 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        result = yield
        if time.monotonic() - self._start > STOP_AFTER_S:
            item.session.shouldstop = "time is up: the same command goes on"
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.left == 0 and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{self.left} tests left to pass on this source ({self._record})")


def pytest_configure(config: pytest.Config) -> None:
    assert config.cache is not None
    record = Path(config.cache.mkdir("passed")) / source(config.rootpath)
    config.pluginmanager.register(Resumed(record), "resumed")
