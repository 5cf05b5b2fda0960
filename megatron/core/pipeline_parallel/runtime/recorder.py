"""What an executor tells of its operations while they run, collected into one record a step, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from megatron.core.device import Device
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import NOT_RUN, RankStep
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import OpTimes

Region = Callable[[str], AbstractContextManager[Any]]  # a range of a profiler's trace, by its name


class StepReader:
    """Who is given steps that have run."""

    def begins(self, step: RankStep) -> bool:
        """A step begins, of which nothing is recorded yet; whether it is to be read."""
        return True

    def looks(self) -> None:
        """An operation of a step that is read is through."""

    def reads(self, step: RankStep) -> None:
        """The step is over: its row is through, or broke off."""

    def close(self) -> None:
        """The run is over, whichever way: no step begins any more."""


class Recorder:
    """Records when the operations of an executor run, in seconds of this machine's steady clock, for readers.

    Times are whole nanoseconds, so that figures of what files keep of them are those of the run, to the last digit.
    Steps that nobody reads cost two looks at a clock an operation. In one that is read each operation on CUDA is waited
    for, so that it overlaps less than others do; with gloo and CPU nothing waits.
    """

    def __init__(self, device: Device, readers: Sequence[StepReader]) -> None:
        self._device, self._readers = device, readers
        self._reading: list[StepReader] = []  # of the step under way
        self._link_ns = 0

    def now(self) -> float:
        """Seconds, once everything that was begun on the device is done."""
        if self._reading:
            self._device.synchronize()  # sync: measured steps
        return monotonic()

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        """A pipeline rank begins its row."""
        spans = [NOT_RUN] * len(plan.rows[rank])
        self._step = RankStep(iteration, plan, rank, spans, self._link_ns)
        self._reading = [one for one in self._readers if one.begins(self._step)]

    def record(self, place: int, start_s: float, end_s: float, wait_s: float, lane_s: float = 0.0) -> None:
        """The operation at `place` of the row ran; told once a place and step.

        A computation: at its beginning it waited for a message for wait_s, and lane_s of it went into operations of
        data parallelism in its middle, and into waiting for weights. An operation of data parallelism: from its call to
        the return of what waited for it, which is told then and not in the order of the row; it was waited for for
        wait_s.
        """
        if self._reading:
            assert self._step.spans[place] is NOT_RUN, f"operation {place} a second time"
            times = (round(time, 9) for time in (start_s, end_s, wait_s, lane_s))
            self._step.spans[place] = OpTimes(*times)
            for one in self._reading:
                one.looks()

    def repeated(self) -> None:
        """Forwards that were recorded ran once more, inside the operation under way."""
        self._step.repeated = True

    def end_step(self) -> None:
        """The row is through, or broke off."""
        reading, self._reading = self._reading, []
        for one in reading:
            one.reads(self._step)

    def message_takes(self, link_ns: int) -> None:
        """Between steps: on the slowest of this rank's links, from now on."""
        self._link_ns = link_ns

    def close(self) -> None:
        """The run is over, whichever way: no step begins any more."""
        for one in self._readers:
            one.close()
