"""One number for every region of the whole model, in the model's order, wherever its regions live.

Norms and counts are sums over the whole model, which tensor and pipeline parallel ranks hold parts of. Each region has
one owner, which puts its number into a vector that is zero elsewhere; the sum of these vectors over `mp` is exact
(only zeros are added), and adding its elements in the model's order gives every rank the same bits. Without tensor
parallelism these are the bits of one process, however long the pipeline.

Where the optimizer is cut, every data parallel rank has a number for its own part of each region that it owns: inner
and outer ranks share the work, even where outer ones hold the same. The sum is then over `world`, and every rank knows
of every number.

Model order: global stage, place in the stage's list of parameters, offset of the region. The owner of a region is on
the first stage that holds the parameter (tied embeddings are on two), and the first of its copies.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import Cut
from megatron.core.module import ModelError
from megatron.core.param_meta import Region
from megatron.core.transport import collectives, host_data
from megatron.core.transport.parallel_state import Group, ParallelState


@dataclasses.dataclass(frozen=True)
class _Facts:
    """A parameter as one rank holds it. regions: (offset, copies)."""

    name: str
    stage: int
    shared: bool
    regions: tuple[tuple[tuple[int, ...], int], ...]

    def to_json(self) -> list[Any]:
        return [self.name, self.stage, self.shared, self.regions]

    @classmethod
    def from_json(cls, value: list[Any]) -> _Facts:
        name, stage, shared, regions = value
        return cls(name, stage, shared, tuple((tuple(offset), copies) for offset, copies in regions))


class ModelVector:
    """Built once, communicating over mp.

    size: regions of the whole model. owned: (name, region) of those that this rank answers for, or for a part of them.
    over_world: the optimizer is cut, and data parallel ranks have a part each. of_earlier_stages: this rank's
    parameters that an earlier stage holds too.

    Raises ModelError where stages have different parameters of one name.
    """

    def __init__(self, buffer: FlatBuffer, ps: ParallelState) -> None:
        self._mp_group: Group = ps.mp_group
        self.over_world = buffer.sharding.optimizer is not Cut.WHOLE
        self._group = ps.world_group if self.over_world else ps.mp_group
        self._num_parts = buffer.place.dp_size if self.over_world else 1
        self._device = ps.device.torch_device
        mine = [_facts(buffer, name) for name in buffer.names]
        gathered = host_data.all_gather_json([facts.to_json() for facts in mine], self._mp_group)
        everyone = [[_Facts.from_json(value) for value in facts] for facts in gathered]
        first_stage = _first_stages(everyone)
        place_of = _places(everyone, first_stage)
        tp_ranks = [ps.grid.coordinates(rank)["tp"] for rank in self._mp_group.ranks]
        self.size = len(place_of)
        self.of_earlier_stages = frozenset(
            facts.name for facts in mine if facts.stage != first_stage[facts.name]
        )
        _assert_one_owner_each(everyone, tp_ranks, first_stage, place_of)
        self.owned: list[tuple[str, Region]] = []
        positions: list[int] = []
        self._held: list[tuple[int, str]] = []
        for facts in mine:
            for region in buffer.param_meta[facts.name].parts:
                position = place_of[facts.name, region.offset]
                self._held.append((position, facts.name))
                if _owns(facts, region.copies, ps.tp_rank, first_stage):
                    self.owned.append((facts.name, region))
                    positions.append(position)
        self._positions = torch.tensor(positions, dtype=torch.int64, device=self._device)

    def place(self, rows: Sequence[Tensor]) -> Tensor:
        """[rows, size] fp64 from rows of [owned]: each number at its region's place, zeros elsewhere."""
        full = torch.zeros(len(rows), self.size, dtype=torch.float64, device=self._device)
        for row, values in zip(full, rows, strict=True):
            row[self._positions] = values.to(full)
        return full

    def whole(self, full: Tensor) -> list[list[float]]:
        """The rows of `place` with every rank's numbers, on the host. Communicates over mp, or `over_world`."""
        expected = self._mp_group.size * self._num_parts
        assert self._group.size == expected, (
            f"{expected} ranks have a part each, {self._group.size} are added"
        )
        collectives.all_reduce(full, self._group)
        values: list[list[float]] = full.tolist()  # sync: figures that the host decides on
        return values

    def names_at(self, positions: Iterable[int]) -> tuple[str, ...]:
        """This rank's parameters that hold one of these regions, in its own order."""
        wanted = set(positions)
        return tuple(dict.fromkeys(name for position, name in self._held if position in wanted))


def _facts(buffer: FlatBuffer, name: str) -> _Facts:
    meta = buffer.param_meta[name]
    regions = tuple((part.offset, part.copies) for part in meta.parts)
    return _Facts(name, buffer.stage_of(name), meta.shared, regions)


def _first_stages(everyone: list[list[_Facts]]) -> dict[str, int]:
    """name -> the first stage that holds it. Raises ModelError where others hold one that is not the same."""
    first: dict[str, int] = {}
    shared: dict[str, bool] = {}
    for facts in (facts for rank in everyone for facts in rank):
        other = first.setdefault(facts.name, facts.stage)
        both_shared = shared.setdefault(facts.name, facts.shared) and facts.shared
        if other != facts.stage and not both_shared:
            raise ModelError(
                f"pipeline stages {min(other, facts.stage)} and {max(other, facts.stage)} both have a parameter "
                f"{facts.name!r}: give the parameters of different stages different names, those of the whole model"
            )
        first[facts.name] = min(other, facts.stage)
    return first


def _places(
    everyone: list[list[_Facts]], first_stage: dict[str, int]
) -> dict[tuple[str, tuple[int, ...]], int]:
    """(name, offset of the region) -> its place in the vector."""
    order: dict[tuple[str, tuple[int, ...]], tuple[int, int, tuple[int, ...]]] = {}
    for rank in everyone:
        for place, facts in enumerate(rank):
            if facts.stage == first_stage[facts.name]:
                for offset, _ in facts.regions:
                    order.setdefault((facts.name, offset), (facts.stage, place, offset))
    return {key: index for index, key in enumerate(sorted(order, key=order.__getitem__))}


def _owns(facts: _Facts, copies: int, tp_rank: int, first_stage: dict[str, int]) -> bool:
    return facts.stage == first_stage[facts.name] and tp_rank % copies == 0


def _assert_one_owner_each(
    everyone: list[list[_Facts]],
    tp_ranks: list[int],
    first_stage: dict[str, int],
    place_of: dict[tuple[str, tuple[int, ...]], int],
) -> None:
    """A region with two owners would count twice: its `copies` are wrong."""
    owners = collections.Counter(
        (facts.name, offset)
        for rank, tp_rank in zip(everyone, tp_ranks, strict=True)
        for facts in rank
        for offset, copies in facts.regions
        if _owns(facts, copies, tp_rank, first_stage)
    )
    wrong = {key: owners[key] for key in place_of if owners[key] != 1}
    assert not wrong, f"regions by number of owners, where it is not 1 (Region.copies?): {wrong}"
