"""Without a plan: which unit is gathered, freed and reduced when, as a model's hooks tell what runs.

[Note: when weights are freed] Backward may read a unit's weights up to its very last operation, which can come after
its last gradient was reported. That it is passed therefore only marks a unit; its memory goes when the next one is
needed, or at the end of the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from megatron.core.distributed.all_gather_pipeline import AllGatherPipeline, UnitState
from megatron.core.distributed.custom_fsdp.reshard_policy import Keep, UnitPolicy
from megatron.core.distributed.custom_fsdp.run_order import ReductionOrder, RunOrder
from megatron.core.distributed.grad_reduce_pipeline import GradReducePipeline
from megatron.core.module import ModelError
from megatron.core.units import Unit


class _For(Enum):
    """What a unit is gathered for."""

    USE = auto()  # it runs, or stays for the step
    AHEAD = auto()  # it is needed next
    BACKWARD = auto()  # it was left in the forward
    RECOMPUTED_BACKWARD = auto()  # it was left in a forward inside a backward
    NOTHING = auto()  # see [Note: when weights are freed]
    READERS = auto()  # outside of the model


class UnitDriver:
    """What follows from a model's hooks (`UnitHooks`), from its gradients, and from what the loop says of its
    microbatches: gathers what is needed, and ahead of that what comes next in the recorded order, within a bound.

    order: of reductions; overlap: without, nothing is reduced before a step's end. numel: elements of each unit. bound:
    elements gathered at any time, the unit in use included; a unit that is needed is gathered whatever the bound, and
    nothing is gathered ahead that would exceed it. last: the unit that is taken for the forward's last as long as
    nothing is recorded. frees: weights are sharded; else they are only waited for. passed_by_gradients: units whose
    backward is over with their last gradient. on_gradient, on_backward: told inside backwards: of each contribution; of
    each unit that backward comes to. Communicates over dp_gather and dp_reduce.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: AllGatherPipeline,
        reductions: GradReducePipeline,
        order: ReductionOrder,
        *,
        overlap: bool,
        numel: Sequence[int],
        bound: int,
        last: int,
        frees: bool,
        passed_by_gradients: Collection[int],
    ) -> None:
        self._units, self._gathers, self._reductions = units, gathers, reductions
        self._to_reduce, self._overlap = order, overlap
        self._numel, self._bound, self._last, self._frees = numel, bound, last, frees
        self._passed_by_gradients = passed_by_gradients
        self.on_gradient: Callable[[], None] | None = None
        self.on_backward: Callable[[], None] | None = None
        self._left: int | None = None  # microbatches of the step; None where nobody has said how many
        self._training = False
        self._keep = (Keep.NOTHING,) * len(units)  # for how long each unit stays gathered
        self._for: dict[int, _For] = {}  # of all that is gathered
        self._orders = {True: RunOrder(), False: RunOrder()}  # training or not
        self.order = self._orders[True]
        for one in self._orders.values():
            one.begin(repeats=False)  # units may be called without the model around them
        self._is_open = False  # a microbatch has begun and not ended
        # While a forward without backward runs: what it leaves alone.
        self._training_holds: set[int] | None = None

    # The loop -------------------------------------------------------------------------------------------

    def begin_step(self, num_microbatches: int | None, policies: Sequence[UnitPolicy]) -> None:
        """num_microbatches: of all chunks; None where `begin_backward` will say which is the last."""
        self._keep = tuple(one.keep for one in policies)
        self._to_reduce.late = frozenset(unit for unit, one in enumerate(policies) if one.reduce_late)
        self._to_reduce.begin_microbatch()
        self._expect(num_microbatches)

    def begin_backward(self, *, is_last: bool) -> None:
        """Of a step whose length was not told: is_last: its last microbatch; else nothing is reduced behind it."""
        assert self._left is None, "the step was begun with its number of microbatches"
        self._to_reduce.held_back = not is_last
        self._expect(1 if is_last else None)

    def microbatch_done(self) -> None:
        """All gradients of the microbatch are there: free all but what stays for the whole step and what was gathered
        ahead; with the last one, all."""
        assert self._left != 0, "more microbatches done than the step has"
        left = None if self._left is None else self._left - 1
        self._reduce(range(len(self._units)))
        if left != 0:
            self._to_reduce.begin_microbatch()
        self._expect(left)
        self.order, self._training_holds, self._is_open = self._orders[True], None, False
        self._free_all(
            lambda unit: (
                left == 0 or (self._keep[unit] is not Keep.STEP and self._for[unit] is not _For.AHEAD)
            )
        )

    def _expect(self, left: int | None) -> None:
        self._left = left
        self._to_reduce.is_last |= left == 1

    # Weights outside of the model -----------------------------------------------------------------------

    def gather_for_readers(self) -> None:
        """All weights are whole on return, until the model has used them, or `free_for_readers`."""
        for unit in range(len(self._units)):
            if unit not in self._for:
                self._start(unit, _For.READERS)
        for unit in range(len(self._units)):
            self._gathers.wait(unit)

    def free_for_readers(self) -> None:
        self._free_all(lambda unit: self._for[unit] is _For.READERS)

    def weights_changed(self) -> None:
        """What was gathered is out of date, and was freed."""
        self._for.clear()
        if self._training_holds:
            self._training_holds.clear()

    # Gradients ------------------------------------------------------------------------------------------

    def grad_begins(self, key: str) -> bool:
        """A contribution is about to be written. Whether it overwrites. Raises ModelError where no more was to come."""
        if self.on_gradient is not None:
            self.on_gradient()
        if self._overlap and (unit := self._to_reduce.too_late(key)) is not None:
            raise ModelError(
                f"a gradient for parameter {key!r} arrived after its unit {self._units[unit].name!r} had "
                "all its gradients of the microbatch: a module that runs several times under reentrant activation "
                "checkpointing reports a gradient for each, with no word which is the last; checkpoint it with "
                "use_reentrant=False, or give each use a module of its own"
            )
        return self._reductions.grad_begins(key)

    def grad_ready(self, key: str, microbatch: int) -> None:
        """A contribution is complete; the unit is reduced with its last one."""
        unit = self._to_reduce.contributed(key)
        if unit is not None:
            self._complete(unit)

    def _complete(self, unit: int) -> None:
        if unit in self._passed_by_gradients:
            self._mark_passed(unit)
        self._reduce((unit,))

    def _reduce(self, complete: Collection[int]) -> None:
        if self._overlap:
            for unit in self._to_reduce.complete(complete):
                self._reductions.start(unit)

    # Hooks. recomputing: inside a backward, whose forward is run again -----------------------------------

    def begin_forward(self, *, training: bool) -> None:
        """A chunk's forward begins (not when it is recomputed).

        Its units may find their slots of a double buffer taken: by an earlier forward that waits for its backward, or
        that ended with an error. They take these.
        """
        self._training = training
        if self._is_open and any(self._gathers.is_blocked(unit) for unit in range(len(self._units))):
            self._free_all(lambda unit: self._keep[unit] is not Keep.STEP)
        self.order = self._orders[training]
        self.order.begin(repeats=self._left is not None and self._left > 1)
        self._is_open |= training
        self._training_holds = None if training else set(self._for)

    def end_forward(self, *, training: bool) -> None:
        """Of a forward without backward nothing stays gathered but what training held before it."""
        if not training:
            held, self._training_holds = self._training_holds or set(), None
            self._free_all(lambda unit: unit not in held)
            if self._is_open:
                self.order = self._orders[True]

    def enter_forward(self, unit: int, *, recomputing: bool) -> None:
        if not recomputing and self._training_holds is None:
            self._to_reduce.forward_reached(unit)
        self._need(unit)

    def leave_forward(self, unit: int, *, recomputing: bool) -> None:
        """The unit's weights go unless they stay for the backward. A recomputed unit's own backward comes soon; one
        gather serves both, unless others are recomputed before it and all of them exceed the bound."""
        if unit not in self._for:
            return
        keep, one = self._keep[unit], self._units[unit]
        if recomputing:
            if keep is Keep.NOTHING and not one.lasts:
                self._for[unit] = _For.RECOMPUTED_BACKWARD
        elif unit not in (self._training_holds or ()):
            kept = keep is Keep.STEP or (keep is Keep.TO_BACKWARD and one.backward_reads)
            if self._training and (kept or self._backward_is_next(unit)):
                self._for[unit] = _For.BACKWARD
            else:
                self._free(unit)

    def enter_backward(self, unit: int, *, differentiable: bool) -> None:
        """differentiable: another backward is to go through this one (create_graph=True). Raises ModelError where
        weights would be freed that a second backward reads."""
        if differentiable:
            if self._frees:
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
        """Backward has gone through one call of the unit; last: through all of them. Not told of a backward that is
        differentiable: what it goes through is gone through again. Autograd runs the calls of a forward one after the
        other: between two of them weights need not be whole."""
        if last:
            self._complete(unit)
        if last or not self._units[unit].lasts:
            self._mark_passed(unit)

    # ---

    def _need(self, unit: int) -> None:
        """On return the unit's weights are whole, and what is needed next is on its way."""
        if not self._frees:
            self._gathers.wait(unit)
            return
        self._free_all(lambda other: self._for[other] is _For.NOTHING and other != unit)
        self.order.need(unit)
        if unit not in self._for:
            self._make_room(unit)
            self._start(unit, _For.USE)
        elif unit not in (self._training_holds or ()):
            self._for[unit] = _For.USE
        for ahead in self.order.upcoming():
            if ahead not in self._for:
                if self._gathered + self._numel[ahead] > self._bound or self._gathers.is_blocked(ahead):
                    break
                self._start(ahead, _For.AHEAD)
        self._gathers.wait(unit)

    @property
    def _gathered(self) -> int:
        return sum(self._numel[unit] for unit in self._for)

    def _mark_passed(self, unit: int) -> None:
        if unit in self._for and self._keep[unit] is not Keep.STEP:
            self._for[unit] = _For.NOTHING

    def _backward_is_next(self, unit: int) -> bool:
        """Whether it stays for a backward that follows at once, or to its last use."""
        if self._units[unit].lasts:
            return True
        return self.order.next_is_same(unit) if self.order.follows else unit == self._last

    def _make_room(self, unit: int) -> None:
        """Free what only waits and can be gathered again: all where the unit's slot is taken, and of units that were
        recomputed together, which backward reaches in reverse, the first as far as they exceed the bound."""
        waiting = (_For.AHEAD, _For.BACKWARD, _For.RECOMPUTED_BACKWARD)
        if self._gathers.is_blocked(unit):
            self._free_all(lambda other: self._for[other] in waiting)
        for other in sorted(one for one, why in self._for.items() if why is _For.RECOMPUTED_BACKWARD):
            if self._gathered + self._numel[unit] > self._bound:
                self._free(other)

    def _start(self, unit: int, why: _For) -> None:
        if self._gathers.state(unit) is UnitState.SHARDED:  # nobody else reads it just now
            self._gathers.start(unit)
        self._for[unit] = why

    def _free_all(self, goes: Callable[[int], bool]) -> None:
        for unit in [unit for unit in sorted(self._for) if goes(unit)]:
            self._free(unit)

    def _free(self, unit: int) -> None:
        del self._for[unit]
        if self._training_holds:
            self._training_holds.discard(unit)
        if self._gathers.state(unit) is not UnitState.SHARDED:  # as where its gather could not begin
            self._gathers.free(unit)
