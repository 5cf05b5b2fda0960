"""What every calculator here checks its arguments with."""

from __future__ import annotations

import math


class CommunicationError(ValueError):
    """A quantity that no training has. `field` is the argument at fault."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field
        self.why = why


def require_positive(**quantities: float) -> None:
    """Raises CommunicationError for a quantity that is not finite and more than 0."""
    for field, value in quantities.items():
        if not 0 < value < math.inf:
            raise CommunicationError(field, f"must be finite and more than 0, not {value:g}")


def require_count(least: int = 1, **quantities: int) -> None:
    """Raises CommunicationError for a number of things below `least`."""
    for field, value in quantities.items():
        if value < least:
            raise CommunicationError(field, f"must be at least {least}, not {value}")
