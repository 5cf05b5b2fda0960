"""How far preprocessing is: a bar on a terminal (rich's where it is installed), else lines where asked for."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron.core.datasets.preprocessing.job import Statistics
from megatron.core.optional import available, require


class Progress:
    """A context manager; `update` is the callback of `run_job`.

    log_interval: print a line to stderr whenever so many more documents are done; None for no lines.
    """

    def __init__(self, title: str, log_interval: int | None) -> None:
        self.title = title
        self.log_interval = log_interval
        self._start = time.monotonic()
        self._first_bytes: int | None = None
        self._logged = 0
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._terminal and available("rich"):
            rich = require("rich.progress", "cli")
            console = require("rich.console", "cli").Console(stderr=True)
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._terminal:
            print(file=sys.stderr)

    def update(self, done: Statistics, total_bytes: int) -> None:
        if self._first_bytes is None:
            self._first_bytes = done.bytes  # what an earlier run did says nothing of this one's speed
        if self._bar is not None:
            self._bar.update(self._task, completed=done.bytes, total=total_bytes)
        elif self._terminal:
            print("\r" + self._line(done, total_bytes).ljust(78), end="", file=sys.stderr, flush=True)
        if self.log_interval and done.documents - self._logged >= self.log_interval:
            self._logged = done.documents
            if not self._terminal:
                print(self._line(done, total_bytes), file=sys.stderr, flush=True)

    def _line(self, done: Statistics, total_bytes: int) -> str:
        fresh = done.bytes - (self._first_bytes or 0)
        speed = fresh / max(time.monotonic() - self._start, 1e-9)
        left = f", {(total_bytes - done.bytes) / speed:.0f} s left" if speed > 0 else ""
        share = 100 * done.bytes / max(total_bytes, 1)
        return f"{self.title}: {share:3.0f} %, {done.documents} documents, {speed / 2**20:.1f} MiB/s{left}"
