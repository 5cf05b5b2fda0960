"""What a rank holds of its units' weights and gradients, operation by operation, and which operation is
wrong.

[Note: under way] Gradients are under way from their REDUCE on, until somebody waits for it: the second
reduction or sum over instances behind it, as two are under way at most; new gradients of the unit; its sum
over instances; the row's end. All these are places in the row, so what is held depends on no clock. States at
rest are not counted: where a strategy holds weights or gradients whole at rest, none of them are transient.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import REDUCE, RESHARD, UNSHARD
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.units import RankUnits, Use
from megatron.core.transport.traffic import NOTHING, Moved

MOST_UNDER_WAY = 2


@dataclass
class Moves:
    """What a row's collectives move: gathers and reductions over the ranks that share states, sums and
    gathers over instances. Gathers that open a row are counted in it, as if weights had changed since the
    last one."""

    gathers: Moved = NOTHING
    reductions: Moved = NOTHING
    outer_sums: Moved = NOTHING
    outer_gathers: Moved = NOTHING


class HeldUnits:
    """gathered, gradients, under_way: bytes of whole weights, of whole gradients that still grow or wait, and
    of those that are being reduced. groups: by unit, for each REDUCE how many microbatches of each stage it
    summed up. Methods that do an operation answer with what is wrong with it, or nothing."""

    def __init__(self, units: RankUnits, residency: Residency, *, forward_only: bool) -> None:
        self.units, self.residency = units, residency
        self.moves = Moves()
        self.gathered = self.gradients = self.under_way = 0
        count = len(units)
        self.groups: list[list[dict[int, int]]] = [[] for _ in range(count)]
        self._weights_cut, self._grads_cut = residency.weights_cut, residency.grads_cut
        self._gathers = residency.weights_cut or (residency.gathers_once and not forward_only)
        self._readable = [not self._gathers] * count
        self._gathered_before = [False] * count
        self._outer_summed = [False] * count
        self._whole = [False] * count  # has whole gradients
        self._open: set[int] = set()  # units that the computation under way still contributes to
        self._fresh: list[dict[int, int]] = [{} for _ in range(count)]  # stage -> microbatches to be summed
        self._extra: list[dict[int, int]] = [{} for _ in range(count)]  # stage -> bytes
        self._under: list[tuple[int, int]] = []  # reductions and sums over instances: unit, bytes
        self._in_use: tuple[int, ...] = ()

    # Computations ----------------------------------------------------------------------------------

    def access_starts(self, use: Use) -> None:
        """What it reads is in use from here on, what the one before it read is not."""
        self._in_use = use.reads

    def access_needs(self, use: Use, stage: int) -> str:
        """Its weights are read, its gradients get memory."""
        for unit in use.reads:
            if not self._readable[unit]:
                return f"needs the weights of {self.name(unit)}, which are not gathered"
        for unit in use.begins:
            if self._outer_summed[unit] or (self.groups[unit] and not self._grads_cut):
                return f"adds to the gradients of {self.name(unit)} after their last sum"
            self._open.add(unit)
            if self._grads_cut and not self._whole[unit]:
                self._wait_for(unit)
                self._whole[unit] = True
                self.gradients += self.units.grad_bytes[unit]
        if self._grads_cut and self.units.extra_bytes:
            for unit in use.completes:
                more = self.units.extra_bytes.get((unit, stage), 0)
                if more and stage not in self._extra[unit]:
                    self._extra[unit][stage] = more
                    self.gradients += more
        return ""

    def access_ends(self, use: Use, stage: int) -> None:
        for unit in use.completes:
            self._open.discard(unit)
            fresh = self._fresh[unit]
            fresh[stage] = fresh.get(stage, 0) + 1

    def computation_ends(self) -> None:
        self._in_use = ()

    # Operations of data parallelism ----------------------------------------------------------------

    def perform(self, kind: int, unit: int) -> str:
        """One operation on one unit."""
        if kind == UNSHARD:
            return self._unshard(unit)
        if kind == RESHARD:
            return self._reshard(unit)
        return self._reduce(unit) if kind == REDUCE else self._outer_sum(unit)

    def _unshard(self, unit: int) -> str:
        if not self._gathers:
            return "is whole at rest"
        if self._readable[unit]:
            return "is gathered already"
        size, moves = self.units.weight_bytes[unit], self.moves
        if not size:
            return "has no weights to gather"
        self._readable[unit] = True
        if self._weights_cut:
            self.gathered += size
        if self.residency.ways > 1:
            moves.gathers += Moved(1, size)
        if self.residency.outer_optimizer and self.residency.outer > 1 and not self._gathered_before[unit]:
            moves.outer_gathers += Moved(1, self.units.unit(unit).outer_weight_bytes)
        self._gathered_before[unit] = True
        return ""

    def _reshard(self, unit: int) -> str:
        if not self._weights_cut:
            return "is whole at rest"
        if not self._readable[unit]:
            return "is not gathered"
        if unit in self._in_use:
            return "is in use"
        self._readable[unit] = False
        self.gathered -= self.units.weight_bytes[unit]
        return ""

    def _reduce(self, unit: int) -> str:
        if unit in self._open:
            return "does not have all gradients of the microbatch under way"
        if not self._fresh[unit]:
            return "has no gradients since they were last summed"
        if self._outer_summed[unit]:
            return "was summed over instances already"
        size = self.units.grad_bytes[unit]
        if self.residency.ways > 1:
            self.moves.reductions += Moved(self.units.unit(unit).reduce_calls, size)
        self.groups[unit].append(self._fresh[unit])
        self._fresh[unit] = {}
        if self._grads_cut:
            held = size + sum(self._extra[unit].values())
            self._start(unit, held)
            self._whole[unit] = False
            self.gradients -= held
            self._extra[unit].clear()
        return ""

    def _outer_sum(self, unit: int) -> str:
        if self.residency.outer == 1:
            return "has no other instances"
        if not self.groups[unit] or self._fresh[unit] or unit in self._open:
            return "is summed over instances before its last reduction"
        if self._outer_summed[unit]:
            return "is summed over instances twice"
        self._outer_summed[unit] = True
        self._wait_for(unit)
        self._start(unit, 0)
        one = self.units.unit(unit)
        self.moves.outer_sums += Moved(one.outer_calls, one.outer_grad_bytes)
        return ""

    def _start(self, unit: int, held: int) -> None:
        """A reduction or a sum over instances."""
        if len(self._under) == MOST_UNDER_WAY:
            self._wait_for(self._under[0][0])
        self._under.append((unit, held))
        self.under_way += held

    def _wait_for(self, unit: int) -> None:
        """What is under way of a unit is through."""
        if any(one == unit for one, _ in self._under):
            self.under_way -= sum(held for one, held in self._under if one == unit)
            self._under = [one for one in self._under if one[0] != unit]

    def all_through(self) -> str:
        """What must be so where a step is decided on, and at the row's end."""
        self._under, self.under_way = [], 0
        for unit in range(len(self.units)):
            if self._weights_cut and self._readable[unit]:
                return f"{self.name(unit)} is still gathered here"
            if self._fresh[unit]:
                return f"gradients of {self.name(unit)} are never reduced"
            if self.groups[unit] and self.residency.outer > 1 and not self._outer_summed[unit]:
                return f"gradients of {self.name(unit)} are not summed over instances"
        return ""

    def name(self, unit: int) -> str:
        return f"unit {self.units.unit(unit).name}"
