"""Tracks every byte that the engine holds: by category and unit, now and at most.

Persistent categories are booked once, when the engine is built; transient ones when their memory is taken and given
back (docs/logging.md says what each is). Memory that torch itself holds, activations and the temporaries of kernels, is
not in here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from megatron.core.words import counted

PERSISTENT = ("weights", "main_weights", "main_grads", "extra_grads", "moments", "slots")
TRANSIENT = (
    "gathered",
    "grads",
    "extra",
    "exchange",
    "outer",
    "packed",
    "casts",
    "figures",
    "tails",
    "snapshot",
    "saved",
)
GRADIENTS = ("grads", "extra")  # whole ones, and accumulators of further uses
PLANNED = ("gathered", "grads", "extra")  # of these, that which a plan's operations take and give back


class MemoryTracker:
    """Live and peak bytes. Categories are those above; a unit is any name, "" for what belongs to none."""

    def __init__(self) -> None:
        self._live: Counter[tuple[str, str]] = Counter()
        self._by_category: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self.transient_bytes = self.peak_transient_bytes = 0
        self._fullest, self._planned_bytes, self._most_planned = Counter[str](), 0, 0
        self.most_gradients = 0  # of GRADIENTS together, at once
        self.overflows = 0  # acquisitions of the double buffer that took memory beside its slots, as planned

    def hold(self, category: str, unit: str, num_bytes: int) -> None:
        """Memory was taken (given back, where negative)."""
        self._live[category, unit] += num_bytes
        self._by_category[category] += num_bytes
        self._peaks[category] = max(self._peaks[category], self._by_category[category])
        if category in GRADIENTS:
            self.most_gradients = max(self.most_gradients, sum(map(self.live, GRADIENTS)))
        if category in TRANSIENT:
            self.transient_bytes += num_bytes
            self.peak_transient_bytes = max(self.peak_transient_bytes, self.transient_bytes)
            if category in PLANNED:
                self._planned_bytes += num_bytes
                if self._planned_bytes > self._most_planned:
                    self._note_fullest()
        else:
            assert category in PERSISTENT, f"category {category!r}; known: {PERSISTENT + TRANSIENT}"

    def free(self, category: str, unit: str, num_bytes: int) -> None:
        """Memory was given back."""
        live = self._live[category, unit]
        assert live >= num_bytes, f"{category} of {unit!r}: {num_bytes} bytes given back of {live}"
        self.hold(category, unit, -num_bytes)

    @contextlib.contextmanager
    def holding(self, category: str, num_bytes: int, unit: str = "") -> Iterator[None]:
        """Memory that is there inside."""
        self.hold(category, unit, num_bytes)
        try:
            yield
        finally:
            self.free(category, unit, num_bytes)

    def book(self, persistent: Mapping[str, int]) -> None:
        """Memory held for the whole run, by category."""
        for category, num_bytes in persistent.items():
            self.hold(category, "", num_bytes)

    def live(self, category: str, unit: str | None = None) -> int:
        """Bytes held now, of one unit or of all."""
        return self._by_category[category] if unit is None else self._live[category, unit]

    def peak(self, category: str) -> int:
        """The most bytes of a category at once, since the beginning or `reset_peaks`."""
        return self._peaks[category]

    def begin_step(self) -> None:
        """`fullest` counts from now on."""
        self._note_fullest()

    def fullest(self, *categories: str) -> int:
        """Bytes of these categories at the moment at which a plan's operations held the most, since `begin_step`."""
        return sum(self._fullest[category] for category in categories)

    def _note_fullest(self) -> None:
        self._most_planned = self._planned_bytes
        self._fullest = Counter({category: self._by_category[category] for category in PLANNED})

    @property
    def persistent_bytes(self) -> int:
        return sum(self._by_category[category] for category in PERSISTENT)

    def reset_peaks(self) -> None:
        """Peaks count from now on."""
        self._peaks = Counter(self._by_category)
        self.most_gradients = sum(map(self.live, GRADIENTS))
        self.peak_transient_bytes = self.transient_bytes

    def lines(self) -> list[str]:
        """A table for the log: a row a category, then the units that hold something now."""
        rows = [(c, self._by_category[c], self._peaks[c]) for c in PERSISTENT + TRANSIENT if self._peaks[c]]
        rows.append(("transient", self.transient_bytes, self.peak_transient_bytes))
        out = [f"{name:<14}{live:>16,}{peak:>16,}" for name, live, peak in rows]
        out.insert(-1, f"{'persistent':<14}{self.persistent_bytes:>16,}")
        units = sorted((key, num_bytes) for key, num_bytes in self._live.items() if key[1] and num_bytes)
        out += [f"  {category} {unit}: {num_bytes:,}" for (category, unit), num_bytes in units]
        if self.overflows:
            out.append(f"double buffer: {counted(self.overflows, 'time')} memory beside the slots")
        return [f"{'category':<14}{'live bytes':>16}{'peak bytes':>16}", *out]
