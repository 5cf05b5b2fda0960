"""A rank's row, walked as naively as can be: what is held, and when, at each boundary. What the planner's automaton is
held to, which makes rows and proves them: nothing here is the project's.

Nothing is kept up to date: at every boundary all that has been done is looked through again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OP = re.compile(r"(\d+)([A-Z_]+?)(\d+)?(?:\[(\d+):(\d+)\])?(?:\.(\d+))?(?:@\d+)?(?:#\d+)?")
SUMS = ("REDUCE", "HSDP_ALL_REDUCE")


@dataclass
class Unit:
    """reads: whether B and BW read its weights; lookup: not in the last of its accesses there."""

    name: str
    weight: int
    grad: int
    extra: int = 0
    reads: bool = True
    lookup: bool = False
    time: dict[str, float] = field(default_factory=dict)  # of F, B, W, BW


@dataclass
class Stage:
    units: list[Unit]
    forward: list[list[int]]
    backward: list[list[int]]


@dataclass(eq=False)
class Sum:
    """A REDUCE or HSDP_ALL_REDUCE. waited: somebody has, and it is through."""

    unit: str
    lane: str
    size: int
    end: float
    waited: bool = False


@dataclass
class Settings:
    """lanes: kind -> (name, most under way). seconds: (kind, unit's name, whether it is its first gather) -> time.
    durations: kind -> by stage. starts: by place in the row, when a computation could start but for the lanes."""

    weights_sharded: bool
    grads_sharded: bool
    lanes: dict[str, tuple[str, int]]
    activation: list[float] | None = None
    held_after_b: list[float] | None = None
    seconds: object = lambda *_: 0.0
    durations: dict[str, list[float]] | None = None
    starts: list[float] | None = None
    waits_at_once: bool = False  # for each reduction
    forward_only: bool = False


class Naive:
    """found: (place, access, gathered, gradients, under way, activation, clock) at each boundary."""

    def __init__(self, row: list[str], stages: dict[int, Stage], asked: Settings) -> None:
        self.row, self.stages, self.asked = [self._parsed(text) for text in row], stages, asked
        self.history: list[tuple] = []  # ("gather" | "free" | "add" | "extra" | "take", unit, bytes)
        self.sums: list[Sum] = []
        self.gathers: dict[str, float] = {}
        self.wires: dict[str, float] = {}
        self.found: list[tuple] = []
        self.clock = self.during = 0.0

    @staticmethod
    def _parsed(text):
        stage, kind, microbatch, first, end, begun = _OP.fullmatch(text).groups()
        span = None if first is None else (int(first), int(end))
        return int(stage), kind, -1 if microbatch is None else int(microbatch), span, int(begun or 0)

    def walk(self):
        place = 0
        while place < len(self.row):
            inside = []
            while place < len(self.row) and self.row[place][4]:
                inside.append(place)
                place += 1
            # messages may stand between these and their computation
            while inside and self.row[place][1] not in ("F", "B", "W", "BW"):
                place += 1
            kind = self.row[place][1]
            if kind in ("F", "B", "W", "BW"):
                self._compute(place, inside)
            elif kind in ("UNSHARD", "RESHARD", *SUMS):
                self._operate(place, -1)
            elif kind == "STEP":
                self._wait_for_all()
            place += 1
        self._wait_for_all()
        self._look(len(self.row) - 1, -1)
        return self.found

    def _wait_for_all(self):
        self._wait(self.sums)
        self._until(max(self.wires.values(), default=0.0))

    # Bytes, from the whole history ----------------------------------------------------------------

    def _look(self, place, access):
        gathered = sum(size for what, _, size in self.history if what == "gather")
        gathered -= sum(size for what, _, size in self.history if what == "free")
        grads = sum(size for what, _, size in self.history if what in ("add", "extra"))
        grads -= sum(size for what, _, size in self.history if what == "take")
        under = sum(one.size for one in self.sums if not one.waited)
        self.found.append((place, access, gathered, grads, under, self.during, self.clock))

    def _whole(self, name):
        """Bytes of a unit's whole gradients, -1 where there are none."""
        size = -1
        for what, unit, more in self.history:
            if unit == name and what in ("add", "extra"):
                size = max(size, 0) + more
            if unit == name and what == "take":
                size = -1
        return size

    # Time -----------------------------------------------------------------------------------------

    def _until(self, moment):
        self.clock = max(self.clock, moment)

    def _wait(self, sums):
        for one in sums:
            one.waited = True
            self._until(one.end)

    def _on_wire(self, kind, name, *, first=False):
        lane = self.asked.lanes[kind][0]
        start = max(self.clock, self.wires.get(lane, 0.0))
        self.wires[lane] = start + self.asked.seconds(kind, name, first)
        return self.wires[lane]

    # Operations -----------------------------------------------------------------------------------

    def _operate(self, place, access):
        stage, kind, _, span, _ = self.row[place]
        units = self.stages[stage].units
        for unit in units if span is None else units[span[0] : span[1]]:
            if kind == "UNSHARD":
                self.history.append(("gather", unit.name, unit.weight * self.asked.weights_sharded))
                end = self._on_wire(kind, unit.name, first=unit.name not in self.gathers)
                self.gathers[unit.name] = end
            elif kind == "RESHARD":
                self.history.append(("free", unit.name, unit.weight))
            else:
                size = 0
                if kind == "REDUCE" and self.asked.grads_sharded:
                    size = self._whole(unit.name)
                    self.history.append(("take", unit.name, size))
                lane, most = self.asked.lanes[kind]
                self._wait([one for one in self.sums if one.unit == unit.name])
                mine = [one for one in self.sums if one.lane == lane and not one.waited]
                self._wait(mine[: max(0, len(mine) + 1 - most)])
                end = self._on_wire(kind, unit.name)
                self.sums.append(Sum(unit.name, lane, size, end))
                if self.asked.waits_at_once:
                    self._until(end)
        self._look(place, access)

    def _compute(self, place, inside):
        stage, kind, _, span, _ = self.row[place]
        its, asked = self.stages[stage], self.asked
        accesses = its.forward if kind == "F" else its.backward
        if span is not None:
            accesses = [[u for u in access if span[0] <= u < span[1]] for access in accesses]
            accesses = [access for access in accesses if access]
        accesses = accesses or [[]]
        if asked.starts is not None:
            self._until(asked.starts[place])
        after = self._activations(place)
        at = lambda unit: [n for n, access in enumerate(accesses) if unit in access]  # noqa: E731
        grows = kind in ("W", "BW")
        for number, access in enumerate(accesses):
            for one in inside:
                if self.row[one][4] == number + 1:
                    self._operate(one, number)
            for u in access:
                unit = its.units[u]
                looks_up = unit.lookup and at(u)[0] < number == at(u)[-1]
                if unit.weight and (kind == "F" or (kind in ("B", "BW") and unit.reads and not looks_up)):
                    self._until(self.gathers.get(unit.name, 0.0))
            for u in access:
                unit = its.units[u]
                if grows and unit.grad and at(u)[0] == number:
                    self._wait([one for one in self.sums if one.unit == unit.name])
                    if asked.grads_sharded and self._whole(unit.name) < 0:
                        self.history.append(("add", unit.name, unit.grad))
            for u in access:
                unit = its.units[u]
                if grows and asked.grads_sharded and unit.grad and unit.extra and at(u)[-1] == number:
                    if not self._has_extra(unit.name, stage):
                        self.history.append(("extra", unit.name, unit.extra))
                        self.history.append((f"extra of {stage}", unit.name, 0))
            self._look(place, number)
            self.clock += self._share(stage, kind, accesses, number)
        self.during = after
        self._look(place, -1)

    def _has_extra(self, name, stage):
        has = False
        for what, unit, _ in self.history:
            if unit == name:
                has = (has or what == f"extra of {stage}") and what != "take"
        return has

    def _share(self, stage, kind, accesses, number):
        if self.asked.durations is None:
            return 0.0
        units = self.stages[stage].units
        times = [unit.time[kind] for unit in units]
        times = times if any(times) else [1.0] * len(units)
        if not units:
            return self.asked.durations[kind][stage]
        count = [sum(access.count(u) for access in accesses) for u in range(len(units))]
        share = sum(times[u] / count[u] for u in accesses[number]) / sum(times)
        return share * self.asked.durations[kind][stage]

    def _activations(self, place):
        """Sets what is held while a computation runs; returns what is held behind it."""
        if self.asked.activation is None:
            return 0.0
        held, units = 0.0, {}
        for stage, kind, _, span, _ in self.row:
            if kind == "W" and span is not None:
                units[stage] = max(units.get(stage, 0), span[1])
        parts: dict[tuple[int, int], int] = {}
        for at, (stage, kind, microbatch, span, _) in enumerate(self.row[: place + 1]):
            if kind not in ("F", "B", "W", "BW"):
                continue
            whole, kept = self.asked.activation[stage], self.asked.held_after_b[stage]
            change = {"F": whole, "B": kept - whole, "W": -kept, "BW": -whole}[kind]
            if span is not None:
                parts[stage, microbatch] = parts.get((stage, microbatch), 0) + span[1] - span[0]
                change = change if parts[stage, microbatch] == units[stage] else 0.0
            if at == place:
                self.during = max(held, held + change)
                return held if kind == "F" and self.asked.forward_only else held + change
            held += 0.0 if kind == "F" and self.asked.forward_only else change
        raise AssertionError("no such place")
