"""How far the run is and when it will be done: a live line on a terminal, a plain line every 10 s elsewhere.

    progress:  12.5% | step 125/1000 | loss 3.2101 | tokens/s 12,345 | MFU n/a | ETA 0:01:10 | last checkpoint 12 s ago

The plain line has no control codes and no field that Megatron's log lines have, so parsers pass over it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from megatron.core import optional

PLAIN_INTERVAL_S = 10.0
LIVE_INTERVAL_S = 0.2
MAX_SAMPLES = 1024  # kept by the estimator; then every other one is forgotten
MIN_WINDOW = 16  # updates; fewer and one slow iteration moves the estimate


class EtaEstimator:
    """Seconds left, from the pace over the newer half of the run so far.

    A growing window takes evaluations and checkpoints in at their true share, follows a change of pace (a
    growing batch, a busier machine), and leaves the slow first iterations behind.
    """

    def __init__(self, total: float) -> None:
        self._total = total
        self._samples: deque[tuple[float, float]] = deque()  # (done, at)
        self._first_done: float | None = None

    def update(self, done: float, now: float) -> None:
        """`done` of the total is done at time `now` (s). The first update is where the clock starts."""
        if self._first_done is None:
            self._first_done = done
        self._samples.append((done, now))
        half = self._first_done + (done - self._first_done) / 2
        while len(self._samples) > MIN_WINDOW and self._samples[1][0] <= half:
            self._samples.popleft()
        if len(self._samples) > MAX_SAMPLES:
            self._samples = deque([*list(self._samples)[:-1:2], self._samples[-1]])

    def eta_s(self) -> float | None:
        """Seconds left; None while unknown, as before two updates."""
        (done0, time0), (done1, time1) = self._samples[0], self._samples[-1]
        rate = (done1 - done0) / (time1 - time0) if time1 > time0 and done1 > done0 else None
        return None if rate is None else max(0.0, self._total - done1) / rate


def format_duration(seconds: float | None) -> str:
    """0:01:10, 1 day 02:00:00, or n/a."""
    if seconds is None:
        return "n/a"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} day{'s' if days > 1 else ''} {h:02d}:{m:02d}:{s:02d}"
    return f"{h}:{m:02d}:{s:02d}"


def format_age(seconds: float | None) -> str:
    """`12 s ago`, `3 min ago`, `2.5 h ago`, or `none`."""
    if seconds is None:
        return "none"
    if seconds < 100:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.1f} h ago"


class ProgressLine:
    """The display of the rank that prints losses.

    total_iterations: 0 shows nothing. interactive: a live line (needs rich); None: when the stream is a terminal and
    rich is installed.
    """

    def __init__(
        self,
        total_iterations: int,
        *,
        first_iteration: int = 1,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._stream, self._clock = total_iterations, stream or sys.stdout, clock
        self._eta = EtaEstimator(total_iterations)
        self._checkpoint_at: float | None = None
        self._shown_at: float | None = None
        self.figures(loss=None, tokens_per_s=None)
        if interactive is None:
            interactive = total_iterations > 0 and self._stream.isatty() and optional.available("rich")
        self._live = _LiveLine(self._stream, total_iterations, first_iteration - 1) if interactive else None

    def checkpoint_saved(self) -> None:
        """A checkpoint was committed now."""
        self._checkpoint_at = self._clock()

    def figures(self, *, loss: float | None, tokens_per_s: float | None, mfu: float | None = None) -> None:
        """The newest interval's figures, shown from now on. mfu: share of the device's peak, if known."""
        values = (("loss", loss, ".4f"), ("tokens/s", tokens_per_s, ",.0f"), ("MFU", mfu, ".1%"))
        self._figures = [
            f"{name} {'n/a' if value is None else format(value, spec)}" for name, value, spec in values
        ]

    def update(self, iteration: int) -> None:
        """So many iterations are done: show it, if it is time again. Call it after every iteration."""
        if not self._total:
            return
        now, last = self._clock(), iteration >= self._total
        self._eta.update(iteration, now)
        interval_s = LIVE_INTERVAL_S if self._live else PLAIN_INTERVAL_S
        if not last and self._shown_at is not None and now - self._shown_at < interval_s:
            return
        if self._live is None and self._eta.eta_s() is None and not last:
            return  # nothing to say yet about the time left
        self._shown_at = now
        age_s = None if self._checkpoint_at is None else now - self._checkpoint_at
        left = f"ETA {format_duration(self._eta.eta_s())}"
        fields = " | ".join([*self._figures, left, f"last checkpoint {format_age(age_s)}"])
        percent = 100.0 * iteration / self._total
        if self._live is not None:
            self._live.show(iteration, f"{percent:.1f}% | {iteration}/{self._total} | {fields}")
        else:
            line = f" progress: {percent:5.1f}% | step {iteration}/{self._total} | {fields}"
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Give the terminal back; a second call does nothing."""
        if self._live is not None:
            self._live.close()
            self._live = None


class _LiveLine:
    """A bar that stays below the log lines, which rich prints above it."""

    def __init__(self, stream: TextIO, total: int, done: int) -> None:
        console = optional.require("rich.console", "cli").Console(file=stream)
        rich = optional.require("rich.progress", "cli")
        column = optional.require("rich.table", "cli").Column
        bar = rich.BarColumn(bar_width=12, table_column=column(min_width=12))
        text = rich.TextColumn("{task.fields[text]}", table_column=column(no_wrap=True, overflow="ellipsis"))
        # No thread beside the computation.
        self._bar: Any = rich.Progress(bar, text, console=console, auto_refresh=False)
        self._task = self._bar.add_task("training", total=total, completed=done, text="")
        self._bar.start()
        self.close = self._bar.stop

    def show(self, iteration: int, text: str) -> None:
        self._bar.update(self._task, completed=iteration, text=text, refresh=True)
