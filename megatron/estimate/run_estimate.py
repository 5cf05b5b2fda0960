"""What the ranks of a run hold, before it starts: by pipeline rank, for page, log and JSON (floor 0, pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.words import size_text
from megatron.estimate.description import ModelPiece, ModuleFigures
from megatron.estimate.peak import Peak, peak_json
from megatron.estimate.rank_parts import BETWEEN_STEPS, RankAccount


@dataclasses.dataclass(frozen=True)
class RankEstimate:
    """One pipeline rank, as each of its tensor and data parallel ranks holds it. stages: their numbers. at_rest: bytes
    between steps, by kind. modules: by path. beside: what an evaluation, a save and a load hold at most, by kind."""

    rank: int
    stages: tuple[int, ...]
    at_rest: Mapping[str, int]
    peak: Peak
    modules: Mapping[str, ModuleFigures]
    beside: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, account: RankAccount, stages: Mapping[int, Sequence[ModelPiece]]) -> RankEstimate:
        """stages: the pieces of each."""
        modules: dict[str, ModuleFigures] = {}
        for piece in (piece for pieces in stages.values() for piece in pieces):
            for path, figures in piece.modules.items():
                modules[path] = modules[path].beside(figures) if path in modules else figures
        return cls(account.rank, tuple(stages), account.at_rest, account.peak, modules, account.beside)


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """ranks: one a pipeline rank, in order. host_bytes: of a machine's memory, by all of its ranks. capacity: bytes of
    a rank's device, None where nobody knows; device: its name. microbatches: of a step, that were looked at."""

    ranks: tuple[RankEstimate, ...]
    host_bytes: int
    capacity: int | None
    device: str
    microbatches: int

    @property
    def fullest(self) -> Peak:
        return max((one.peak for one in self.ranks), key=lambda peak: peak.total)


def estimate_json(estimate: RunEstimate) -> dict[str, Any]:
    """Of --check-config --json."""
    ranks = [_rank_json(one) for one in estimate.ranks]
    return {"ranks": ranks, "host_bytes": estimate.host_bytes, "microbatches": estimate.microbatches}


def _rank_json(one: RankEstimate) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "stages": list(one.stages),
        "allocated_peak_bytes": one.peak.total,
        "steady_allocated_bytes": sum(one.at_rest.values()),
        "by_kind": dict(one.peak.held),
        "beside": {name: dict(held) for name, held in one.beside.items()},
        "peak": peak_json(one.peak),
        "by_module": {path: _module_json(figures) for path, figures in one.modules.items()},
    }


def _module_json(figures: ModuleFigures) -> dict[str, Any]:
    """Of a microbatch. recompute_flops: of its forward."""
    forward = figures.work.get("F")
    flops = 0 if forward is None else forward.products + forward.attention
    return {
        "parameters": figures.parameters,
        "activation_bytes": figures.kept_bytes,
        "recompute_flops": flops,
        "bytes_per_flop": figures.kept_bytes / flops if flops else None,
    }


def table_lines(estimate: RunEstimate) -> list[str]:
    """A row for neighbouring pipeline ranks that hold the same, under a heading; and what any of them holds at most in
    what runs between steps."""
    rows = [("pipeline rank", "between steps", "at most", "where")]
    facts: list[tuple[list[int], tuple[str, str, str]]] = []
    for one in estimate.ranks:
        sizes = size_text(sum(one.at_rest.values()), digits=3), size_text(one.peak.total, digits=3)
        row = *sizes, " in ".join(filter(None, (one.peak.unit, one.peak.operation)))
        if facts and facts[-1][1][:2] == row[:2]:
            facts[-1][0].append(one.rank)
        else:
            facts.append(([one.rank], row))
    rows += [(_span(ranks), *row) for ranks, row in facts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    every = {
        name: [sum(one.beside.get(name, {}).values()) for one in estimate.ranks] for name in BETWEEN_STEPS
    }
    told = [f"{name} {size_text(max(sizes), digits=3)}" for name, sizes in every.items() if any(sizes)]
    return [*lines, f"at most in: {', '.join(told)}"] if told else lines


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def fit_text(estimate: RunEstimate) -> str:
    """Whether the fullest rank fits its device."""
    if estimate.capacity is None:
        return "--device-profile says whether that fits"
    most, room = estimate.fullest.total, size_text(estimate.capacity, digits=3)
    if most > estimate.capacity:
        over = size_text(most - estimate.capacity, digits=3)
        return f"does not fit {room} of {estimate.device}: {over} too much"
    return f"fits {room} of {estimate.device}"
