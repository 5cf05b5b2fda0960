"""What an executor tells of its operations while they run: the interface, without a word on where it goes."""

from __future__ import annotations

from typing import Protocol

from megatron.core.pipeline_parallel.plan.ir import Plan


class Recorder(Protocol):
    """Who is told by an executor when its operations ran. Times are the recorder's own (`now`)."""

    def now(self) -> float:
        """Seconds, once everything that was begun on the device is done."""

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        """A pipeline rank begins its row."""

    def record(self, place: int, start_s: float, end_s: float, wait_s: float) -> None:
        """The operation at `place` of the row ran; at its beginning it waited for a message for wait_s."""

    def end_step(self) -> None:
        """The row is through, or broke off."""

    def close(self) -> None:
        """The run is over, whichever way: no step begins any more."""
