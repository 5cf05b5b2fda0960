"""What data parallelism asks of a plan: how weights and gradients are cut, and what a rank may hold of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.sharding_table import STRATEGIES, Sharding, ShardOver
from megatron.core.transport.traffic import Moved

if TYPE_CHECKING:  # a plan names what it was made for, and units speak of a plan's operations
    from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits, StateBytes, UnitCosts

POLICIES = ("memory", "backward", "step", "budget")

# By stage, by unit: how many microbatches of that stage each REDUCE of the unit sums up. It decides bits.
Grouping = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Residency:
    """The same on all ranks.

    strategy: a row of `sharding_table.STRATEGIES`. ways, outer: ranks that share the states, and instances of
    them. outer_optimizer: the optimizer is cut over instances too. policy: --fsdp-reshard-policy. budget: by pipeline
    rank, bytes of gathered weights and whole gradients that it may hold beyond what policy `memory` does. limit: by
    pipeline rank, bytes that it may hold in all (states at rest, gathered weights, gradients, activations, whose costs
    are in bytes then). Policy `budget` has one of the two or both, others none. ahead: bytes of whole weights at any
    time that gathers ahead of their use keep to, the unit in use included; 0: twice the rank's mean unit.
    overlap_gather, overlap_reduce: whether gathers and reductions run beside computations.
    """

    strategy: str
    ways: int = 1
    outer: int = 1
    outer_optimizer: bool = False
    policy: str = "memory"
    budget: tuple[int, ...] | None = None
    limit: tuple[float, ...] | None = None
    ahead: int = 0
    overlap_gather: bool = True
    overlap_reduce: bool = True

    def __post_init__(self) -> None:
        assert self.strategy in STRATEGIES, self.strategy
        assert self.policy in POLICIES, self.policy
        assert self.ways >= 1, self
        assert self.outer >= 1, self
        bound = self.budget is not None or self.limit is not None
        assert bound == (self.policy == "budget"), f"policy {self.policy}: {self.budget=}, {self.limit=}"

    def within(self, limit: tuple[float, ...]) -> Residency:
        """With a limit, which decides on what is kept."""
        return dataclasses.replace(self, policy="budget", budget=None, limit=limit)

    @property
    def row(self) -> Sharding:
        return STRATEGIES[self.strategy]

    @property
    def moves(self) -> bool:
        """Whether ranks share anything; without, a plan has no operations of data parallelism."""
        return self.ways > 1 or self.outer > 1

    @property
    def weights_sharded(self) -> bool:
        """Whether whole weights come and go."""
        return self.ways > 1 and self.row.weights is not ShardOver.NONE

    @property
    def grads_sharded(self) -> bool:
        """Whether whole gradients come and go."""
        return self.ways > 1 and self.row.main_grads is not ShardOver.NONE

    @property
    def gathers_once(self) -> bool:
        """Whether weights are whole at rest, and gathered once behind each step of the optimizer."""
        inner = self.ways > 1 and self.row.optimizer is not ShardOver.NONE
        return not self.weights_sharded and (inner or (self.outer_optimizer and self.outer > 1))

    def ahead_of(self, units: RankUnits) -> int:
        """The bound of gathers ahead on a rank, in bytes."""
        if self.ahead or not len(units):
            return self.ahead
        return -(-2 * sum(units.weight_bytes) // len(units))


@dataclass(frozen=True)
class PlannedResidency:
    """What a plan with operations of data parallelism was made for; it is no good for anything else.

    units: names by stage. grouping: `Grouping` as planned.
    """

    strategy: str
    ways: int
    outer: int
    outer_optimizer: bool
    policy: str
    units: tuple[tuple[str, ...], ...]
    grouping: Grouping

    @classmethod
    def of(cls, asked: Residency, stages: Sequence[StageUnits], grouping: Grouping) -> PlannedResidency:
        names = tuple(tuple(unit.name for unit in stage.units) for stage in stages)
        row = (asked.strategy, asked.ways, asked.outer, asked.outer_optimizer)
        return cls(*row, asked.policy, names, grouping)

    def as_json(self) -> dict[str, Any]:
        """For files and hashes. Equal groups in a row are `size*count`."""
        runs = [
            [
                ",".join(f"{size}*{len(list(run))}" for size, run in itertools.groupby(groups))
                for groups in stage
            ]
            for stage in self.grouping
        ]
        units = [list(units) for units in self.units]
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**known, "units": units, "grouping": runs}

    @classmethod
    def from_json(cls, content: object, most_groups: int) -> PlannedResidency:
        """What `as_json` wrote. most_groups: no more in all are made. Raises ValueError for anything else."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(content, dict) or set(content) != fields:
            raise ValueError(f"`residency` has {', '.join(sorted(fields))}")
        numbers = (content["ways"], content["outer"])
        integers = all(type(one) is int and one >= 1 for one in numbers)
        if not integers or type(content["outer_optimizer"]) is not bool:
            raise ValueError(
                "`residency`: ways and outer are numbers of ranks, outer_optimizer is true or false"
            )
        if content["strategy"] not in STRATEGIES or content["policy"] not in POLICIES:
            raise ValueError(f"`residency`: strategy is one of {STRATEGIES}, policy one of {POLICIES}")
        units, texts = (_texts(content[name], name) for name in ("units", "grouping"))
        runs = [[_runs(text) for text in stage] for stage in texts]
        if sum(count for stage in runs for unit in stage for _, count in unit) > most_groups:
            raise ValueError("`residency`: there are more groups of microbatches than operations")
        grouping = tuple(
            tuple(tuple(size for size, count in unit for _ in range(count)) for unit in stage)
            for stage in runs
        )
        return cls(**{**content, "units": units, "grouping": grouping})


def _runs(text: str) -> list[tuple[int, int]]:
    """(size, count) of equal groups in a row."""
    runs = [re.fullmatch(r"(\d{1,9})\*(\d{1,9})", one) for one in text.split(",")] if text else []
    if not all(runs):
        raise ValueError(f"{text!r:.80} is no list of groups: expected for example 1*64 or 3*1,2*4")
    return [(int(run[1]), int(run[2])) for run in runs if run]


def _texts(content: object, name: str) -> tuple[tuple[str, ...], ...]:
    stages = content if isinstance(content, list) else [content]
    if not all(isinstance(stage, list) and all(isinstance(one, str) for one in stage) for stage in stages):
        raise ValueError(f"`residency`: {name} is a list of texts a stage")
    return tuple(map(tuple, stages))


@dataclass(frozen=True)
class LaneCosts:
    """What the wire to data parallel peers costs, in the cost model's unit of time: latency of a collective, bytes in a
    unit of time. It is one wire a rank; messages between stages are taken to have another one, which they have not
    where both go over the same network card."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def unshard(self, unit: UnitCosts, residency: Residency, *, first: bool) -> float:
        """A gather, and where instances cut the optimizer the one over them before the row's first one."""
        seconds = self._ring(unit.weight_bytes, residency.ways)
        if first and residency.outer_optimizer:
            seconds += self._ring(unit.outer_weight_bytes, residency.outer)
        return seconds

    def reduce(self, unit: UnitCosts, residency: Residency) -> float:
        """A reduce-scatter; where nothing is cut an all-reduce, which goes round twice."""
        rounds = 2 if residency.row.optimizer is ShardOver.NONE else 1
        return self._ring(rounds * unit.grad_bytes, residency.ways)

    def outer_sum(self, unit: UnitCosts, residency: Residency) -> float:
        """An all-reduce over instances, or where they cut the optimizer a reduce-scatter."""
        rounds = 1 if residency.outer_optimizer else 2
        return self._ring(rounds * unit.outer_grad_bytes, residency.outer)

    def of(self, moved: Moved, ways: int) -> float:
        """What so many collectives of so many bytes take one after the other."""
        if ways == 1:
            return 0.0
        return moved.calls * self.latency + moved.payload_bytes * (ways - 1) / (ways * self.bandwidth)

    def _ring(self, num_bytes: int, ways: int) -> float:
        return self.of(Moved(1, num_bytes), ways)


@dataclass(frozen=True)
class RankBudget:
    """What one limit in bytes is chosen under. rows: by strategy that may be chosen, what is asked of plans, with the
    limit, and how large states are. flops, bytes_per_s: of a rank, and of its wire to data parallel peers."""

    rows: tuple[tuple[Residency, StateBytes], ...]
    flops: float
    bytes_per_s: float

    def lanes(self, unit_flops: float) -> LaneCosts:
        """In a cost model's unit of time, in which so many FLOPs are computed."""
        return LaneCosts(bandwidth=self.bytes_per_s * unit_flops / self.flops)
