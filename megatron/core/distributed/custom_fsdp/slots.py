"""Which of the two lasting slots of the double buffer a unit is gathered into (floor 0, pure).

Instead of memory allocated each time, two slots a role (weights, gradients) last for the whole run. Units take them in
turns in the order of the forward, whatever their sizes, so that neighbours never share one: while one is used, the next
is on its way, in the forward and, the order being the reverse, in the backward. A slot is as large as the largest unit
that uses it (`memory.DoubleBuffer`): with units of very different sizes both slots may be as large as the largest.
"""

from __future__ import annotations

from collections.abc import Collection


def plan_slots(num_units: int, *, lasting: Collection[int] = ()) -> tuple[int | None, ...]:
    """The slot of each unit, in the order of the forward: 0 or 1, None where it has memory of its own.

    lasting: units that stay while others come and go (gathered from first to last use, or kept by a policy), or that
    run inside others, cannot take turns and get memory of their own; the others take turns as if these were not there.
    """
    assert all(0 <= unit < num_units for unit in lasting), (lasting, num_units)
    slot_of: list[int | None] = [None] * num_units
    for turn, unit in enumerate(unit for unit in range(num_units) if unit not in lasting):
        slot_of[unit] = turn % 2
    return tuple(slot_of)
