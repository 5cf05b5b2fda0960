"""The accesses of a chunk by numbers of units, and units merged to the size of a bucket (floor 0, pure).

Where gradients stay whole for a step (no_shard, optim), units that complete them one after the other are merged until
they have the size of a bucket: one long collective instead of several short ones. Plans know only merged units then.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)  # what units are called: names or numbers
L = TypeVar("L", bound=Hashable)
Row = tuple[tuple[K, ...], ...]


@dataclass(frozen=True)
class Accesses(Generic[K]):
    """The units that a chunk's computations need together (plan/held/units.py, [Note: accesses]), by name or by number:
    in the order of the forward and in that of the backward. Also those of units that another chunk of the rank
    declares and this one reads."""

    forward: Row[K]
    backward: Row[K]

    @property
    def units(self) -> tuple[K, ...]:
        """A unit's place here is its number in the chunk."""
        return distinct(itertools.chain(*self.forward, *self.backward))

    @property
    def completed(self) -> list[K]:
        """Its units in the order of their last accesses in the backward."""
        last = {unit: place for place, access in enumerate(self.backward) for unit in access}
        return sorted(last, key=last.__getitem__)

    def renamed(self, names: Mapping[K, L]) -> Accesses[L]:
        """With other names or numbers for units; those without one are left out, and accesses one after the other of
        the same units are one."""
        return Accesses(_renamed(self.forward, names), _renamed(self.backward, names))

    def merged(self, groups: Sequence[Collection[K]]) -> Accesses[int]:
        """Each group is one unit, its number the group's place."""
        numbers = {unit: number for number, group in enumerate(groups) for unit in group}
        rows = self.renamed(numbers)
        return Accesses(_told_apart(rows.forward), _told_apart(rows.backward))


def merged_groups(
    chunks: Sequence[Accesses[int]], numel: Sequence[int], limit: int, alone: Collection[int] = ()
) -> list[list[int]]:
    """Which units are merged so that each has at least `limit` elements, as far as neighbours in a backward are there.

    numel: of each unit. What several chunks need stays a unit of its own, and so does what is in `alone`.
    """
    counts = Counter(number for chunk in chunks for number in chunk.units)
    groups = [[number] for number, n in counts.items() if n > 1 or number in alone]
    apart = {number for group in groups for number in group}
    for chunk in chunks:
        own: list[list[int]] = []
        for number in (number for number in chunk.completed if number not in apart):
            if not own or sum(numel[one] for one in own[-1]) >= limit:
                own.append([])
            own[-1].append(number)
        groups += own
    return sorted(sorted(group) for group in groups)


def merged_name(names: Sequence[str]) -> str:
    """Of units that are merged, in order."""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def distinct(units: Iterable[K]) -> tuple[K, ...]:
    return tuple(dict.fromkeys(units))


def _renamed(row: Row[K], names: Mapping[K, L]) -> Row[L]:
    others = (distinct(names[unit] for unit in access if unit in names) for access in row)
    return tuple(access for access, _ in itertools.groupby(access for access in others if access))


def _told_apart(row: Row[int]) -> Row[int]:
    """Of merged units nobody hears where one access of a unit ends and another of it, with more units, begins."""
    accesses: list[tuple[int, ...]] = []
    for access in row:
        if accesses and (set(access) <= set(accesses[-1]) or set(access) >= set(accesses[-1])):
            accesses[-1] = distinct((*accesses[-1], *access))
        else:
            accesses.append(access)
    return tuple(accesses)
