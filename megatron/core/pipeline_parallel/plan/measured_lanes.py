"""What the gathers and reductions of a measured plan are about, read from the header of its timeline."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.residency import LaneCosts, Residency
from megatron.core.pipeline_parallel.plan.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits, UnitCosts

_LARGEST = 1 << 60  # of bytes and times
_NS_PER_S = 1e9


def lanes_of_json(content: Any, plan: Plan) -> Lanes:
    """What `dataclasses.asdict` made of lanes in ns, in seconds. Raises PlanError where it is no such thing, or of
    another plan."""
    try:
        for unit in (unit for stage in content["stages"] for unit in stage["units"]):
            _record(UnitCosts, unit)
        stages = tuple(map(StageUnits.of_dict, content["stages"]))
        asked = dict(content["residency"])
        limits = {name: _numbers(asked.pop(name)) for name in ("budget", "limit")}
        residency, wire = _record(Residency, asked, **limits), _record(LaneCosts, content["costs"])
        if not wire.bandwidth:
            raise ValueError("no bandwidth")
        for rank, row in enumerate(plan.rows):
            walk_row(row, RankUnits(rank, plan.placement, stages), residency, forward_only=plan.forward_only)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, AssertionError) as error:
        raise PlanError(f"the header's lanes are wrong: {error!r:.200}") from None
    return Lanes(stages, residency, LaneCosts(wire.latency / _NS_PER_S, wire.bandwidth * _NS_PER_S))


def _numbers(content: Any) -> tuple[float, ...] | None:
    return None if content is None else tuple(map(_checked, content))


def _record(cls: Any, content: dict[str, Any], **more: Any) -> Any:
    """A dataclass of numbers and words: of the kinds of their defaults, words without one."""
    for name, value in content.items():
        if isinstance(value, str) != isinstance(getattr(cls, name, ""), str):
            raise ValueError(f"{name!r} is {value!r:.40}")
        _checked(0 if isinstance(value, str) else value)
    return cls(**content, **more)


def _checked(value: Any) -> float:
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.40} is no size")
    return float(value)
