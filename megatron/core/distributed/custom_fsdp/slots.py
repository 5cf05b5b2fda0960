"""Which of the two lasting slots of the double buffer a unit is gathered into (floor 0, pure).

Instead of memory allocated each time, two slots a role (weights, gradients) last for the whole run. Units take them in
turns in the order of the forward, so that neighbours never share one: while one is used, the next is on its way, in
the forward and, the order being the reverse, in the backward. A slot is as large as the largest unit that uses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """slot_of: by unit: 0 or 1, None where it has memory of its own; slot_bytes: of the two slots; overflow: the units
    with memory of their own, to be counted in the log."""

    slot_of: tuple[int | None, ...]
    slot_bytes: tuple[int, int]
    overflow: tuple[int, ...]


def plan_slots(sizes: Sequence[int], *, lasting: Collection[int] = ()) -> SlotPlan:
    """Slots for units of these sizes (bytes), in the order of the forward.

    lasting: units that stay while others come and go (gathered from first to last use, or kept by a policy) cannot
    take turns and get memory of their own; the others take turns as if these were not there.
    """
    assert all(0 <= unit < len(sizes) for unit in lasting), (lasting, len(sizes))
    slot_of: list[int | None] = [None] * len(sizes)
    for turn, unit in enumerate(unit for unit in range(len(sizes)) if unit not in lasting):
        slot_of[unit] = turn % 2
    first, second = (
        max((size for size, its in zip(sizes, slot_of, strict=True) if its == slot), default=0)
        for slot in (0, 1)
    )
    return SlotPlan(tuple(slot_of), (first, second), tuple(sorted(lasting)))


def conflicts(plan: SlotPlan, order: Sequence[int], *, repeats: bool = False) -> list[tuple[int, int]]:
    """Pairs of units that follow one another in an order of demands and have the same slot.

    The later of a pair cannot be gathered while the earlier is in use, only after it. repeats: the order begins anew
    after its end. Units with memory of their own are passed over. Of orders that are a forward in the order of the
    plan and the reverse of it, only the step from the end to the beginning can have one.
    """
    demands = [unit for unit in order if plan.slot_of[unit] is not None]
    following = demands[1:] + (demands[:1] if repeats else [])
    return [
        (earlier, later)
        for earlier, later in zip(demands, following, strict=repeats)
        if earlier != later and plan.slot_of[earlier] == plan.slot_of[later]
    ]
