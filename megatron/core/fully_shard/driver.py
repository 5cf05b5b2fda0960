"""Without a plan: which unit is gathered, freed and reduced when, as a model's hooks tell what runs.

[Note: order of reductions] Reductions begin in one order on every rank. A unit that is complete waits for those before
it: readiness is not the same everywhere, parameters may be unused on some ranks only. Where weights are gathered all
ranks run the same units, and the order is the reverse of that in which the microbatch's forward first reached them,
with units that no forward reached at the end. Where weights are whole, a rank may skip units that others run: there the
order is the reverse of registration. A model whose forward runs in another order stays right, but keeps whole gradients
longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from megatron.core.distributed.all_gather_pipeline import AllGatherPipeline
from megatron.core.distributed.grad_reduce_pipeline import GradReducePipeline
from megatron.core.fully_shard.reshard_policy import UnitPolicy
from megatron.core.fully_shard.weights_on_demand import WeightsOnDemand
from megatron.core.module import ModelError
from megatron.core.units import Unit


class ReductionsInOrder:
    """Counts a microbatch's gradients, and begins to reduce units that are complete: see [Note: order of reductions].

    reports: how often each key is reported in a microbatch. registered: the units in the order of registration, for an
    order of reductions that does not depend on the run; None: that of the run. overlap: without, nothing is reduced
    here. Communicates over dp_reduce.
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
        self.late: Collection[int] = ()  # units that are reduced with a step's last microbatch only
        self.held_back = False  # all of them are
        self.is_last = False  # this microbatch is the step's last
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


class HookDriver:
    """What follows from a model's hooks (`UnitDriver`), its gradients, and what the loop says of its microbatches.

    weights: None where they are whole at rest: there they are only waited for. passed_by_gradients: units whose
    backward is over with their last gradient. on_gradient, on_backward: told inside backwards: of each contribution; of
    each unit that backward comes to.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: AllGatherPipeline,
        weights: WeightsOnDemand | None,
        reductions: ReductionsInOrder,
        *,
        passed_by_gradients: Collection[int],
    ) -> None:
        self._units, self._gathers = units, gathers
        self._weights, self._reductions = weights, reductions
        self._passed_by_gradients = passed_by_gradients
        self.on_gradient: Callable[[], None] | None = None
        self.on_backward: Callable[[], None] | None = None
        self._left: int | None = None  # microbatches of the step; None where nobody has said how many
        self._training = self._evaluating = False

    # The loop -------------------------------------------------------------------------------------------

    def begin_step(self, num_microbatches: int | None, policies: Sequence[UnitPolicy]) -> None:
        """num_microbatches: of all chunks; None where `expect_last` will say which is the last."""
        if self._weights is not None:
            self._weights.keep = tuple(one.keep for one in policies)
        self._reductions.late = frozenset(unit for unit, one in enumerate(policies) if one.reduce_late)
        self._reductions.begin_microbatch()
        self._expect(num_microbatches)

    def expect_last(self) -> None:
        """The microbatch whose backward comes next is the last of a step whose length was not told."""
        assert self._left is None, "the step was begun with its number of microbatches"
        self._expect(1)

    def hold_back(self, held_back: bool) -> None:
        """From here on, whether nothing is reduced before the step's last microbatch."""
        self._reductions.held_back = held_back

    def microbatch_done(self) -> None:
        """All gradients of the microbatch are there."""
        assert self._left != 0, "more microbatches done than the step has"
        left = None if self._left is None else self._left - 1
        self._reductions.complete(*range(len(self._units)))
        if left != 0:
            self._reductions.begin_microbatch()
        self._expect(left)
        if self._weights is not None:
            self._weights.end_microbatch(last=left == 0)

    def _expect(self, left: int | None) -> None:
        self._left = left
        self._reductions.is_last |= left == 1

    # Weights --------------------------------------------------------------------------------------------

    def gather_for_readers(self) -> None:
        """All weights are whole on return, until the model has used them, or `free_for_readers`."""
        if self._weights is not None:
            self._weights.gather_for_readers()
        for unit in range(len(self._units)):
            self._gathers.wait(unit)

    def free_for_readers(self) -> None:
        if self._weights is not None:
            self._weights.free_for_readers()

    def weights_changed(self) -> None:
        """What was gathered is out of date, and was freed."""
        if self._weights is not None:
            self._weights.weights_changed()

    # Gradients ------------------------------------------------------------------------------------------

    def grad_begins(self, key: str) -> None:
        """A contribution is about to be written. Raises ModelError where no more was to come."""
        if self.on_gradient is not None:
            self.on_gradient()
        self._reductions.grad_begins(key)

    def grad_ready(self, key: str) -> None:
        """A contribution is complete; the unit is reduced with its last one."""
        unit = self._reductions.grad_ready(key)
        if unit is not None:
            self._complete(unit)

    def _complete(self, unit: int) -> None:
        if self._weights is not None and unit in self._passed_by_gradients:
            self._weights.passed(unit)
        self._reductions.complete(unit)

    # Hooks ----------------------------------------------------------------------------------------------

    def begin_forward(self, *, training: bool) -> None:
        self._training, self._evaluating = training, not training
        if self._weights is not None:
            self._weights.begin(training=training, repeats=self._left is not None and self._left > 1)

    def end_forward(self, *, training: bool) -> None:
        self._evaluating = False
        if self._weights is not None and not training:
            self._weights.leave_evaluation()

    def enter_forward(self, unit: int, *, recomputing: bool) -> None:
        if not recomputing and not self._evaluating:
            self._reductions.forward_reached(unit)
        self._need(unit)

    def leave_forward(self, unit: int, *, recomputing: bool) -> None:
        if self._weights is None:
            return
        if recomputing:
            self._weights.leave_recompute(unit)
        else:
            self._weights.leave_forward(unit, training=self._training)

    def enter_backward(self, unit: int, *, differentiable: bool) -> None:
        """Raises ModelError where weights would be freed that a second backward reads."""
        if differentiable:
            if self._weights is not None:
                raise ModelError(
                    f"unit {self._units[unit].name!r}: create_graph=True with --data-parallel-sharding-strategy "
                    "optim_grads_params, which frees weights behind a backward, so that a backward through it could "
                    "not read them; use optim_grads, optim or no_shard, whose weights stay whole"
                )
            return  # it takes no part in the step: gradients of parameters come with the backward through it
        if self.on_backward is not None:
            self.on_backward()
        if self._units[unit].backward_reads:
            self._need(unit)

    def passed(self, unit: int, *, last: bool) -> None:
        """Autograd runs the calls of a forward one after the other: between two of them weights need not be whole."""
        if last:
            self._complete(unit)
        if self._weights is not None and (last or not self._units[unit].lasts):
            self._weights.passed(unit)

    def _need(self, unit: int) -> None:
        if self._weights is None:
            self._gathers.wait(unit)
        else:
            self._weights.need(unit)
