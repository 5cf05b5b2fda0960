"""What is said of the exchanges between tokens and experts that lie over ranks. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.transport.traffic import NOTHING, Moved, TrafficCounter
from megatron.core.words import counted, decimal, size_text, time_text
from megatron.estimate.model_costs import ModelCosts
from megatron.training.report.session import Session


class Exchanges:
    """Of one rank with its peers, since the last line.

    rank: whose. kinds: collectives that tokens travel by; none: experts have no ranks of their own. parts: ranks that
    have other experts each. planned: bytes of a microbatch where every expert gets as many tokens; None: not known.
    seconds_per_byte: on the wire by itself, as measured at the start.
    """

    def __init__(
        self,
        rank: int,
        traffic: TrafficCounter,
        kinds: Sequence[str] = (),
        parts: int = 1,
        planned: int | None = None,
        seconds_per_byte: float | None = None,
    ) -> None:
        self._rank, self._traffic, self._kinds = rank, traffic, kinds
        self._parts, self._planned, self._seconds_per_byte = parts, planned, seconds_per_byte
        self.reset()

    @classmethod
    def of(cls, session: Session) -> Exchanges:
        """This rank's."""
        ps, model, spec = session.ps, session.config.model, session.planner.spec
        if ps.experts is None:
            return cls(ps.rank, ps.ep_etp_group.traffic)
        costs, stages = session.config.model_costs, spec.held_by(ps.pp_rank)
        planned = None
        if isinstance(costs, ModelCosts):
            planned = costs.exchanged_bytes(stages, splits=spec.splits_backward)
        dispatcher = model.moe_token_dispatcher_type
        kinds = ("all_gather", "reduce_scatter") if dispatcher == "allgather" else ("all_to_all",)
        wire = session.config.exchange_wire
        seconds = None if wire is None else wire.seconds_per_byte
        return cls(ps.rank, ps.ep_etp_group.traffic, kinds, ps.ep_group.size, planned, seconds)

    def reset(self) -> None:
        """Start the next interval."""
        self._before, self._waited_s = self._moved(), self._traffic.waited_s
        self._steps = self._microbatches = 0

    def add_iteration(self, num_microbatches: int) -> None:
        """Count one iteration. num_microbatches: of this rank."""
        self._steps, self._microbatches = self._steps + 1, self._microbatches + num_microbatches

    def lines(self, tokens: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
        """Of the interval. tokens: that each expert has computed, by layer."""
        if not self._kinds or not self._steps:
            return ()
        moved, steps = self._moved() - self._before, self._steps
        told = f" > exchanges with experts, of rank {self._rank}: {counted(moved.calls // steps, 'call')} a step, "
        told += size_text(moved.payload_bytes // steps)
        if self._planned is not None:
            told += f" (planned {size_text(self._planned * self._microbatches // steps)} at even load)"
        told += f", waited {time_text((self._traffic.waited_s - self._waited_s) / steps)}"
        if self._planned is not None and self._seconds_per_byte is not None:
            planned_s = self._planned * self._microbatches / steps * self._seconds_per_byte
            told += f" (the wire by itself takes {time_text(planned_s)} for what is planned)"
        loads = {layer: fullest(counts, self._parts) for layer, counts in tokens.items() if any(counts)}
        if loads:
            layer = max(loads, key=loads.__getitem__)
            told += f"; the fullest rank had {decimal(loads[layer], 2)} x the mean rows, in layer {layer}"
        return (told,)

    def _moved(self) -> Moved:
        return sum((self._traffic.moved(kind) for kind in self._kinds), start=NOTHING)


def fullest(counts: Sequence[int], parts: int) -> float:
    """Rows of the rank whose experts have most, over the mean of `parts` ranks. counts: by expert."""
    size = len(counts) // parts
    rows = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
    return max(rows) * len(rows) / sum(rows)
