"""Who this rank is and whom it talks to: one frozen `ParallelState`, built once, passed first as `ps`.

The only module that makes process groups. A group belongs to a *purpose* (a row of `PURPOSES`): two purposes
over the same ranks have separate communicators, because one communicator runs its collectives one after the
other.

Size and rank along an axis (`ps.dp_size`, `ps.dp_rank`) are those of the grid; rank r of the world is
`grid.coordinates(r)`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch.distributed as dist

from megatron.core.device import Device, current_device
from megatron.core.rank_grid import AXES, RankGrid

DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)


@dataclasses.dataclass(frozen=True)
class Purpose:
    """One row of the table of groups.

    axes: ranks that differ only along these are one group. transport: "device" talks over the device's own
    backend, "host" over gloo whatever the device is (small host data, barriers that can name the missing
    rank).
    """

    name: str
    axes: str
    transport: Literal["device", "host"] = "device"


WORLD_AXES = "-".join(AXES)
PURPOSES = (
    Purpose("world", WORLD_AXES),  # losses, flags that all ranks must agree on
    Purpose("control", WORLD_AXES, transport="host"),  # JSON, barriers, checkpoints' plans
    Purpose("dp", "dp"),  # sums over the ranks that see different samples
    Purpose("dp_reduce", "dp"),  # gradients, on a communicator of their own
)


Observer = Callable[[str, str, tuple[int, ...]], None]  # (operation, purpose, ranks)


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that talk for one purpose, seen from one of them.

    ranks: world ranks in group order. rank: this rank's place among them. process_group: None for a group of
    one, which never communicates. observer: hears of every collective before it begins.
    """

    purpose: str
    ranks: tuple[int, ...]
    rank: int
    backend: str
    process_group: dist.ProcessGroup | None
    device: Device
    timeout: datetime.timedelta
    observer: Observer | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class ParallelState:
    """This rank's place in the grid and its groups. Made by `make_parallel_state` or `single_process`."""

    rank: int
    world_size: int
    grid: RankGrid
    device: Device
    timeout: datetime.timedelta
    groups: Mapping[str, Group]

    def group(self, purpose: str) -> Group:
        assert purpose in self.groups, f"no group {purpose!r}; purposes: {sorted(self.groups)}"
        return self.groups[purpose]

    @property
    def world_group(self) -> Group:
        return self.group("world")

    @property
    def control_group(self) -> Group:
        return self.group("control")

    @property
    def dp_group(self) -> Group:
        return self.group("dp")

    @property
    def dp_reduce_group(self) -> Group:
        return self.group("dp_reduce")

    @functools.cached_property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's place along every axis."""
        return MappingProxyType(dict(self.grid.coordinates(self.rank)))

    @property
    def tp_rank(self) -> int:
        return self.coordinates["tp"]

    @property
    def cp_rank(self) -> int:
        return self.coordinates["cp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinates["dp"]

    @property
    def pp_rank(self) -> int:
        return self.coordinates["pp"]

    @property
    def tp_size(self) -> int:
        return self.grid.tp

    @property
    def cp_size(self) -> int:
        return self.grid.cp

    @property
    def dp_size(self) -> int:
        return self.grid.dp

    @property
    def pp_size(self) -> int:
        return self.grid.pp

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        """The rank that prints Megatron's lines."""
        return self.rank == self.world_size - 1


def init_process_group(
    device: Device,
    *,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    backend: str | None = None,
    init_method: str = "env://",
    attempt: int = 0,
) -> dist.Store:
    """Meet the other ranks of the world (torch's default process group); the store that they met through.

    A world of one meets nobody: its store is a local one. init_method "env://" is what torchrun sets up.
    backend: the device's own by default. attempt: the launcher's restarts so far; each meets under a prefix
    of its own, because the addresses that a dead attempt left in a shared store make the next one hang.
    """
    if world_size == 1:
        return dist.HashStore()
    found, _, _ = next(iter(dist.rendezvous(init_method, rank, world_size, timeout=timeout)))
    found.set_timeout(timeout)
    store = dist.PrefixStore(f"attempt{attempt}", found)
    dist.init_process_group(
        backend or device.backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device.torch_device if device.kind == "cuda" else None,
    )
    return store


def destroy_process_group(ps: ParallelState) -> None:
    """Leave the world, all ranks together.

    The barrier is needed: tearing down while a peer is still talking aborts it ("terminate called without an
    active exception"). Not for a rank that leaves because of an error: it just exits.
    """
    if ps.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def make_parallel_state(
    grid: RankGrid,
    device: Device,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    observer: Observer | None = None,
) -> ParallelState:
    """Make every group of `PURPOSES`; the default process group must exist (`init_process_group`).

    timeout: after which a collective gives up on a silent peer. observer: told of every collective, for a
    watchdog that says who is stuck. Communicates over the whole world; every rank calls it with the same
    grid.
    """
    if grid.world_size == 1:
        return single_process(device, grid=grid, timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == grid.world_size, f"world of {world_size} ranks, grid for {grid.world_size}"
    groups = {
        purpose.name: _make_group(purpose, grid, device, rank, timeout, observer) for purpose in PURPOSES
    }
    return ParallelState(rank, world_size, grid, device, timeout, MappingProxyType(groups))


def single_process(
    device: Device | None = None,
    *,
    grid: RankGrid | None = None,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
) -> ParallelState:
    """A world of one: no process group, no communication at all."""
    device = device or current_device()
    grid = grid or RankGrid(world_size=1)
    assert grid.world_size == 1, f"single_process with a grid for {grid.world_size} ranks"
    groups = {
        purpose.name: Group(purpose.name, (0,), 0, _backend(purpose, device), None, device, timeout)
        for purpose in PURPOSES
    }
    return ParallelState(0, 1, grid, device, timeout, MappingProxyType(groups))


def _backend(purpose: Purpose, device: Device) -> str:
    return "gloo" if purpose.transport == "host" else device.backend


def _make_group(
    purpose: Purpose,
    grid: RankGrid,
    device: Device,
    rank: int,
    timeout: datetime.timedelta,
    observer: Observer | None,
) -> Group:
    """torch wants every rank of the world to call new_group for every list, its own or not, in one order."""
    backend = _backend(purpose, device)
    mine: Group | None = None
    for ranks in grid.groups(purpose.axes):
        process_group = None
        if len(ranks) > 1:
            process_group = dist.new_group(list(ranks), timeout, backend, group_desc=purpose.name)
        if rank in ranks:
            index = ranks.index(rank)
            mine = Group(purpose.name, ranks, index, backend, process_group, device, timeout, observer)
    assert mine is not None, f"rank {rank} is in no group of {purpose.name}: {grid.groups(purpose.axes)}"
    return mine
