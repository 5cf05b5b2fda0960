"""What an executor tells of its operations while they run: the interface, without a word on where it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron.core.pipeline_parallel.plan.ir import Plan

Region = Callable[[str], AbstractContextManager[Any]]  # a range of a profiler's trace, by its name


class Recorder(Protocol):
    """Who is told by an executor when its operations ran. Times are the recorder's own (`now`)."""

    def now(self) -> float:
        """Seconds, once everything that was begun on the device is done."""

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        """A pipeline rank begins its row."""

    def record(self, place: int, start_s: float, end_s: float, wait_s: float, lane_s: float = 0.0) -> None:
        """The operation at `place` of the row ran; told once a place and step.

        A computation: at its beginning it waited for a message for wait_s, and lane_s of it went into operations of
        data parallelism in its middle, and into waiting for weights. An operation of data parallelism: from its call to
        the return of what waited for it, which is told then and not in the order of the row; it was waited for for
        wait_s.
        """

    def repeated(self) -> None:
        """Forwards that were recorded ran once more, inside the operation under way."""

    def end_step(self) -> None:
        """The row is through, or broke off."""

    def message_takes(self, link_ns: int) -> None:
        """Between steps: on the slowest of this rank's links, from now on."""

    def close(self) -> None:
        """The run is over, whichever way: no step begins any more."""


class Recorders:
    """Several recorders as one. Each is told times on its own clock: clocks differ by what they count from.

    Times are whole nanoseconds, so that figures of what files keep of them are those of the run, to the last digit.
    """

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        first_now = recorders[0].now()
        self._all = [
            (one, round(one.now() - first_now, 9) if one is not recorders[0] else 0.0) for one in recorders
        ]

    def now(self) -> float:
        for one, _ in self._all[1:]:
            one.now()  # which waits for what it wants to be done
        return self._all[0][0].now()

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        for one, _ in self._all:
            one.begin_step(plan, rank, iteration)

    def record(self, place: int, start_s: float, end_s: float, wait_s: float, lane_s: float = 0.0) -> None:
        start, end, *rest = (round(time, 9) for time in (start_s, end_s, wait_s, lane_s))
        for one, ahead_s in self._all:
            one.record(place, start + ahead_s, end + ahead_s, *rest)

    def repeated(self) -> None:
        for one, _ in self._all:
            one.repeated()

    def end_step(self) -> None:
        for one, _ in self._all:
            one.end_step()

    def message_takes(self, link_ns: int) -> None:
        for one, _ in self._all:
            one.message_takes(link_ns)

    def close(self) -> None:
        for one, _ in self._all:
            one.close()
