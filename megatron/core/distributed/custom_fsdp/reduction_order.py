"""Without a plan: when units are reduced, by the gradients that have come.

[Note: order of reductions] Reductions begin in one order on every rank. A unit that is complete waits for those before
it: readiness is not the same everywhere, parameters may be unused on some ranks only. Where weights are gathered all
ranks run the same units, and the order is the reverse of that in which the microbatch's forward first reached them,
with units that no forward reached at the end. Where weights are unsharded, a rank may skip units that others run: there
the order is the reverse of registration. A model whose forward runs in another order stays right, but keeps whole
gradients longer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron.core.distributed.grad_reduce_pipeline import GradReducePipeline
from megatron.core.module import ModelError


class ReductionsInOrder:
    """Counts a microbatch's gradients, and begins to reduce units that are complete: see [Note: order of reductions].

    reports: how often each key is reported in a microbatch. registered: the units in the order of registration, for an
    order of reductions that does not depend on the run; None: that of the run. overlap: without, nothing is reduced
    here. late: units that are reduced with a step's last microbatch only; held_back: all of them are. is_last: this
    microbatch is the step's last. Communicates over dp_reduce.
    """

    def __init__(
        self,
        reductions: GradReducePipeline,
        reports: Mapping[str, int],
        registered: Sequence[int] | None,
        *,
        overlap: bool,
    ) -> None:
        self._reductions, self._reports, self._overlap = reductions, reports, overlap
        self._unit_of = {key: number for number, unit in enumerate(reductions.units) for key in unit.keys}
        self._registered = None if registered is None else dict.fromkeys(registered)
        self._reached: dict[int, None] = {}  # units by first forward of the microbatch
        self._reached_before: dict[int, None] = {}  # in an earlier one: forwards may precede their backwards
        self.late: Collection[int] = ()
        self.held_back = False
        self.begin_microbatch()

    def begin_microbatch(self) -> None:
        self.is_last = False
        self._reached, self._reached_before = {}, self._reached or self._reached_before
        self._order: list[int] | None = None
        self._begun = 0  # of the order
        self._completed: set[int] = set()
        self._missing = dict(self._reports)
        self._open_keys = [len(unit.keys) for unit in self._reductions.units]

    def forward_reached(self, unit: int) -> None:
        """The forward of this microbatch has reached a unit (again, perhaps)."""
        if unit not in self._reached:
            self._reached[unit] = None
            self._order = None

    def grad_begins(self, key: str) -> None:
        """Raises ModelError where no more gradients were to come."""
        unit = self._unit_of[key]
        if self._overlap and (self._missing[key] == 0 or unit in self._in_order()[: self._begun]):
            raise ModelError(
                f"a gradient for parameter {key!r} arrived after its unit {self._reductions.units[unit].name!r} had "
                "all its gradients of the microbatch: a module that runs several times under reentrant activation "
                "checkpointing reports a gradient for each, with no word which is the last; checkpoint it with "
                "use_reentrant=False, or give each use a module of its own"
            )

    def grad_ready(self, key: str) -> int | None:
        """A contribution is complete. The unit, if it was the last one of it."""
        self._missing[key] -= 1
        if self._missing[key] != 0:
            return None
        unit = self._unit_of[key]
        self._open_keys[unit] -= 1
        return unit if self._open_keys[unit] == 0 else None

    def complete(self, *units: int) -> None:
        """What has not come by now does not come in this microbatch."""
        self._completed.update(units)
        order = self._in_order()
        while self._overlap and self._begun < len(order) and order[self._begun] in self._completed:
            unit = order[self._begun]
            self._begun += 1
            if self.is_last or not (self.held_back or unit in self.late):
                self._reductions.start(unit)

    def _in_order(self) -> list[int]:
        if self._order is None:
            order = self._registered or self._reached or self._reached_before
            rest = (unit for unit in range(len(self._reductions.units)) if unit not in order)
            self._order = [*reversed(order), *rest]
        return self._order
