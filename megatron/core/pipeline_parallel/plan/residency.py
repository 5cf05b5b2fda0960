"""What data parallelism asks of a plan: how weights and gradients are cut, and what a rank may hold of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import schema
from megatron.core.sharding_table import STRATEGIES, RankGroup, Sharding, ShardOver, ShardPlace
from megatron.core.words import counted

if TYPE_CHECKING:  # a plan names what it was made for, and units speak of a plan's operations
    from megatron.core.pipeline_parallel.plan.held.state_bytes import StateBytes
    from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits, UnitCosts

POLICIES = ("memory", "backward", "step", "budget")

# By stage, by unit: how many microbatches of that stage each REDUCE of the unit sums up. It decides bits.
Grouping = tuple[tuple[tuple[int, ...], ...], ...]
# How plan files call the sizes of the groups that every run has.
_SIZES = {"dp": "ways", "outer": "outer"}
_NAMES = schema.array(schema.array(schema.text()))
_WORDS = {
    "strategy": schema.one_of(*STRATEGIES),
    **dict.fromkeys(_SIZES.values(), schema.integer(1)),
    "outer_optimizer": schema.boolean,
    "policy": schema.one_of(*POLICIES),
    "units": _NAMES,
    "grouping": schema.array(schema.array(schema.text(max_chars=schema.MAX_INT))),
    "groups": schema.optional(schema.array(schema.fields_of(RankGroup))),
}


def groups_of(stages: Iterable[StageUnits]) -> tuple[RankGroup, ...]:
    """The groups of ranks that have to do with any unit."""
    every = (share.group for stage in stages for unit in stage.units for share in unit.shares)
    return tuple(dict.fromkeys(every))


def are_shared(stages: Iterable[StageUnits]) -> bool:
    """Whether ranks share anything; without, a plan has no operations of data parallelism."""
    return any(group.size > 1 for group in groups_of(stages))


def _of_several(groups: Iterable[RankGroup]) -> tuple[RankGroup, ...]:
    return tuple(sorted((one for one in groups if one.size > 1), key=lambda one: one.name))


def over_ranks(groups: Iterable[RankGroup]) -> str:
    """Such as `2 ranks in 4 instances`; where several groups cut states, with their names."""
    cutting = [group for group in groups if not group.instances]
    words = [counted(one.size, "rank") + f" of {one.name}" * (len(cutting) > 1) for one in cutting]
    instances = [f" in {one.size} instances" for one in groups if one.instances and one.size > 1]
    return " and ".join(words or ["1 rank"]) + "".join(instances)


@dataclass(frozen=True)
class Residency:
    """The same on all ranks.

    strategy: a row of `sharding_table.STRATEGIES`; over which ranks it cuts a unit's states, the unit says
    (`UnitCosts.shares`). policy: --fsdp-reshard-policy. budget: by pipeline
    rank, bytes of gathered weights and whole gradients that it may hold beyond what policy `memory` does. limit: by
    pipeline rank, bytes that it may hold in all (states at rest, gathered weights, gradients, activations, whose costs
    are in bytes then). Policy `budget` has one of the two or both, others none. ahead: bytes of whole weights at any
    time that gathers ahead of their use keep to, the unit in use included; 0: twice the rank's mean unit.
    overlap_gather, overlap_reduce: whether gathers and reductions run beside computations.
    """

    strategy: str
    policy: str = "memory"
    budget: tuple[int, ...] | None = None
    limit: tuple[float, ...] | None = None
    ahead: int = 0
    overlap_gather: bool = True
    overlap_reduce: bool = True

    def __post_init__(self) -> None:
        assert self.strategy in STRATEGIES, self.strategy
        assert self.policy in POLICIES, self.policy
        bound = self.budget is not None or self.limit is not None
        assert bound == (self.policy == "budget"), f"policy {self.policy}: {self.budget=}, {self.limit=}"

    def within(self, limit: tuple[float, ...]) -> Residency:
        """With a limit, which decides on what is kept."""
        return dataclasses.replace(self, policy="budget", budget=None, limit=limit)

    @property
    def row(self) -> Sharding:
        return STRATEGIES[self.strategy]

    @property
    def weights_sharded(self) -> bool:
        """Whether whole weights come and go."""
        return self.row.weights is not ShardOver.NONE

    @property
    def grads_sharded(self) -> bool:
        """Whether whole gradients come and go."""
        return self.row.main_grads is not ShardOver.NONE

    @property
    def gathers_once(self) -> bool:
        """Whether weights are whole at rest, and gathered once behind each step of the optimizer."""
        return not self.weights_sharded and self.row.optimizer is not ShardOver.NONE

    def ahead_of(self, units: RankUnits) -> int:
        """The bound of gathers ahead on a rank, in bytes."""
        if self.ahead or not len(units):
            return self.ahead
        return -(-2 * sum(units.weight_bytes) // len(units))


@dataclass(frozen=True)
class PlannedResidency:
    """What a plan with operations of data parallelism was made for; it is no good for anything else.

    groups: of several ranks that share states, by name. outer_optimizer: instances cut the optimizer. units: names by
    stage. grouping: `Grouping` as planned.
    """

    strategy: str
    groups: tuple[RankGroup, ...]
    outer_optimizer: bool
    policy: str
    units: tuple[tuple[str, ...], ...]
    grouping: Grouping

    @classmethod
    def of(cls, asked: Residency, stages: Sequence[StageUnits], grouping: Grouping) -> PlannedResidency:
        names = tuple(tuple(unit.name for unit in stage.units) for stage in stages)
        cuts = any(share.gathered for stage in stages for unit in stage.units for share in unit.repeated)
        return cls(asked.strategy, _of_several(groups_of(stages)), cuts, asked.policy, names, grouping)

    def size_of(self, name: str) -> int:
        """How many ranks a group has; 1 for one that no unit knows."""
        return next((group.size for group in self.groups if group.name == name), 1)

    def as_json(self) -> dict[str, Any]:
        """For files and hashes. Equal groups of microbatches in a row are `size*count`. `ways` and `outer` are the
        sizes of the groups "dp" and "outer"; `groups` has further ones, where there are any."""
        runs = [
            [
                ",".join(f"{size}*{len(list(run))}" for size, run in itertools.groupby(groups))
                for groups in stage
            ]
            for stage in self.grouping
        ]
        further = [dataclasses.asdict(group) for group in self.groups if group.name not in _SIZES]
        return {
            "strategy": self.strategy,
            **{key: self.size_of(name) for name, key in _SIZES.items()},
            "outer_optimizer": self.outer_optimizer,
            "policy": self.policy,
            "units": [list(units) for units in self.units],
            "grouping": runs,
            **({"groups": further} if further else {}),
        }

    @classmethod
    def from_json(cls, content: Any, most_groups: int) -> PlannedResidency:
        """What `as_json` wrote. most_groups: no more in all are made. Raises ValueError for anything else."""
        schema.check(_WORDS, content, schema.Place(Path("plan"), "residency", error=ValueError))
        units = tuple(map(tuple, content["units"]))
        runs = [[_runs(text) for text in stage] for stage in content["grouping"]]
        if sum(count for stage in runs for unit in stage for _, count in unit) > most_groups:
            raise ValueError("`residency`: there are more groups of microbatches than operations")
        grouping = tuple(
            tuple(tuple(size for size, count in unit for _ in range(count)) for unit in stage)
            for stage in runs
        )
        everywhere = ShardPlace(inner_size=content["ways"], outer_size=content["outer"]).groups
        groups = _of_several((*everywhere, *(RankGroup(**one) for one in content.get("groups", ()))))
        asked = (content["strategy"], groups, content["outer_optimizer"], content["policy"])
        return cls(*asked, units, grouping)


def _runs(text: str) -> list[tuple[int, int]]:
    """(size, count) of equal groups in a row."""
    runs = [re.fullmatch(r"(\d{1,9})\*(\d{1,9})", one) for one in text.split(",")] if text else []
    if not all(runs):
        raise ValueError(f"{text!r:.80} is no list of groups: expected for example 1*64 or 3*1,2*4")
    return [(int(run[1]), int(run[2])) for run in runs if run]


@dataclass(frozen=True)
class LaneCosts:
    """What the wire to data parallel peers costs, in the cost model's unit of time: latency of a collective, bytes in a
    unit of time. It is one wire a rank; messages between stages are taken to have another one, which they have not
    where both go over the same network card."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def unshard(self, unit: UnitCosts, *, first: bool) -> float:
        """A gather, and where instances cut the optimizer the one over them before the row's first one."""
        over = [share for share in unit.repeated if share.gathered] if first else []
        return sum(self.of(share.gathered, share.group.size) for share in (*unit.cut, *over))

    def reduce(self, unit: UnitCosts, residency: Residency) -> float:
        """A reduce-scatter; where nothing is cut an all-reduce, which goes round twice."""
        rounds = 2 if residency.row.optimizer is ShardOver.NONE else 1
        return sum(self.of(rounds * share.reduced, share.group.size) for share in unit.cut)

    def outer_sum(self, unit: UnitCosts) -> float:
        """An all-reduce over instances, or where they cut the optimizer a reduce-scatter."""
        return sum(
            self.of((1 if share.gathered else 2) * share.reduced, share.group.size) for share in unit.repeated
        )

    def of(self, payload_bytes: int, ways: int) -> float:
        """What a collective of so many bytes takes, over so many ranks."""
        return self.latency + payload_bytes * (ways - 1) / (ways * self.bandwidth) if ways > 1 else 0.0


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
