"""Without a plan: in which order units are needed, and in which they are reduced (floor 0, pure).

[Note: order of reductions] Reductions begin in one order on every rank. A unit that is complete waits for those before
it: readiness is not the same everywhere, parameters may be unused on some ranks only. Where weights are gathered all
ranks run the same units, and the order is the reverse of that in which the microbatch's forward first reached them,
with units that no forward reached at the end. Where weights are unsharded, a rank may skip units that others run: there
the order is the reverse of registration. A model whose forward runs in another order stays right, but keeps whole
gradients longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


class RunOrder:
    """The order of one kind of microbatch (training has one, evaluation another).

    The record is what the last microbatch demanded, complete once the next one begins. A microbatch that demands
    something else than the record says loses the rest of it (nothing is upcoming any more) and is recorded to its end.
    One that ends before the record does leaves the shorter record; one without any demand leaves the record alone.
    Consecutive demands of one unit are one place of the order; how often it was demanded there is kept besides.

    recorded: the order of the last microbatch that was recorded to its end. follows: whether this microbatch has been
    as the record says so far.
    """

    def __init__(self) -> None:
        self.recorded: tuple[int, ...] = ()
        self.follows = False
        self._recorded_counts: tuple[int, ...] = ()
        self._demands: list[int] | None = None  # of this microbatch; None: none has begun
        self._counts: list[int] = []  # how often in a row
        self._repeats = False

    def begin(self, *, repeats: bool) -> None:
        """A microbatch begins; what was demanded since the last beginning is now the record.

        repeats: another microbatch of the kind follows in this step: after the end comes the beginning again.
        """
        if self._demands:
            self.recorded, self._recorded_counts = tuple(self._demands), tuple(self._counts)
        self._demands, self._counts = [], []
        self.follows, self._repeats = bool(self.recorded), repeats

    def need(self, unit: int) -> None:
        """The unit is needed now."""
        assert self._demands is not None, f"unit {unit} needed before a microbatch has begun"
        if self._demands[-1:] == [unit]:
            self._counts[-1] += 1
            return
        place = len(self._demands)
        self.follows = self.follows and self.recorded[place : place + 1] == (unit,)
        self._demands.append(unit)
        self._counts.append(1)

    def upcoming(self) -> Iterator[int]:
        """Units needed after the current one, in order, until one would come a second time.

        There it ends, because that unit is freed between its two uses: were a later one gathered ahead across it, the
        unit would be demanded while the later one is held, and no bound on what is gathered would hold.
        """
        if not self.follows:
            return
        demands = self._demands or []
        seen = set(demands[-1:])
        for unit in self.recorded[len(demands) :] + self.recorded * self._repeats:
            if unit in seen:
                return
            seen.add(unit)
            yield unit

    def next_is_same(self, unit: int) -> bool:
        """Whether, by the record, this microbatch demands the unit again before any other (the last of the forward,
        first of the backward). The first unit of the next microbatch does not count: it is gathered afresh."""
        demands = self._demands or []
        return (
            self.follows
            and demands[-1:] == [unit]
            and self._counts[-1] < self._recorded_counts[len(demands) - 1]
        )


class ReductionOrder:
    """Counts a microbatch's gradients, and says which units are reduced: see [Note: order of reductions].

    keys: of each unit's gradients, each reported once a microbatch. registered: the units in the order of registration,
    for an order of reductions that does not depend on the run; None: that of the run. late: units that are reduced with
    a step's last microbatch only; held_back: all of them are. is_last: this microbatch is the step's last.
    """

    def __init__(self, keys: Sequence[Collection[str]], registered: Sequence[int] | None) -> None:
        self._keys = keys
        self._unit_of = {key: unit for unit, own in enumerate(keys) for key in own}
        self._registered = dict.fromkeys(registered or ())
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
        self._missing = [set(own) for own in self._keys]

    def forward_reached(self, unit: int) -> None:
        """The forward of this microbatch has reached a unit (again, perhaps)."""
        if unit not in self._reached:
            self._reached[unit] = None
            self._order = None

    def too_late(self, key: str) -> int | None:
        """The key's unit, where no more gradients of it were to come."""
        unit = self._unit_of[key]
        return unit if key not in self._missing[unit] or unit in self._in_order()[: self._begun] else None

    def contributed(self, key: str) -> int | None:
        """A contribution is complete. The unit, if it was the last one of it."""
        unit = self._unit_of[key]
        self._missing[unit].discard(key)
        return None if self._missing[unit] else unit

    def complete(self, units: Collection[int]) -> list[int]:
        """What of these has not come by now does not come in this microbatch. The units to be reduced now, in order."""
        self._completed.update(units)
        order, begun = self._in_order(), self._begun
        while self._begun < len(order) and order[self._begun] in self._completed:
            self._begun += 1
        now = order[begun : self._begun]
        return [unit for unit in now if self.is_last or not (self.held_back or unit in self.late)]

    def _in_order(self) -> list[int]:
        if self._order is None:
            order = self._registered or self._reached or self._reached_before
            rest = (unit for unit in range(len(self._keys)) if unit not in order)
            self._order = [*reversed(order), *rest]
        return self._order
