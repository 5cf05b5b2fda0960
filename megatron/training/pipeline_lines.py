"""What the log and the record say of a pipeline that is measured. Pure, as metrics.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Bubbles:
    """Of one step of a pipeline, as shares of its time. planned: of its plan, by the newest costs."""

    iteration: int
    planned: float
    measured: float


def told_bytes(size: float) -> str:
    """Of activations, such as `12.5 MiB`; what is smaller than a hundredth of one in KiB."""
    mib = size / 2**20
    return f"{mib:.2f} MiB" if mib >= 0.01 or not size else f"{size / 2**10:.2f} KiB"


def told_ns(time_ns: float) -> str:
    """A measured time, such as `27.761 ms`."""
    return f"{time_ns / 1e6:.3f} ms"


def told_layers(time_layers: float) -> str:
    """An estimated time, such as `27.76 x F of a layer`."""
    return f"{time_layers:.2f} x F of a layer"


def bubble_line(bubbles: Bubbles) -> str:
    """After the iteration line of a pipeline with more than one rank."""
    return (
        f" pipeline bubble of iteration {bubbles.iteration}: planned {100 * bubbles.planned:.2f}%, "
        f"measured {100 * bubbles.measured:.2f}%"
    )


def bubble_scalars(bubbles: Bubbles) -> dict[str, float]:
    """The same as shares."""
    return {"planned-bubble": bubbles.planned, "measured-bubble": bubbles.measured}


@dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """What a pipeline was measured to cost in iterations `first_iteration` to `iteration`, and the plan of it.

    changed: what has drifted most since the last time, None the first time. solved: its schedule is one that is made
    for costs. f_ms, b_ms, w_ms, activation_bytes: by global stage. Bubbles: of the plan before and of the one from now
    on, by these costs. kept: why the plan before stays, None where it does not. path: of the new plan's file.
    """

    iteration: int
    first_iteration: int
    changed: str | None
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


def measured_plan_line(plan: MeasuredPlan) -> str:
    """What was measured, and what came of it."""
    times = ", ".join(
        f"{name} {_range(values)}" for name, values in (("F", plan.f_ms), ("B", plan.b_ms), ("W", plan.w_ms))
    )
    when = f"iterations {plan.first_iteration}-{plan.iteration}"
    if plan.changed is not None:
        when = f"{when}; changed most: {plan.changed}"
    text = (
        f" > pipeline {'solved again' if plan.solved else 'measured'} after iteration {plan.iteration} ({when}): "
        f"{times} ms a stage, a transfer "
        f"{plan.comm_ms:.3f} ms; planned bubble {100 * plan.planned_bubble_before:.2f}%"
    )
    if plan.kept is not None:
        return f"{text}; {plan.schedule} {plan.hash[:12]} stays: {plan.kept}"
    where = f", saved as {plan.path}" if plan.path is not None else ", not saved: that takes --save"
    return f"{text} -> {100 * plan.planned_bubble:.2f}%, {plan.schedule} {plan.hash[:12]}{where}"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f}-{high:.3f}"
