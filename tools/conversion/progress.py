"""How far a conversion is: one line that is written over and over on a terminal, few lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from megatron.core.words import share_text, size_text, time_text

Say = Callable[[str], None]
TERMINAL_S, LOG_S = 0.2, 30.0  # between two lines


class WriteProgress:
    """Bytes that have been written of `total`. say: prints a line that stays."""

    def __init__(self, total: int, num_files: int, say: Say) -> None:
        self._total, self._num_files, self._say = total, num_files, say
        self._terminal = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._written, self._place = 0, ""

    def begin_file(self, name: str, number: int) -> None:
        self._place = f"{name} ({number} of {self._num_files})"

    def add(self, num_bytes: int) -> None:
        """So many more; shows how far it is where it is time to."""
        self._written += num_bytes
        now = time.monotonic()
        if now - self._shown >= (TERMINAL_S if self._terminal else LOG_S):
            self._shown = now
            if self._terminal:
                print("\r" + self._line(now).ljust(100), end="", file=sys.stderr, flush=True)
            else:
                self._say(self._line(now))

    def end(self) -> None:
        """All is written, durably."""
        if self._terminal and self._shown != self._started:
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)
        if self._written:
            seconds = time.monotonic() - self._started
            rate = size_text(self._written / max(seconds, 1e-9))
            self._say(f"{size_text(self._written)} written in {time_text(seconds)}: {rate}/s")

    def _line(self, now: float) -> str:
        speed = self._written / max(now - self._started, 1e-9)
        left = f", {time_text((self._total - self._written) / speed, 2)} left" if speed else ""
        share = share_text(self._written / self._total, 0)
        return f"{self._place}: {share} of {size_text(self._total)}, {size_text(speed, digits=3)}/s{left}"
