"""What the log and the record say of a pipeline that is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Bubbles:
    """Of one step of a pipeline, as shares of its time. planned: of its plan, by the newest costs."""

    iteration: int
    planned: float
    measured: float

    def lines(self) -> list[str]:
        """After the iteration line of a pipeline with more than one rank."""
        return [
            f" pipeline bubble of iteration {self.iteration}: planned {100 * self.planned:.2f}%, "
            f"measured {100 * self.measured:.2f}%"
        ]

    def scalars(self) -> dict[str, float]:
        """The same as shares."""
        return {"planned-bubble": self.planned, "measured-bubble": self.measured}


@dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """What a pipeline was measured to cost in iterations `first_iteration` to `iteration`, and the plan of it.

    solved: its schedule is one that is made for costs. f_ms, b_ms, w_ms, activation_bytes: by global stage. Bubbles: of
    the plan before and of the one from now on, by these costs. kept: why the plan before stays, None where it does not.
    path: of the new plan's file.
    """

    iteration: int
    first_iteration: int
    solved: bool
    schedule: str
    hash: str
    f_ms: tuple[float, ...]
    b_ms: tuple[float, ...]
    w_ms: tuple[float, ...]
    comm_ms: float
    activation_bytes: tuple[int, ...]
    peak_bytes_per_rank: tuple[int, ...]
    planned_bubble_before: float
    planned_bubble: float
    kept: str | None
    path: str | None = None

    def line(self) -> str:
        """What was measured, and what came of it."""
        times = (("F", self.f_ms), ("B", self.b_ms), ("W", self.w_ms))
        text = (
            f" > pipeline {'solved again' if self.solved else 'measured'} after iteration {self.iteration} "
            f"(iterations {self.first_iteration}-{self.iteration}): "
            f"{', '.join(f'{name} {_range(values)}' for name, values in times)} ms a stage, a transfer "
            f"{self.comm_ms:.3f} ms; planned bubble {100 * self.planned_bubble_before:.2f}%"
        )
        if self.kept is not None:
            return f"{text}; {self.schedule} {self.hash[:12]} stays: {self.kept}"
        where = f", saved as {self.path}" if self.path is not None else ", not saved: that takes --save"
        return f"{text} -> {100 * self.planned_bubble:.2f}%, {self.schedule} {self.hash[:12]}{where}"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low}-{high}"
