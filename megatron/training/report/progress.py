"""How far the run is and when it will be done: a bar on a terminal, a plain line every 10 s elsewhere.

    progress:  12.5% | step 125/1000 | loss 3.2101 | tokens/s 12,345 | ETA 0:01:10 | last checkpoint 12 s ago

The plain line has no control codes and no field that Megatron's log lines have, so parsers pass over it.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from megatron.core.safe_files import SHARED_MODE, open_for_append
from megatron.core.words import NOT_KNOWN, age, brief_duration, column, duration, plain, share_text
from megatron.training.guard.console import terminal_width
from megatron.training.report.screen import bar_line
from megatron.training.report.writers import warn
from megatron.training.state import TrainState

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


class ProgressLine:
    """The display of the rank that prints losses: a bar on a terminal, else lines.

    total_iterations: 0 shows nothing. speaks: False on the other ranks, which print around the bar. show_bar: what
    draws it; None prints lines.
    """

    def __init__(
        self,
        total_iterations: int,
        *,
        first_iteration: int = 1,
        speaks: bool = True,
        stream: TextIO | None = None,
        show_bar: Callable[[str | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._stream, self._clock = total_iterations, stream or sys.stdout, clock
        self._speaks = speaks and total_iterations > 0
        self._eta = EtaEstimator(total_iterations)
        self._iteration = self._resumed = first_iteration - 1
        self._checkpoint_at: float | None = None
        self._shown_at: float | None = None
        self.figures(loss=None, tokens_per_s=None)
        self._show_bar = show_bar if total_iterations else None
        if self._show_bar is not None and not speaks:
            self._show_bar("")

    def checkpoint_saved(self) -> None:
        """A checkpoint was committed now."""
        self._checkpoint_at = self._clock()

    def figures(self, *, loss: float | None, tokens_per_s: float | None) -> None:
        """The newest interval's figures, shown from now on."""
        shown = NOT_KNOWN if loss is None else column(loss, 6, 4).strip()
        self._figures = [f"loss {shown}", f"tokens/s {plain(tokens_per_s)}"]

    def update(self, iteration: int) -> None:
        """So many iterations are done. Call it after every iteration, and `show` when all else is said of it."""
        self._iteration = iteration
        self._eta.update(iteration, self._clock())

    def eta(self) -> str | None:
        """The time left, in words for a terminal; None where it is not known or not to be shown."""
        eta_s = self._eta.eta_s() if self._speaks else None
        return None if eta_s is None else brief_duration(eta_s)

    def show(self) -> None:
        """Show how far it is, if it is time again."""
        if not self._speaks:
            return
        now, last = self._clock(), self._iteration >= self._total
        interval_s = PLAIN_INTERVAL_S if self._show_bar is None else LIVE_INTERVAL_S
        if not last and self._shown_at is not None and now - self._shown_at < interval_s:
            return
        if self._show_bar is None and self.eta() is None and not last:
            return  # nothing to say yet about the time left
        self._shown_at = now
        share, saved = self._iteration / self._total, self._last_checkpoint(now)
        if self._show_bar is None:
            steps, left = f"{self._iteration}/{self._total}", f"ETA {duration(self._eta.eta_s())}"
            fields = " | ".join([*self._figures, left, saved or "no checkpoint yet"])
            print(
                f" progress: {share_text(share):>6} | step {steps} | {fields}", file=self._stream, flush=True
            )
        else:
            steps, left = f"{self._iteration:,}/{self._total:,}", f"ETA {self.eta() or '-'}"
            texts = (share_text(share), steps, *self._figures, left, saved)
            columns = list(zip((0, 1, 4, 5, 2, 3), texts, strict=True))
            width, utf8 = terminal_width(), (self._stream.encoding or "").lower() == "utf-8"
            self._show_bar(bar_line(share, columns, width, ascii_only=not utf8))

    def _last_checkpoint(self, now: float) -> str:
        """Of this run, or what it goes on from; empty where there is neither."""
        if self._checkpoint_at is not None:
            return f"last checkpoint {age(now - self._checkpoint_at)}"
        return f"last checkpoint at step {self._resumed:,}" if self._resumed else ""

    def close(self) -> None:
        """Give the terminal back; a second call does nothing."""
        if self._show_bar is not None:
            self._show_bar(None)
            self._show_bar = None
        self._speaks = False


def append_progress(save: str, event: str, *, job_id: str, world_size: int, state: TrainState) -> None:
    """One line of `progress.txt` in the folder of checkpoints, fields separated by tabs. A file that cannot be written
    is a warning, as with every sink."""
    fields = (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}",
        f"Job ID: {job_id}",
        f"# GPUs: {world_size}",
        event,
        f"Iteration: {state.iteration}",
        f"Consumed samples: {state.consumed_train_samples}",
        f"Floating-point operations: {state.num_floating_point_operations_so_far:.2e}",
    )
    path = Path(save) / "progress.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_for_append(path, mode=SHARED_MODE), "a", encoding="utf-8") as file:
            file.write("\t".join(fields) + "\n")
    except OSError as error:
        warn(f"{path} is not written: {error}")
