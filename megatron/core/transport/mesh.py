"""Between torch's meshes and our `ParallelState`, and a state of all ranks there are: for use without our trainer.

A torch mesh or the default process group becomes a state of data parallel ranks with communicators of its own;
a state's groups become a mesh where torch wants one, without a new communicator.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import Device, device_in_use
from megatron.core.transport import host_data, parallel_state
from megatron.core.transport.parallel_state import DEFAULT_TIMEOUT, Group, ParallelState
from megatron.core.transport.rank_grid import MeshError, RankGrid, parts_from_places


def device_mesh(ps: ParallelState, *purposes: str) -> DeviceMesh:
    """A torch DeviceMesh over groups that exist already, for interoperation: `device_mesh(ps, "dp", "tp")`.

    One dim a purpose, named after it, slowest first: axes ("pp", "dp", "tp"), or ("dp_outer", "dp_gather")
    for hybrid sharding. Ranks along axes that are not named have meshes of their own. Makes no
    communicator, so a group of one cannot be a dim: leave it out. Communicates nothing.
    """
    groups = [ps.group(purpose) for purpose in purposes]
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
        return DeviceMesh.from_group(handles[0], ps.device.kind, mesh_dim_names=purposes)
    return DeviceMesh.from_group(handles, ps.device.kind, ranks, mesh_dim_names=purposes)


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
    device, rank, ranks = (
        device or device_in_use(mesh.device_type),
        dist.get_rank(),
        mesh.mesh.flatten().tolist(),
    )
    outer = mesh.mesh.shape[0] if mesh.ndim == 2 else 1
    # (the mesh's first rank, place in it, its size, its outer size): all of everybody's meshes in four numbers a rank.
    # A rank with a mesh of no use says so here and is told afterwards, else the others would wait for it.
    here = (-1, 0, 0, 0)
    if mesh.ndim <= 2 and rank in ranks:
        here = ranks[0], ranks.index(rank), len(ranks), outer
    backend, world = "gloo" if dist.get_backend() == "gloo" else device.backend, range(dist.get_world_size())
    everyone = Group("default", tuple(world), rank, backend, dist.group.WORLD, device, timeout)
    places = host_data.all_gather_json(here, everyone)
    _check_mesh(mesh, rank)
    return parallel_state.make_state_of_parts(parts_from_places(places), rank, device, timeout)


def data_parallel_state(
    device: Device | None = None, timeout: datetime.timedelta = DEFAULT_TIMEOUT
) -> ParallelState:
    """All ranks of torch's default process group, data parallel; one process where there is no such group.

    device: CUDA's current one where there is one and the ranks do not talk over gloo alone. Communicates over the
    default process group.
    """
    if not dist.is_initialized():
        return parallel_state.single_process(device or device_in_use(), timeout=timeout)
    device = device or device_in_use("cpu" if dist.get_backend() == "gloo" else None)
    world_size = dist.get_world_size()
    return parallel_state.make_parallel_state(RankGrid(world_size, dp=world_size), device, timeout)


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
