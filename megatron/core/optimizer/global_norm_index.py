"""One number for every region of the whole model, in the model's order, wherever its regions live.

Norms and counts are sums over the whole model, which tensor and pipeline parallel ranks hold parts of. Each region has
one owner, which puts its number into a vector that is zero elsewhere; the sum of these vectors over `mp` is exact
(only zeros are added), and adding its elements in the model's order gives every rank the same bits. Without tensor
parallelism these are the bits of one process, however long the pipeline.

Where the optimizer is sharded, every data parallel rank has a number for its own part of each region that it owns:
inner and outer ranks share the work, even where outer ones hold the same. The sum is then over `world`, and every rank
knows of every number.

Where experts lie on a grid of their own, data parallel ranks hold other experts, so that every region has one owner in
the world, and the sum is over `world`, too.

Model order: global stage, place in the stage's list of parameters, offset of the region. The owner of a region is on
the first stage that holds the parameter (tied embeddings are on two), and the first of its copies.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.squared_sums import SUM_BYTES
from megatron.core.module import ModelError
from megatron.core.param_meta import Region
from megatron.core.sharding_table import ShardOver
from megatron.core.transport import collectives, host_data
from megatron.core.transport.host_data import host_values
from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.core.transport.rank_grid import RankGrid


class _Held(NamedTuple):
    """A region as one rank holds it. order: place of the parameter in its stage's list."""

    name: str
    stage: int
    shared: bool
    order: int
    offset: tuple[int, ...]
    copies: int
    expert: bool

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.offset


class GlobalNormIndex:
    """Built once, communicating over mp, and over expert_mp where experts lie on a grid of their own.

    size: regions of the whole model. owned: (name, region) of those that this rank answers for, or for a part of them.
    over_world: the optimizer is sharded, and data parallel ranks have a part each. same_everywhere: `whole` is the
    same on all ranks of the world, and not on those of a copy of the model alone. of_earlier_stages: this rank's
    parameters that an earlier stage holds too.

    Raises ModelError where stages have different parameters of one name.
    """

    def __init__(self, buffer: FlatBuffer, ps: ParallelState) -> None:
        self._device = ps.device.torch_device
        self.over_world = buffer.sharding.optimizer is not ShardOver.NONE
        apart = ps.experts is not None
        self._group = ps.world_group if self.over_world or apart else ps.mp_group
        self.same_everywhere = self._group.size == ps.world_group.size
        regions = [
            (_held(name, buffer, order, region), region)
            for order, name in enumerate(buffer.names)
            for region in buffer.param_meta[name].summed_parts
        ]
        gathered = _gathered([held for held, _ in regions if not (apart and held.expert)], ps.mp_group)
        if apart:
            gathered += _gathered([held for held, _ in regions if held.expert], ps.expert_mp_group)
        first, index = _model_order(gathered, ps.grid, ps.expert_grid)
        self.size = len(index)
        self.of_earlier_stages = frozenset(held.name for held, _ in regions if held.stage != first[held.name])
        place = _tp_places(ps.rank, ps.grid, ps.expert_grid)
        own = [(held, region) for held, region in regions if _owns(held, place, first)]
        if apart and not self.over_world:  # of those that hold the same, one
            replica = {True: ps.expert_dp_rank, False: ps.dp_rank}
            own = [(held, region) for held, region in own if replica[held.expert] == 0]
        self.owned = [(held.name, region) for held, region in own]
        positions = [index[held.key] for held, _ in own]
        self._positions = torch.tensor(positions, dtype=torch.int64, device=self._device)

    def num_bytes(self, rows: int) -> int:
        """Of what `place` gives."""
        return rows * self.size * SUM_BYTES

    def place(self, rows: Sequence[Tensor]) -> Tensor:
        """[rows, size] fp64 from rows of [owned]: each number at its region's place, zeros elsewhere."""
        full = torch.zeros(len(rows), self.size, dtype=torch.float64, device=self._device)
        for row, values in zip(full, rows, strict=True):
            row[self._positions] = values.to(full)
        return full

    def whole(self, full: Tensor) -> list[list[float]]:
        """The rows of `place` with every rank's numbers, on the host. Communicates over mp or world."""
        collectives.all_reduce(full, self._group)
        values: list[list[float]] = host_values(full)  # sync: figures that the host decides on
        return values


def count_regions(
    buffers: Sequence[FlatBuffer], tp_size: int, expert_ranks: tuple[int, int]
) -> tuple[int, list[int]]:
    """Regions of the whole model, and by pipeline rank those that the first of its tensor parallel ranks answers for.
    buffers: of one rank of each pipeline rank. expert_ranks: tensor parallel ones, and those that hold other experts.
    """
    everyone = [
        [
            _held(name, buffer, 0, region)
            for name in buffer.names
            for region in buffer.param_meta[name].summed_parts
        ]
        for buffer in buffers
    ]
    first = _first_stages([held for of_rank in everyone for held in of_rank])
    own = [[held for held in of_rank if held.stage == first[held.name]] for of_rank in everyone]
    expert_tp, others = expert_ranks
    times = {True: expert_tp * others, False: tp_size}
    whole = sum(times[held.expert] // held.copies for of_rank in own for held in of_rank)
    return whole, [len(of_rank) for of_rank in own]


def _held(name: str, buffer: FlatBuffer, order: int, region: Region) -> _Held:
    meta = buffer.param_meta[name]
    place = (order, region.offset, region.copies)
    return _Held(name, buffer.stage_of(name), meta.shared, *place, meta.expert)


def _gathered(own: Sequence[_Held], group: Group) -> tuple[tuple[int, bytes], ...]:
    """By rank of the world, what each of a group holds, as JSON. Communicates over the group."""
    everyone = host_data.all_gather_bytes(json.dumps(own).encode(), group)
    return tuple(zip(group.ranks, everyone, strict=True))


@functools.lru_cache(maxsize=1)
def _model_order(
    gathered: tuple[tuple[int, bytes], ...], grid: RankGrid, experts: RankGrid
) -> tuple[dict[str, int], dict[tuple[str, tuple[int, ...]], int]]:
    """By parameter the first stage that holds it, and by region its place in the model's order.

    gathered: as in `_gathered`, of all ranks that hold a part of the model. In an imagined world these ranks are in one
    process and gather the same, which is then read once. Raises ModelError as `_first_stages`.
    """
    everyone = [
        (rank, [_Held(*facts)._replace(offset=tuple(facts[4])) for facts in json.loads(data)])
        for rank, data in gathered
    ]
    first = _first_stages([held for _, rank in everyone for held in rank])
    of_first = [held for _, rank in reversed(everyone) for held in rank if held.stage == first[held.name]]
    places = {held.key: (held.stage, held.order, held.offset) for held in of_first}
    index = {key: n for n, key in enumerate(sorted(places, key=places.__getitem__))}
    owners = collections.Counter[tuple[str, tuple[int, ...]]]()
    for rank, of in everyone:
        place = _tp_places(rank, grid, experts)
        owners.update(held.key for held in of if _owns(held, place, first))
    wrong = {key: owners[key] for key in index if owners[key] != 1}  # a region with two would count twice
    assert not wrong, f"regions by number of owners, where it is not 1 (Region.copies?): {wrong}"
    return first, index


def _tp_places(rank: int, grid: RankGrid, experts: RankGrid) -> tuple[int, int]:
    """Where a rank of the world is among those that have parts of one tensor: of dense layers, of experts."""
    return grid.coordinates(rank)["tp"], experts.coordinates(rank)["tp"]


def _owns(held: _Held, places: tuple[int, int], first: Mapping[str, int]) -> bool:
    """Whether a rank at `places` answers for a region that it holds."""
    return held.stage == first[held.name] and places[held.expert] % held.copies == 0


def _first_stages(everyone: Sequence[_Held]) -> dict[str, int]:
    """name -> the first stage that holds it. Raises ModelError where others hold one that is not the same."""
    first: dict[str, int] = {}
    alone = {held.name for held in everyone if not held.shared}
    for held in everyone:
        other = first.setdefault(held.name, held.stage)
        if other != held.stage and held.name in alone:
            raise ModelError(
                f"pipeline stages {min(other, held.stage)} and {max(other, held.stage)} both have a parameter "
                f"{held.name!r}: give the parameters of different stages different names, those of the whole model"
            )
        first[held.name] = min(other, held.stage)
    return first
