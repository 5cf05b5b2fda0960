"""The wire between ranks with different experts, as a run has measured it (floor 0, pure)."""

from __future__ import annotations

import math
from typing import NamedTuple


class ExchangeWire(NamedTuple):
    """seconds_per_byte: of what is counted as moved, in an exchange of a layer's size with nothing beside it, latency
    and all. flops_per_s: of a product of the layer's size. Both of the slowest rank."""

    seconds_per_byte: float
    flops_per_s: float

    @property
    def flops_per_byte(self) -> float:
        """What exchanges are priced by: a power of two, so that the next start of the run finds the orders that
        this one has searched for."""
        return 2.0 ** round(math.log2(self.seconds_per_byte * self.flops_per_s))
