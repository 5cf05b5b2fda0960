"""How much an engine has moved since the step began: calls and payload bytes by kind of collective.

The payload of a collective is its full buffer: what is gathered, or reduced, counted once.
"""

from __future__ import annotations

import collections
import dataclasses

from megatron.core.distributed.traffic import Traffic
from megatron.core.traffic_counter import Moved


class TrafficCounter:
    """kinds: all_gather, reduce_scatter, all_reduce over the inner ranks; outer_... over the outer ones;
    evaluation_all_gather: for forwards without backward, explicit_all_gather: for whoever reads whole weights outside
    of the model, which no step's plan knows of."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.payload_bytes: collections.Counter[str] = collections.Counter()

    def count(self, kind: str, payload_bytes: int) -> None:
        self.calls[kind] += 1
        self.payload_bytes[kind] += payload_bytes

    def reset(self) -> None:
        self.calls.clear()
        self.payload_bytes.clear()

    def as_traffic(self) -> Traffic:
        """As plans are written."""
        kinds = [field.name for field in dataclasses.fields(Traffic)]
        return Traffic(**{kind: Moved(self.calls[kind], self.payload_bytes[kind]) for kind in kinds})

    def as_dict(self) -> dict[str, tuple[int, int]]:
        """kind -> (calls, payload bytes)."""
        return {kind: (calls, self.payload_bytes[kind]) for kind, calls in sorted(self.calls.items())}
