"""Which rank stands where: an order string gives every rank coordinates and every axis its groups (floor 0).

The order names axes from the fastest varying to the slowest: in "tp-cp-ep-dp-pp" neighbouring ranks share a
tensor parallel group. Dense layers live on (tp, cp, dp, pp) with ep = 1; experts on their own grid over the
same ranks, (etp, ep, expert dp, pp) with cp = 1 ("folding").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set

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
        if math.prod(map(self.size, AXES)) != self.world_size:
            sizes = " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)
            raise RankGridError(f"{sizes} = {math.prod(map(self.size, AXES))} ranks, not {self.world_size}")

    def size(self, axes: str) -> int:
        """Number of ranks along an axis, or along several as in "dp-cp"."""
        return math.prod(getattr(self, axis) for axis in axes.split("-"))

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes from the fastest varying to the slowest; those absent from the order (size 1) come last."""
        named = tuple(self.order.split("-"))
        return named + tuple(axis for axis in AXES if axis not in named)

    @property
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
        wanted = set(axes.split("-"))
        start = self.rank({axis: at for axis, at in self.coordinates(rank).items() if axis not in wanted})
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
        raise RankGridError(f"{world_size} ranks cannot be divided into {told} = {model}")
    return world_size // model
