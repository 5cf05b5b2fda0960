"""In which order units are needed: recorded in one microbatch, replayed in the next (floor 0, pure)."""

from __future__ import annotations

from collections.abc import Iterator


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
        self._record_counts: tuple[int, ...] = ()
        self._demands: list[int] = []  # of this microbatch
        self._counts: list[int] = []  # how often in a row
        self._repeats: bool | None = None  # None: no microbatch has begun

    def begin(self, *, repeats: bool) -> None:
        """A microbatch begins; what was demanded since the last beginning is now the record.

        repeats: another microbatch of the kind follows in this step: after the end comes the beginning again.
        """
        if self._demands:
            self.recorded, self._record_counts = tuple(self._demands), tuple(self._counts)
        self._demands, self._counts = [], []
        self.follows = bool(self.recorded)
        self._repeats = repeats

    def need(self, unit: int) -> None:
        """The unit is needed now."""
        assert self._repeats is not None, f"unit {unit} needed before a microbatch has begun"
        if self._demands and self._demands[-1] == unit:
            self._counts[-1] += 1
            return
        place = len(self._demands)
        self.follows = self.follows and place < len(self.recorded) and self.recorded[place] == unit
        self._demands.append(unit)
        self._counts.append(1)

    def upcoming(self) -> Iterator[int]:
        """Units needed after the current one, in order, until one would come a second time.

        There it ends, because that unit is freed between its two uses: were a later one gathered ahead across it, the
        unit would be demanded while the later one is held, and no bound on what is gathered would hold.
        """
        if not self.follows:
            return
        seen = set(self._demands[-1:])
        ahead = self.recorded[len(self._demands) :]
        for unit in ahead + self.recorded if self._repeats else ahead:
            if unit in seen:
                return
            seen.add(unit)
            yield unit

    def next_is_same(self, unit: int) -> bool:
        """Whether, by the record, this microbatch demands the unit again before any other (the last of the forward,
        first of the backward). The first unit of the next microbatch does not count: it is gathered afresh."""
        if not self.follows or self._demands[-1:] != [unit]:
            return False
        return self._counts[-1] < self._record_counts[len(self._counts) - 1]
