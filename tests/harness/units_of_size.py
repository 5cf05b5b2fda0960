"""Units for flat buffers without a model: what closes, in backward order, once it has so many elements."""

from __future__ import annotations

from collections.abc import Mapping


def units_of_size(numels: Mapping[str, int], size: int) -> dict[str, str]:
    """Parameter -> its unit. numels: elements by name, in the order of registration."""
    units: dict[str, str] = {}
    held = number = 0
    for name, numel in reversed(numels.items()):
        number, held = (number + 1, 0) if units and held >= size else (number, held)
        units[name] = f"unit {number}"
        held += numel
    return units
