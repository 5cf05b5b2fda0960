"""What data parallelism asks of a plan: how weights and gradients are cut, and what a rank may hold of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import schema
from megatron.core.sharding_table import STRATEGIES, RankGroup, Sharding, ShardOver, ShardPlace
from megatron.core.words import counted

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


def of_several(groups: Iterable[RankGroup]) -> tuple[RankGroup, ...]:
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

    def ahead_of(self, weight_bytes: Sequence[int]) -> int:
        """The bound of gathers ahead on a rank, in bytes. weight_bytes: of its units."""
        if self.ahead or not weight_bytes:
            return self.ahead
        return -(-2 * sum(weight_bytes) // len(weight_bytes))


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
        groups = of_several((*everywhere, *(RankGroup(**one) for one in content.get("groups", ()))))
        asked = (content["strategy"], groups, content["outer_optimizer"], content["policy"])
        return cls(*asked, units, grouping)


def _runs(text: str) -> list[tuple[int, int]]:
    """(size, count) of equal groups in a row."""
    runs = [re.fullmatch(r"(\d{1,9})\*(\d{1,9})", one) for one in text.split(",")] if text else []
    if not all(runs):
        raise ValueError(f"{text!r:.80} is no list of groups: expected for example 1*64 or 3*1,2*4")
    return [(int(run[1]), int(run[2])) for run in runs if run]
