"""Which rank stands where, and which talk to each other for each purpose: a grid, and the table `PURPOSES` (floor 0).

The order of a grid names axes from the fastest varying to the slowest: in "tp-cp-ep-dp-pp" neighbouring ranks share a
tensor parallel group. Dense layers live on (tp, cp, dp, pp) with ep = 1; experts on their own grid over the
same ranks, (etp, ep, expert dp, pp) with cp = 1 ("folding").

Every list of ranks is computed from the grid alone, so the groups of 16,384 ranks can be looked at without starting
any; `parallel_state` makes the communicators. The lists of one purpose partition the world: a rank with nobody to talk
to for that purpose is a list of its own, and gets no communicator.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Literal

from megatron.core.words import counted

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
TP_PP_DP_ORDER = "tp-cp-ep-pp-dp"


class RankGridError(ValueError):
    """Sizes or an order that make no grid."""


@dataclasses.dataclass(frozen=True)
class RankGrid:
    """Sizes of the axes and their order; the product of the sizes is the number of ranks.

    Raises RankGridError when sizes do not multiply to `world_size` or the order is not made of AXES.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        axes = self.order.split("-")
        if len(set(axes)) != len(axes) or not set(axes) <= set(AXES):
            raise RankGridError(f"rank order {self.order!r}: expected each of {', '.join(AXES)} at most once")
        for axis in AXES:
            if self.size(axis) < 1:
                raise RankGridError(f"size of axis {axis} is {self.size(axis)}; it must be at least 1")
            if self.size(axis) > 1 and axis not in axes:
                raise RankGridError(f"rank order {self.order!r} lacks axis {axis} of size {self.size(axis)}")
        if (found := math.prod(map(self.size, AXES))) != self.world_size:
            sizes = " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)
            raise RankGridError(f"{sizes} = {counted(found, 'rank')}, not {self.world_size}")

    def size(self, axes: str) -> int:
        """Number of ranks along an axis, or along several as in "dp-cp"."""
        return math.prod([getattr(self, axis) for axis in axes.split("-")])

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes from the fastest varying to the slowest; those absent from the order (size 1) come last."""
        named = tuple(self.order.split("-"))
        return named + tuple(axis for axis in AXES if axis not in named)

    @functools.cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides, stride = {}, 1
        for axis in self.axes:
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank along every axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        return {axis: rank // stride % self.size(axis) for axis, stride in self.strides.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a position; axes left out are 0."""
        for axis, position in coordinates.items():
            assert 0 <= position < self.size(axis), f"{axis} {position} of {self.size(axis)}"
        return sum(self.strides[axis] * position for axis, position in coordinates.items())

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis, or along several as in "dp-cp": ranks that differ in these axes only.

        Within a group ranks are in the grid's order; groups are ordered by their first rank's other coordinates.
        """
        wanted = set(axes.split("-"))
        assert wanted <= set(AXES), f"axes {axes!r}"
        inside, starts = self._offsets(wanted), self._offsets(set(AXES) - wanted)
        return tuple(tuple(start + offset for offset in inside) for start in starts)

    def group(self, axes: str, rank: int) -> tuple[int, ...]:
        """The group of `rank` along `axes`."""
        wanted, place, strides = set(axes.split("-")), self.coordinates(rank), self.strides
        start = rank - sum(strides[axis] * place[axis] for axis in wanted)
        return tuple(start + offset for offset in self._offsets(wanted))

    def _offsets(self, wanted: Set[str]) -> list[int]:
        """Rank offsets reached along the wanted axes, the first of the grid's varying fastest."""
        offsets, strides = [0], self.strides
        for axis in self.axes:
            if axis in wanted:
                steps = range(0, self.size(axis) * strides[axis], strides[axis])
                offsets = [step + offset for step in steps for offset in offsets]
        return offsets


def dense_grid(
    world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, order: str = DEFAULT_ORDER
) -> RankGrid:
    """The grid of dense layers; dp is what is left. Raises RankGridError when it does not divide."""
    sizes = {"tensor": tp, "pipeline": pp, "context": cp}
    return RankGrid(world_size, tp=tp, cp=cp, dp=_left(world_size, sizes), pp=pp, order=order)


def expert_grid(
    world_size: int, *, etp: int = 1, ep: int = 1, pp: int = 1, order: str = DEFAULT_ORDER
) -> RankGrid:
    """The grid of experts; dp is what is left. Raises RankGridError when it does not divide."""
    sizes = {"expert tensor": etp, "expert": ep, "pipeline": pp}
    return RankGrid(world_size, tp=etp, ep=ep, dp=_left(world_size, sizes), pp=pp, order=order)


def _left(world_size: int, sizes: Mapping[str, int]) -> int:
    model = math.prod(sizes.values())
    if model < 1 or world_size % model:
        told = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise RankGridError(f"{counted(world_size, 'rank')} cannot be divided into {told} = {model}")
    return world_size // model


@dataclasses.dataclass(frozen=True)
class Purpose:
    """One row of the table of groups.

    axes: ranks that differ only along these are one group. experts: axes are those of the experts' grid. shared_with:
    the purpose whose communicator serves this one too where experts have no grid of their own. part: which of them.
    "ends": the first and the last along the axis (those between are alone). "inner": runs of neighbours along the axis,
    one for each distributed optimizer instance. "outer": those at the same place in every such run. transport: "device"
    talks over the device's own backend, "host" over gloo whatever the device is (small host data, barriers
    that can name the missing rank). point_to_point: its ranks talk in pairs, not all together. high_priority: on
    CUDA its messages go before kernels that wait to be started. shared_memory: where all its ranks compute on the
    CPUs of one host, large tensors go through memory that they share (`shm_transport`).
    """

    name: str
    axes: str
    part: Literal["all", "ends", "inner", "outer"] = "all"
    experts: bool = False
    shared_with: str = ""
    transport: Literal["device", "host"] = "device"
    point_to_point: bool = False
    high_priority: bool = False
    shared_memory: bool = False


PURPOSES = (
    Purpose("world", "-".join(AXES)),  # losses, flags that all ranks must agree on
    Purpose("control", "-".join(AXES), transport="host"),  # JSON, barriers, checkpoints' plans
    Purpose("dp", "dp"),  # sums over the ranks that see different samples
    # Gradients of one optimizer instance; its parameters, gathered meanwhile.
    Purpose("dp_reduce", "dp-cp", part="inner", high_priority=True, shared_memory=True),
    Purpose("dp_gather", "dp-cp", part="inner", high_priority=True, shared_memory=True),
    Purpose("dp_outer", "dp-cp", part="outer"),  # the same shard in every instance
    Purpose("tp", "tp"),  # activations inside a layer
    Purpose("mp", "tp-pp"),  # all that together hold one copy of the model: norms, counts
    Purpose("pp", "pp"),  # collectives over the stages
    Purpose("pp_forward", "pp", point_to_point=True),  # activations, to later stages
    Purpose("pp_backward", "pp", point_to_point=True),  # gradients, to earlier stages
    Purpose("embedding", "pp", part="ends"),  # tied embeddings on the first and the last stage's ranks
    # Experts: who has which of them, who has which part of each, and to both together tokens are sent.
    Purpose("ep", "ep", experts=True),
    Purpose("etp", "tp", experts=True, shared_with="tp"),
    Purpose("ep_etp", "tp-ep", experts=True, shared_with="tp", shared_memory=True),
    # As the three of dense layers, for the ranks that hold the same experts.
    Purpose(
        "expert_dp_reduce",
        "dp",
        part="inner",
        experts=True,
        shared_with="dp_reduce",
        high_priority=True,
        shared_memory=True,
    ),
    Purpose(
        "expert_dp_gather",
        "dp",
        part="inner",
        experts=True,
        shared_with="dp_gather",
        high_priority=True,
        shared_memory=True,
    ),
    Purpose("expert_dp_outer", "dp", part="outer", experts=True, shared_with="dp_outer"),
    Purpose("expert_mp", "tp-ep-pp", experts=True, shared_with="mp"),  # one copy of all experts
    # Whose norms are parts of one: a pipeline stage, where experts lie across all its ranks.
    Purpose("stage", "tp-ep-dp", experts=True, shared_with="dp"),
)


def check_instances(grid: RankGrid, instances: int, what: str = "data parallel size") -> None:
    """Raises RankGridError when `instances` does not divide the data parallel size, which is called `what`."""
    size = grid.size("dp-cp")
    if instances < 1 or size % instances:
        numbers = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise RankGridError(
            f"--num-distributed-optimizer-instances {instances} does not divide the {what} {size}; choose one of "
            f"{numbers}"
        )


def check_folding(dense: RankGrid, experts: RankGrid) -> None:
    """Raises RankGridError where the two do not have the same ranks in each pipeline stage."""
    if (experts.pp, experts.strides["pp"]) != (dense.pp, dense.strides["pp"]):
        inside, wanted = experts.tp * experts.ep, dense.tp * dense.cp
        raise RankGridError(
            f"--use-tp-pp-dp-mapping with expert tensor {experts.tp} x expert {experts.ep} = {inside} ranks beside "
            f"tensor {dense.tp} x context {dense.cp} = {wanted}: experts of a pipeline stage would lie on ranks of "
            "another one; make both products the same, or leave the mapping out"
        )


def _parts(purpose: Purpose, ranks: tuple[int, ...], instances: int) -> list[tuple[int, ...]]:
    """What the ranks along an axis, in their order, divide into."""
    if purpose.part == "all" or len(ranks) == 1:
        return [ranks]
    if purpose.part == "ends":
        return [(ranks[0], ranks[-1]), *((rank,) for rank in ranks[1:-1])]
    size = len(ranks) // instances
    if purpose.part == "inner":
        return [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return [ranks[place::size] for place in range(size)]


class MeshError(ValueError):
    """A mesh of ranks that no data parallel state can be made of."""


@dataclasses.dataclass(frozen=True)
class WorldPart:
    """Ranks of the world that stand in a grid of their own. ranks: the world's, by their place in that grid.

    instances: of the distributed optimizer. experts: the grid of experts over the same ranks; None where that is the
    same one.
    """

    ranks: tuple[int, ...]
    grid: RankGrid
    instances: int = 1
    experts: RankGrid | None = None

    def check(self) -> None:
        """Raises RankGridError when the instances do not divide the ranks that hold the same, or the grids do not fit
        each other."""
        check_instances(self.grid, self.instances)
        if self.experts is not None:
            check_instances(self.experts, self.instances, "number of ranks that hold the same experts,")
            check_folding(self.grid, self.experts)

    def grid_of(self, purpose: Purpose) -> RankGrid:
        """That whose axes the purpose names. Raises RankGridError as `check`."""
        self.check()
        return self.experts if purpose.experts and self.experts is not None else self.grid

    def shared_purpose(self, purpose: Purpose) -> str | None:
        """The purpose whose communicators serve this one too; None where it has its own."""
        return (purpose.shared_with or None) if self.experts is None else None

    def rank_lists(self, purpose: Purpose) -> list[tuple[int, ...]]:
        """All groups of a purpose within this part, as ranks of the world. Raises RankGridError as `grid_of`."""
        along = self.grid_of(purpose).groups(purpose.axes)
        lists = (part for ranks in along for part in _parts(purpose, ranks, self.instances))
        return [tuple(self.ranks[place] for place in places) for places in lists]

    def own_ranks(self, purpose: Purpose, rank: int) -> tuple[int, ...]:
        """The group of `rank`, one of the world's: that of `rank_lists`, without computing the others'."""
        own = self.ranks.index(rank)
        parts = _parts(purpose, self.grid_of(purpose).group(purpose.axes, own), self.instances)
        places = next(part for part in parts if own in part)
        return tuple(self.ranks[place] for place in places)


def parts_from_places(told: Sequence[Sequence[int]]) -> list[WorldPart]:
    """The meshes in which the ranks of a world stand, out of four numbers a rank, in rank order: the first rank of its
    mesh (-1: it is in none), its place there, that mesh's size, and its outer size.

    All ranks of a mesh are data parallel, outer x inner. Raises MeshError when meshes overlap or lack a rank.
    """
    meshes: dict[tuple[int, int, int], dict[int, int]] = {}
    for rank, (first, place, size, outer) in enumerate(told):
        if first >= 0:
            meshes.setdefault((first, size, outer), {})[place] = rank
    parts = []
    for (first, size, outer), by_place in sorted(meshes.items()):
        if set(by_place) != set(range(size)) or by_place[0] != first:
            raise MeshError(
                f"the mesh of {size} ranks from rank {first} is that of ranks {sorted(by_place.values())} only: "
                "every rank of a mesh calls, with the same mesh, and meshes of different ranks do not overlap"
            )
        ranks = tuple(by_place[place] for place in range(size))
        parts.append(WorldPart(ranks, RankGrid(size, dp=size), outer))
    return parts
