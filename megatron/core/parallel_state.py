"""Who this rank is and whom it talks to: one frozen `ParallelState`, built once, passed first as `ps`.

The only module that makes process groups. A group belongs to a *purpose* (a row of `rank_groups.PURPOSES`): two
purposes over the same ranks have separate communicators, because one communicator runs its collectives one
after the other.

Size and rank along an axis (`ps.dp_size`, `ps.dp_rank`) are those of the grid; rank r of the world is
`grid.coordinates(r)`. Without our trainer, a torch mesh (`parallel_state_of_mesh`) or all ranks that there are
(`data_parallel_state`) become a state; its world may then be a part of torch's.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core import collectives
from megatron.core.device import Device, current_device, device_in_use
from megatron.core.peer_loss import peer_loss_named
from megatron.core.rank_grid import RankGrid
from megatron.core.rank_groups import (
    PURPOSES,
    MeshError,
    Purpose,
    WorldPart,
    check_instances,
    parts_from_places,
)

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
    """This rank's place in the grid and its groups. Made by the functions of this module.

    rank: this rank's place in the state's world. Groups hold ranks of torch's world, which is the same one except
    in a state made of a mesh over a part of it.
    """

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
        """The inner ranks: one distributed optimizer instance, all of dp when there is one."""
        return self.group("dp_reduce")

    @property
    def dp_gather_group(self) -> Group:
        """The inner ranks on another communicator: parameters are gathered while gradients are reduced."""
        return self.group("dp_gather")

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

        One dim a purpose, named after it, slowest first: axes ("pp", "dp", "tp"), or ("dp_outer", "dp_gather")
        for hybrid sharding. Ranks along axes that are not named have meshes of their own. Makes no
        communicator, so a group of one cannot be a dim: leave it out. Communicates nothing.
        """
        groups = [self.group(purpose) for purpose in purposes]
        handles = [group.process_group for group in groups if group.process_group is not None]
        alone = [group.purpose for group in groups if group.size == 1]
        assert groups, "a mesh over no purpose"
        assert not alone, f"mesh over {purposes}: {alone} have one rank and no communicator"
        # Distances along the axes add up: this is what a grid is.
        own = groups[0].ranks[groups[0].rank]
        ranks = torch.tensor(own)
        for group in groups:
            ranks = ranks.unsqueeze(-1) + (torch.tensor(group.ranks) - own)
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

    num_distributed_optimizer_instances: into so many parts dp is divided (dp_reduce and dp_gather are one of them,
    dp_outer goes across).

    timeout: after which a collective gives up on a silent peer. observer: told of every collective, for a
    watchdog that says who is stuck. Communicates over the whole world; every rank calls it with the same
    arguments. Raises RankGridError when the instances do not divide dp, PeerLostError naming the purpose whose
    group was being made.
    """
    check_instances(grid, num_distributed_optimizer_instances)
    if grid.world_size == 1:
        return single_process(device, grid=grid, timeout=timeout)
    world_size = dist.get_world_size()
    assert world_size == grid.world_size, f"world of {world_size} ranks, grid for {grid.world_size}"
    everyone = WorldPart(tuple(range(world_size)), grid, num_distributed_optimizer_instances)
    return _make_state([everyone], everyone, device, timeout, observer)


def parallel_state_of_mesh(
    mesh: DeviceMesh, device: Device | None = None, timeout: datetime.timedelta = DEFAULT_TIMEOUT
) -> ParallelState:
    """A state of data parallel ranks, those of a torch mesh: (inner,), or (outer, inner) for hybrid sharding.

    Its world is the mesh: `ps.rank` is this rank's place in it, the last dim fastest. Makes communicators of its
    own and uses none of the mesh's. Communicates over the default process group, and every rank of that calls it,
    with its own mesh: ranks may stand in different ones, such as slices of a larger mesh. device: what
    `mesh.device_type` says, CUDA's current one.

    Raises MeshError for more than two dims, for a rank outside its mesh, and for meshes that overlap.
    """
    device = device or device_in_use(mesh.device_type)
    world = tuple(range(dist.get_world_size()))
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    outer = mesh.mesh.shape[0] if mesh.ndim == 2 else 1
    usable = mesh.ndim <= 2 and dist.get_rank() in ranks
    # (the mesh's first rank, place in it, its size, its outer size): all of everybody's meshes in four numbers a rank.
    # A rank with a mesh of no use says so here and is told afterwards, else the others would wait for it.
    here = (ranks[0], ranks.index(dist.get_rank()), len(ranks), outer) if usable else (-1, 0, 0, 0)
    told = _gather_numbers(here, world, device, timeout)
    _check_mesh(mesh, dist.get_rank())
    parts = parts_from_places(told)
    own = next(part for part in parts if dist.get_rank() in part.ranks)
    return _make_state(parts, own, device, timeout, None)


def data_parallel_state(
    device: Device | None = None, timeout: datetime.timedelta = DEFAULT_TIMEOUT
) -> ParallelState:
    """All ranks of torch's default process group, data parallel; one process where there is no such group.

    device: CUDA's current one where there is one and the ranks do not talk over gloo alone. Communicates over the
    default process group.
    """
    if not dist.is_initialized():
        return single_process(device or device_in_use(), timeout=timeout)
    device = device or device_in_use("cpu" if dist.get_backend() == "gloo" else None)
    world_size = dist.get_world_size()
    return make_parallel_state(RankGrid(world_size, dp=world_size), device, timeout)


def _check_mesh(mesh: DeviceMesh, rank: int) -> None:
    shape = tuple(mesh.mesh.shape)
    if mesh.ndim > 2:
        raise MeshError(
            f"a mesh of {mesh.ndim} dims {shape}: data parallelism takes one, or two as (outer, inner) for hybrid "
            f"sharding; pass the slice of these dims, as in mesh['dp'] or mesh['outer', 'inner']"
        )
    if rank not in mesh.mesh.flatten().tolist():
        raise MeshError(
            f"rank {rank} is not in the mesh {mesh.mesh.tolist()}; give every rank a mesh that it is in, "
            "such as one of its own, [rank]"
        )


def _gather_numbers(
    own: tuple[int, ...], world: tuple[int, ...], device: Device, timeout: datetime.timedelta
) -> list[list[int]]:
    """Everybody's numbers in rank order, over the default process group."""
    host = dist.get_backend() == "gloo"
    group = Group(
        "default",
        world,
        dist.get_rank(),
        "gloo" if host else device.backend,
        dist.group.WORLD,
        device,
        timeout,
    )
    place = torch.device("cpu") if host else device.torch_device
    told = torch.empty(len(world), len(own), dtype=torch.int64, device=place)
    collectives.all_gather(told, torch.tensor(own, device=place), group)
    return told.tolist()


def _make_state(
    parts: list[WorldPart],
    own: WorldPart,
    device: Device,
    timeout: datetime.timedelta,
    observer: Observer | None,
) -> ParallelState:
    """The groups of all parts, of which this rank keeps its own. All ranks go through the same parts."""
    rank = dist.get_rank()
    groups: dict[str, Group] = {}
    for purpose in PURPOSES:
        ranks = own.own_ranks(purpose, rank)
        lists = [one for part in parts for one in part.rank_lists(purpose)]
        backend = _backend(purpose, device)
        if observer is not None and len(ranks) > 1:
            observer("new_group", purpose.name, ranks)
        with peer_loss_named("new_group", purpose.name, ranks, rank):
            process_group = _make_communicator(purpose, lists, ranks, backend, timeout)
        groups[purpose.name] = Group(
            purpose.name, ranks, ranks.index(rank), backend, process_group, device, timeout, observer
        )
    place, size = own.ranks.index(rank), len(own.ranks)
    return ParallelState(place, size, own.grid, device, timeout, MappingProxyType(groups))


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
    lists: list[tuple[int, ...]],
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
            made = dist.new_group(
                list(ranks),
                timeout,
                backend,
                group_desc=purpose.name,
                **_options(purpose, ranks, backend, timeout),
            )
            mine = made if ranks == own else mine
    if mine is not None and backend == "nccl" and purpose.point_to_point:
        dist.barrier(mine)  # all ranks of a communicator must take part in its first use
    return mine


def _options(
    purpose: Purpose, ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta
) -> dict[str, Any]:
    """What a communicator asks for beyond the usual."""
    options: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):  # a mesh in an order of its own; torch sorts unless told
        options["sort_ranks"] = False
    if backend == "nccl" and purpose.high_priority:
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        nccl._timeout = timeout  # torch warns where the two differ
        options["pg_options"] = nccl
    return options
