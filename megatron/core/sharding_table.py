"""The sharding table: what each data parallel rank holds of weights, gradients and optimizer state between steps (floor
0, pure). A new strategy is a row. Source: ZeRO (arXiv 1910.02054, section 5).

Ranks are inner x outer: the inner ranks share one copy of everything that is sharded, the outer ones (distributed
optimizer instances) repeat it. With one instance all data parallel ranks are inner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class ShardOver(Enum):
    """Over which ranks a buffer is sharded."""

    NONE = "none"  # each rank has all of it
    INNER = "inner"  # over the inner ranks; the same on all outer ones
    FULL = "full"  # over inner x outer ranks


@dataclasses.dataclass(frozen=True)
class Sharding:
    """One row of the table. optimizer: main weights and moments."""

    weights: ShardOver
    main_grads: ShardOver
    optimizer: ShardOver

    def at(self, place: ShardPlace) -> Sharding:
        """The same row where cuts into a single part are called what they are: whole."""
        cuts = (self.weights, self.main_grads, self.optimizer)
        return Sharding(*(ShardOver.NONE if place.ways(cut) == 1 else cut for cut in cuts))

    def of_experts(self, place: ShardPlace) -> Sharding:
        """The same row of experts with a grid of their own: whole ones have no part that instances could cut."""
        return (STRATEGIES["no_shard"] if place.inner_size == 1 else self).at(place)

    def joined(self, other: Sharding) -> Sharding:
        """What is cut in one of two effective rows of a strategy."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Sharding(*(there if here is ShardOver.NONE else here for here, there in pairs))

    def gathers_from_main(self, place: ShardPlace) -> bool:
        """Whether gathers round main weights, where these have another dtype, so that nothing else rests: weights and
        optimizer are cut into the same parts, more than one."""
        return 1 < place.ways(self.weights) == place.ways(self.optimizer)


STRATEGIES: Mapping[str, Sharding] = MappingProxyType(
    {
        "no_shard": Sharding(ShardOver.NONE, ShardOver.NONE, ShardOver.NONE),
        "optim": Sharding(ShardOver.NONE, ShardOver.NONE, ShardOver.INNER),  # ZeRO-1
        "optim_grads": Sharding(ShardOver.NONE, ShardOver.INNER, ShardOver.INNER),  # ZeRO-2
        "optim_grads_params": Sharding(ShardOver.INNER, ShardOver.INNER, ShardOver.INNER),  # ZeRO-3
    }
)


def sharding_of(strategy: str, outer: str = "no_shard") -> Sharding:
    """The row of --data-parallel-sharding-strategy; of auto, while nothing is chosen, the one that cuts everything.
    outer: --outer-dp-sharding-strategy.

    Raises ValueError where the two do not go together.
    """
    row = STRATEGIES["optim_grads_params" if strategy == "auto" else strategy]
    if outer == "no_shard":
        return row
    if not goes_with_outer(strategy, outer):
        raise ValueError(
            f"--outer-dp-sharding-strategy {outer} with --data-parallel-sharding-strategy {strategy}: the optimizer is "
            "cut over instances only with optim_grads_params; use that, or leave the outer strategy out"
        )
    return dataclasses.replace(row, optimizer=ShardOver.FULL)


def row_name(sharding: Sharding) -> str:
    """The strategy of a row, by itself or before its optimizer is sharded over instances too."""
    inner = dataclasses.replace(sharding, optimizer=ShardOver.INNER)
    return next(name for row in (sharding, inner) for name, one in STRATEGIES.items() if one == row)


def weights_are_sharded(strategy: str) -> bool:
    """Whether weights are sharded at rest: ZeRO-3."""
    return sharding_of(strategy).weights is not ShardOver.NONE


def grads_are_sharded(strategy: str) -> bool:
    """Whether main gradients are sharded at rest: ZeRO-2 and ZeRO-3."""
    return sharding_of(strategy).main_grads is not ShardOver.NONE


# What must not be. Rules of the command line, the engine and `fully_shard` with a config of its own all ask these, and
# each says it in its words.


def goes_with_outer(strategy: str, outer: str) -> bool:
    """Whether --outer-dp-sharding-strategy has a sharded model to cut the optimizer of."""
    return outer == "no_shard" or weights_are_sharded(strategy)


def outer_cut_of_nothing(outer: str, place: ShardPlace) -> bool:
    """Whether instances of one rank each have nothing that the optimizer could be cut over besides."""
    return outer != "no_shard" and place.inner_size == 1 < place.outer_size


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Ranks that share the states of units, such as "dp". size: how many they are. instances: they do not cut these
    states, but each has the same ones ("outer")."""

    name: str
    size: int
    instances: bool = False


@dataclasses.dataclass(frozen=True)
class ShardPlace:
    """Where a rank stands among those that share the work."""

    inner_rank: int = 0
    inner_size: int = 1
    outer_rank: int = 0
    outer_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.inner_rank < self.inner_size, self
        assert 0 <= self.outer_rank < self.outer_size, self

    @property
    def dp_size(self) -> int:
        return self.inner_size * self.outer_size

    @property
    def groups(self) -> tuple[RankGroup, RankGroup]:
        """Of dense layers: `rank_groups`."""
        return rank_groups(self)

    def ways(self, cut: ShardOver) -> int:
        """Into how many equal parts a buffer is sharded."""
        if cut is ShardOver.NONE:
            return 1
        return self.inner_size if cut is ShardOver.INNER else self.dp_size

    def index(self, cut: ShardOver) -> int:
        """Which of these parts this rank holds: outer parts lie inside the inner ones."""
        if cut is ShardOver.NONE:
            return 0
        if cut is ShardOver.INNER:
            return self.inner_rank
        return self.inner_rank * self.outer_size + self.outer_rank


DENSE_GROUPS, EXPERT_GROUPS = ("dp", "outer"), ("expert_dp", "expert_outer")


def rank_groups(place: ShardPlace, names: tuple[str, str] = DENSE_GROUPS) -> tuple[RankGroup, RankGroup]:
    """The ranks that cut states, and the instances that repeat them."""
    inner, outer = names
    return RankGroup(inner, place.inner_size), RankGroup(outer, place.outer_size, instances=True)
