"""Who this rank is and whom it talks to: one frozen `ParallelState`, built once, passed first as `ps`.

The only module that makes process groups. A group belongs to a *purpose* (a row of `rank_groups.PURPOSES`): two
purposes over the same ranks have separate communicators, because one communicator runs its collectives one
after the other.

Size and rank along an axis (`ps.dp_size`, `ps.dp_rank`) are those of the grid; rank r of the world is
`grid.coordinates(r)`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import Device, current_device
from megatron.core.peer_loss import peer_loss_named
from megatron.core.rank_grid import RankGrid
from megatron.core.rank_groups import PURPOSES, Purpose, check_instances, own_ranks, rank_lists

DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)


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

    @property
    def dp_gather_group(self) -> Group:
        return self.group("dp_gather")

    @property
    def dp_inner_group(self) -> Group:
        """One distributed optimizer instance; the dp group itself when there is one instance."""
        return self.group("dp_inner")

    @property
    def dp_outer_group(self) -> Group:
        """The same shard in every distributed optimizer instance."""
        return self.group("dp_outer")

    @property
    def tp_group(self) -> Group:
        return self.group("tp")

    @property
    def mp_group(self) -> Group:
        """All ranks that together hold one copy of the model."""
        return self.group("mp")

    @property
    def pp_group(self) -> Group:
        return self.group("pp")

    @property
    def pp_forward_group(self) -> Group:
        return self.group("pp_forward")

    @property
    def pp_backward_group(self) -> Group:
        return self.group("pp_backward")

    @property
    def embedding_group(self) -> Group:
        """The first and the last of the pipeline; a rank between them, or a pipeline of one, is alone."""
        return self.group("embedding")

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

    def device_mesh(self, *purposes: str) -> DeviceMesh:
        """A torch DeviceMesh over groups that exist already, for interoperation: `ps.device_mesh("dp", "tp")`.

        One dim a purpose, named after it, slowest first: axes ("pp", "dp", "tp"), or ("dp_outer", "dp_inner")
        for hybrid sharding. Ranks along axes that are not named have meshes of their own. Makes no
        communicator, so a group of one cannot be a dim: leave it out. Communicates nothing.
        """
        groups = [self.group(purpose) for purpose in purposes]
        handles = [group.process_group for group in groups if group.process_group is not None]
        alone = [group.purpose for group in groups if group.size == 1]
        assert groups, "a mesh over no purpose"
        assert not alone, f"mesh over {purposes}: {alone} have one rank and no communicator"
        # Distances along the axes add up: this is what a grid is.
        ranks = torch.tensor(self.rank)
        for group in groups:
            ranks = ranks.unsqueeze(-1) + (torch.tensor(group.ranks) - self.rank)
        assert ranks.unique().numel() == ranks.numel(), f"{purposes} are not independent: {ranks.tolist()}"
        if len(groups) == 1:
            return DeviceMesh.from_group(handles[0], self.device.kind, mesh_dim_names=purposes)
        return DeviceMesh.from_group(handles, self.device.kind, ranks, mesh_dim_names=purposes)

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

    Raises PeerLostError when a rank does not come within the timeout or dies meanwhile.
    """
    if world_size == 1:
        return dist.HashStore()
    everyone = tuple(range(world_size))
    with peer_loss_named("rendezvous", "default", everyone, rank):
        found, _, _ = next(iter(dist.rendezvous(init_method, rank, world_size, timeout=timeout)))
    found.set_timeout(timeout)
    store = dist.PrefixStore(f"attempt{attempt}", found)
    with peer_loss_named("init_process_group", "default", everyone, rank):
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
        with peer_loss_named("leaving the world", "default", tuple(range(ps.world_size)), ps.rank):
            dist.barrier()
        dist.destroy_process_group()


def make_parallel_state(
    grid: RankGrid,
    device: Device,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    observer: Observer | None = None,
    *,
    num_distributed_optimizer_instances: int = 1,
) -> ParallelState:
    """Make every group of `PURPOSES`; the default process group must exist (`init_process_group`).

    num_distributed_optimizer_instances: into so many parts dp is divided (dp_inner, dp_outer).

    timeout: after which a collective gives up on a silent peer. observer: told of every collective, for a
    watchdog that says who is stuck. Communicates over the whole world; every rank calls it with the same
    arguments. Raises RankGridError when the instances do not divide dp, PeerLostError naming the purpose whose
    group was being made.
    """
    check_instances(grid, num_distributed_optimizer_instances)
    if grid.world_size == 1:
        return single_process(device, grid=grid, timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == grid.world_size, f"world of {world_size} ranks, grid for {grid.world_size}"
    groups: dict[str, Group] = {}
    for purpose in PURPOSES:
        if purpose.part == "inner" and num_distributed_optimizer_instances == 1:
            groups[purpose.name] = dataclasses.replace(groups["dp"], purpose=purpose.name)
            continue
        ranks = own_ranks(purpose, grid, rank, num_distributed_optimizer_instances)
        lists = rank_lists(purpose, grid, num_distributed_optimizer_instances)
        backend = _backend(purpose, device)
        if observer is not None and len(ranks) > 1:
            observer("new_group", purpose.name, ranks)
        with peer_loss_named("new_group", purpose.name, ranks, rank):
            process_group = _make_communicator(purpose, lists, ranks, backend, timeout)
        groups[purpose.name] = Group(
            purpose.name, ranks, ranks.index(rank), backend, process_group, device, timeout, observer
        )
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


def _make_communicator(
    purpose: Purpose,
    lists: tuple[tuple[int, ...], ...],
    own: tuple[int, ...],
    backend: str,
    timeout: datetime.timedelta,
) -> dist.ProcessGroup | None:
    """This rank's communicator for a purpose, None when it is alone.

    Every rank goes through every list, its own or not, in one order. torch's way of asking the members alone
    (use_local_synchronization) names a group by the number of groups its rank has, which differs between
    ranks here (embedding): the members would wait for each other under different names. And NCCL's groups are
    split off the world's, in which every rank takes part.
    """
    mine: dist.ProcessGroup | None = None
    for ranks in lists:
        if len(ranks) > 1:
            made = dist.new_group(list(ranks), timeout, backend, group_desc=purpose.name)
            mine = made if ranks == own else mine
    if mine is not None and backend == "nccl" and purpose.point_to_point:
        dist.barrier(mine)  # all ranks of a communicator must take part in its first use
    return mine
