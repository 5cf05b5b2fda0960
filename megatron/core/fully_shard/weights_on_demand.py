"""Whole weights out of shards as a model comes to its units, and ahead of that, in recorded order.

[Note: when weights are freed] Backward may read a unit's weights up to its very last operation, which can come after
its last gradient was reported. That it is passed therefore only marks a unit; its memory goes when the next one is
needed, or at the end of the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from megatron.core.distributed.all_gather_pipeline import AllGatherPipeline, UnitState
from megatron.core.fully_shard.reshard_policy import Keep
from megatron.core.fully_shard.run_order import RunOrder
from megatron.core.units import Unit


class _For(Enum):
    """What a unit is gathered for."""

    USE = auto()  # it runs, or stays for the step
    AHEAD = auto()  # it is needed next
    BACKWARD = auto()  # it was left in the forward
    RECOMPUTED_BACKWARD = auto()  # it was left in a forward inside a backward
    NOTHING = auto()  # see [Note: when weights are freed]
    READERS = auto()  # outside of the model


class WeightsOnDemand:
    """Gathers what is needed, and ahead of that what comes next in the recorded order, within a bound.

    numel: elements of each unit. bound: elements gathered at any time, the unit in use included; a unit that is needed
    is gathered whatever the bound, and nothing is gathered ahead that would exceed it. last: the unit that is taken for
    the forward's last as long as nothing is recorded. Communicates over dp_gather.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: AllGatherPipeline,
        numel: Sequence[int],
        *,
        bound: int,
        last: int,
    ) -> None:
        self._units, self._gathers = units, gathers
        self._numel, self._bound, self._last = numel, bound, last
        self.keep = (Keep.NOTHING,) * len(units)  # for how long each unit stays gathered
        self._for: dict[int, _For] = {}  # of all that is gathered
        self._orders = {True: RunOrder(), False: RunOrder()}  # training or not
        self.order = self._orders[True]
        for order in self._orders.values():
            order.begin(repeats=False)  # units may be called without the model around them
        self._is_open = False  # a microbatch has begun and not ended
        self._training_holds: set[int] | None = (
            None  # while a forward without backward runs, which leaves it alone
        )

    def begin(self, *, training: bool, repeats: bool) -> None:
        """A microbatch begins, or a forward without backward. repeats: another microbatch follows in this step.

        Its units may find their slots of a double buffer taken: by an earlier forward that waits for its backward, or
        that ended with an error. They take these.
        """
        if self._is_open and any(self._gathers.is_blocked(unit) for unit in range(len(self._units))):
            self._free_all(lambda unit: self.keep[unit] is not Keep.STEP)
        self.order = self._orders[training]
        self.order.begin(repeats=repeats)
        self._is_open |= training
        self._training_holds = None if training else set(self._for)

    def need(self, unit: int) -> None:
        """On return the unit's weights are whole, and what is needed next is on its way."""
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

    def leave_forward(self, unit: int, *, training: bool) -> None:
        """The unit's forward is over; its weights go unless they stay for the backward."""
        if unit not in self._for or unit in (self._training_holds or ()):
            return
        keep, reads = self.keep[unit], self._units[unit].backward_reads
        if training and (
            keep is Keep.STEP or (keep is Keep.TO_BACKWARD and reads) or self._backward_is_next(unit)
        ):
            self._for[unit] = _For.BACKWARD
        else:
            self._free(unit)

    def leave_recompute(self, unit: int) -> None:
        """As `leave_forward`, inside a backward: the unit's own backward comes soon; one gather serves both, unless
        others are recomputed before it and all of them exceed the bound."""
        if self.keep[unit] is Keep.NOTHING and not self._units[unit].lasts and unit in self._for:
            self._for[unit] = _For.RECOMPUTED_BACKWARD

    def passed(self, unit: int) -> None:
        """The microbatch's backward has gone through the unit."""
        if unit in self._for and self.keep[unit] is not Keep.STEP:
            self._for[unit] = _For.NOTHING

    def leave_evaluation(self) -> None:
        """A forward without backward is over: nothing stays gathered but what training held before it."""
        held, self._training_holds = self._training_holds or set(), None
        self._free_all(lambda unit: unit not in held)
        if self._is_open:
            self.order = self._orders[True]

    def end_microbatch(self, *, last: bool) -> None:
        """Free all but what stays for the whole step and what was gathered ahead; with the last one, all."""
        self.order, self._training_holds, self._is_open = self._orders[True], None, False
        self._free_all(
            lambda unit: last or (self.keep[unit] is not Keep.STEP and self._for[unit] is not _For.AHEAD)
        )

    def gather_for_readers(self) -> None:
        for unit in range(len(self._units)):
            if unit not in self._for:
                self._start(unit, _For.READERS)

    def free_for_readers(self) -> None:
        self._free_all(lambda unit: self._for[unit] is _For.READERS)

    def weights_changed(self) -> None:
        """What was gathered is out of date, and was freed."""
        self._for.clear()
        if self._training_holds:
            self._training_holds.clear()

    @property
    def _gathered(self) -> int:
        return sum(self._numel[unit] for unit in self._for)

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
