"""Stages that only begin their units, and a data parallel engine that only writes down what it is told."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron.core.pipeline_parallel.plan.held.units import StageUnits, UnitCosts

NAMES = ("embedding", "layers.0", "layers.1", "head")


def units_of(forward=((0,), (1,), (2,), (3,)), backward=None, names=NAMES):
    """The embedding's backward reads no weights."""
    costs = tuple(UnitCosts(name, backward_reads=name != "embedding") for name in names)
    return StageUnits(costs, forward, forward[::-1] if backward is None else backward)


class Log(list):
    """What happens, in order: calls of a GradSync, and what others add."""

    @property
    def gathers(self):
        return SimpleNamespace(
            start=self._teller("unshard"), wait=self._teller("wait"), free=self._teller("reshard")
        )

    @property
    def reductions(self):
        return SimpleNamespace(start=self._teller("reduce"), start_outer=self._teller("sum_outer"))

    def unit_number(self, chunk, unit):
        return f"{chunk}.{unit}"

    def _teller(self, what):
        return lambda unit: self.append(f"{what} {unit}")


class TellingStage:
    """A stage whose computations begin units as they are told to: by chunk, (kind, units in the order of their
    beginning)."""

    splits = True

    def __init__(self, log, boundaries, chunk=0, **orders):
        self.log, self.boundaries, self.chunk = log, boundaries, chunk
        self.orders = {"F": (0, 1, 2, 3), "B": (3, 2, 1, 0), "W": (3, 2, 1, 0)} | orders

    def forward(self, microbatch, hidden):
        self._run(f"F{microbatch}", self.orders["F"])
        return torch.zeros(1)

    def backward(self, microbatch, grad):
        self._run(f"BW{microbatch}", self.orders["B"])
        return torch.zeros(1)

    def backward_input(self, microbatch, grad):
        self._run(f"B{microbatch}", self.orders["B"])
        return torch.zeros(1)

    def backward_weight(self, microbatch, units=None):
        part = range(4) if units is None else range(*units)
        name = f"W{microbatch}" + ("" if units is None else f"[{units[0]}:{units[1]}]")
        self._run(name, [unit for unit in self.orders["W"] if unit in part])

    def check_empty(self):
        pass

    def _run(self, name, order):
        self.log.append(f"{name} called")
        for unit in order:
            self.boundaries.unit_begins(self.chunk, unit)
            self.log.append(f"{name} in {unit}")
        self.log.append(f"{name} over")


class NoChannel:
    def post(self, messages):
        assert not messages, f"no other rank, and messages {messages}"
        return []

    def drain(self):
        pass
