"""Clocks of a run: named timers with three levels, reported across ranks as Megatron reports them, and its own time.

A timer whose level is above the chosen one costs one dictionary look-up and never synchronizes the device.
Torch-free: the device's synchronize and the barrier are passed in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

KINDS = {"max": "max time", "minmax": "(min, max) time", "all": "times"}  # by --timing-log-option
MAX_LOG_LEVEL = 2
NAME_WIDTH = 48


class RunClock:
    """The run's time less its pauses: what an iteration takes does not count evaluations, checkpoints and planning.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_s = 0.0

    def now(self) -> float:
        """Seconds, of which only differences mean something."""
        return self._clock() - self._paused_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside takes no time. Not to be nested."""
        started = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - started


class Timer:
    """Accumulated seconds between start and stop."""

    def __init__(self, name: str, clock: Callable[[bool], float]) -> None:
        self.name, self._clock = name, clock
        self._elapsed_s = 0.0
        self._started_at: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start; with `barrier`, only once every rank is here."""
        assert self._started_at is None, f"timer {self.name!r} is already running"
        self._started_at = self._clock(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Stop and add to the sum."""
        assert self._started_at is not None, f"timer {self.name!r} is not running"
        self._elapsed_s += self._clock(barrier) - self._started_at
        self._started_at = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds so far; a running timer keeps running."""
        running = self._started_at is not None
        if running:
            self.stop(barrier)
        elapsed_s = self._elapsed_s
        if reset:
            self._elapsed_s = 0.0
        if running:
            self.start(barrier)
        return elapsed_s

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _SilentTimer(Timer):
    """Stands in for every timer above the chosen level: shared, so it keeps nothing."""

    def start(self, barrier: bool = False) -> None:
        assert not barrier, "a barrier must not depend on the log level: call it outside the timer"

    def stop(self, barrier: bool = False) -> None:
        return None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise AssertionError("this timer is above --timing-log-level and measures nothing")


class Timers:
    """All timers of a rank: `with timers("forward-backward", log_level=1): ...`.

    log_level: timers above it are silent. log_option: "max", "minmax" or "all" (ranks).
    """

    def __init__(
        self,
        log_level: int = 0,
        log_option: str = "minmax",
        *,
        synchronize: Callable[[], object] = bool,
        barrier: Callable[[], object] = bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert log_option in KINDS, f"--timing-log-option {log_option}"
        assert log_level in range(MAX_LOG_LEVEL + 1), f"--timing-log-level {log_level}"
        self.log_level, self.log_option = log_level, log_option
        self._synchronize, self._barrier, self._read = synchronize, barrier, clock
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._silent = _SilentTimer("(silent)", self._clock)

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of this name, made on first use. Without a level a new timer gets the highest, 2."""
        known = self._levels.get(name)
        if known is None:
            known = MAX_LOG_LEVEL if log_level is None else log_level
            assert known in range(MAX_LOG_LEVEL + 1), f"timer {name!r}: level {log_level}, known are 0, 1, 2"
            self._levels[name] = known
            if known <= self.log_level:
                self._timers[name] = Timer(name, self._clock)
        assert log_level in (None, known), f"timer {name!r} has level {known}, asked for {log_level}"
        return self._timers.get(name, self._silent)

    def _clock(self, barrier: bool) -> float:
        if barrier:
            self._barrier()
        self._synchronize()  # sync: work that was begun before belongs to the time before
        return self._read()

    def values(self) -> dict[str, float]:
        """Seconds of each active timer, which begins again at 0."""
        return {name: timer.elapsed() for name, timer in self._timers.items()}


def time_scalars(ranks: Sequence[dict[str, float]], normalizer: float = 1.0) -> dict[str, float]:
    """`<name>-time`: the maximum over ranks in seconds. Arguments as of `format_block`."""
    return {f"{name}-time": max(times.values()) / normalizer for name, times in _by_name(ranks).items()}


def _by_name(ranks: Sequence[dict[str, float]]) -> dict[str, dict[int, float]]:
    """name -> {rank: seconds} over the ranks on which the timer ran, in order of first appearance."""
    table: dict[str, dict[int, float]] = {}
    for rank, values in enumerate(ranks):
        for name, elapsed_s in values.items():
            if elapsed_s > 0.0:
                table.setdefault(name, {})[rank] = elapsed_s
    return table


def format_block(ranks: Sequence[dict[str, float]], log_option: str, normalizer: float = 1.0) -> str | None:
    """Megatron's block of times in ms; None without any time.

    ranks: per rank name -> seconds, of the timers that ran. normalizer: iterations since the last block, so that times
    are per iteration.
    """
    lines = [f"{KINDS[log_option]} across ranks (ms):"]
    for name, by_rank in _by_name(ranks).items():
        times_ms = {rank: elapsed_s * 1000.0 / normalizer for rank, elapsed_s in by_rank.items()}
        low, high = f"{min(times_ms.values()):.2f}", f"{max(times_ms.values()):.2f}"
        if log_option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in times_ms.items()]
        else:
            shown = high if log_option == "max" else f"({low}, {high})"
            lines.append(f"    {(name + ' ').ljust(NAME_WIDTH, '.')}: {shown}")
    return "\n".join(lines) if len(lines) > 1 else None
