"""Who this rank is and whom it talks to: one frozen `ParallelState`, built once, passed first as `ps`.

The only module that makes process groups. A group belongs to a *purpose* (a row of `rank_grid.PURPOSES`): two
purposes over the same ranks have separate communicators, because one communicator runs its collectives one
after the other.

Size and rank along an axis (`ps.dp_size`, `ps.dp_rank`) are those of the grid; rank r of the world is
`grid.coordinates(r)`. What torch has already, a mesh or its default process group, becomes a state in `mesh.py`; the
state's world may then be a part of torch's.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron.core.device import Device, current_device
from megatron.core.transport.peer_loss import peer_loss_named
from megatron.core.transport.pending import Call, Imagined
from megatron.core.transport.rank_grid import PURPOSES, Purpose, RankGrid, WorldPart
from megatron.core.transport.shm_transport import ShmTransport, open_shm_transport
from megatron.core.transport.traffic import TrafficCounter

DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)
_T = TypeVar("_T")

Observer = Callable[[str, str, tuple[int, ...]], None]  # (operation, purpose, ranks)


class ImaginedPeers(Protocol):
    """What the ranks of an imagined world tell each other."""

    def all_gather(self, data: bytes, group: Group) -> list[bytes]:
        """Every rank's bytes, in group order: `host_data.all_gather_bytes`."""

    def fill(self, call: Call, temporaries: tuple[Tensor, ...]) -> None:
        """A collective has begun: values, where there is memory for them, in place of what it would have brought."""

    def message(self, op: str, tensor: Tensor, group: Group, place: int) -> Imagined:
        """A message under way. op: "send" or "receive". place: of the other end in the group. What is on the host
        arrives; what has no memory need not."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that talk for one purpose, seen from one of them.

    ranks: world ranks in group order. rank: this rank's place among them. process_group: None for a group of
    one, which never communicates. observer: hears of every collective before it begins. traffic: what its collectives
    have moved. shm: what moves tensors between its ranks without messages, where there is one. peers: those of an
    imagined group, which has size and rank and no communicator: its collectives take memory, are counted, and move
    nothing.
    """

    purpose: str
    ranks: tuple[int, ...]
    rank: int
    backend: str
    process_group: dist.ProcessGroup | None
    device: Device
    timeout: datetime.timedelta
    observer: Observer | None = None
    traffic: TrafficCounter = dataclasses.field(default_factory=TrafficCounter, compare=False, repr=False)
    shm: ShmTransport | None = dataclasses.field(default=None, repr=False)
    peers: ImaginedPeers | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def tell(self, op: str) -> None:
        """The observer, that a collective begins."""
        if self.observer is not None:
            self.observer(op, self.purpose, self.ranks)


class _Of(Generic[_T]):
    """A read-only attribute of a parallel state."""

    def __init__(self, read: Callable[[ParallelState], _T]) -> None:
        self._read = read

    def __get__(self, ps: ParallelState, owner: type) -> _T:
        return self._read(ps)


def _group(purpose: str) -> _Of[Group]:
    return _Of(lambda ps: ps.group(purpose))


def _rank(axis: str) -> _Of[int]:
    return _Of(lambda ps: ps.coordinates[axis])


def _size(axis: str) -> _Of[int]:
    return _Of(lambda ps: ps.grid.size(axis))


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
    groups: Mapping[str, Group]
    experts: RankGrid | None = None  # where they do not lie as dense layers do

    def group(self, purpose: str) -> Group:
        assert purpose in self.groups, f"no group {purpose!r}; purposes: {sorted(self.groups)}"
        return self.groups[purpose]

    world_group = _group("world")
    control_group = _group("control")
    dp_group = _group("dp")
    # The inner ranks: one distributed optimizer instance, all of dp when there is one.
    dp_reduce_group = _group("dp_reduce")
    # The inner ranks on another communicator: parameters are gathered while gradients are reduced.
    dp_gather_group = _group("dp_gather")
    dp_outer_group = _group("dp_outer")  # the same shard in every distributed optimizer instance
    tp_group = _group("tp")
    mp_group = _group("mp")  # all ranks that together hold one copy of the model
    pp_group = _group("pp")
    pp_forward_group = _group("pp_forward")
    pp_backward_group = _group("pp_backward")
    # The first and the last of the pipeline; a rank between them, or a pipeline of one, is alone.
    embedding_group = _group("embedding")
    ep_group = _group("ep")  # ranks that have other experts
    etp_group = _group("etp")  # ranks that have another part of the same experts
    ep_etp_group = _group("ep_etp")  # to whom tokens are sent
    # As those of dense layers, for ranks that hold the same experts.
    expert_dp_reduce_group = _group("expert_dp_reduce")
    expert_dp_gather_group = _group("expert_dp_gather")
    expert_dp_outer_group = _group("expert_dp_outer")
    expert_mp_group = _group("expert_mp")  # all ranks that together hold one copy of all experts
    stage_group = _group("stage")  # all ranks of a pipeline stage; without a grid of experts those of dp

    @functools.cached_property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's place along every axis."""
        return MappingProxyType(dict(self.grid.coordinates(self.rank)))

    tp_rank, dp_rank, pp_rank = _rank("tp"), _rank("dp"), _rank("pp")
    tp_size, dp_size, pp_size = _size("tp"), _size("dp"), _size("pp")

    @property
    def expert_grid(self) -> RankGrid:
        """Where experts lie."""
        return self.experts or self.grid

    @functools.cached_property
    def expert_coordinates(self) -> Mapping[str, int]:
        """This rank's place along every axis of the experts' grid."""
        return MappingProxyType(dict(self.expert_grid.coordinates(self.rank)))

    ep_rank = _Of(lambda ps: ps.expert_coordinates["ep"])
    etp_rank = _Of(lambda ps: ps.expert_coordinates["tp"])
    expert_dp_rank = _Of(lambda ps: ps.expert_coordinates["dp"])

    @property
    def is_fake(self) -> bool:
        """This rank is there, and no other one (--fake-process-group): it speaks, and looks at files, for all."""
        return self.world_group.peers is not None and not self.device.imagined

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0 or self.is_fake

    @property
    def is_last_rank(self) -> bool:
        """The rank that prints Megatron's lines."""
        return self.rank == self.world_size - 1 or self.is_fake


def init_process_group(
    device: Device,
    *,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    backend: str | None = None,
    init_method: str = "env://",
    store: dist.Store | None = None,
) -> None:
    """Meet the other ranks of the world (torch's default process group); a world of one meets nobody.

    backend: the device's own by default. init_method "env://" is what torchrun sets up. store: one that all ranks have
    reached already, instead of an init_method.
    Raises PeerLostError when a rank does not come within the timeout or dies meanwhile.
    """
    if world_size == 1:
        return
    with peer_loss_named("init_process_group", "default", tuple(range(world_size)), rank):
        dist.init_process_group(
            backend or device.backend,
            init_method=init_method if store is None else None,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device.torch_device if device.kind == "cuda" else None,
        )


def destroy_process_group(ps: ParallelState) -> None:
    """Leave the world, all ranks together.

    The barrier is needed: tearing down while a peer is still talking aborts it ("terminate called without an
    active exception"). Not for a rank that leaves because of an error: it just exits.
    """
    if ps.world_size > 1 and not ps.is_fake:
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
    experts: RankGrid | None = None,
) -> ParallelState:
    """Make every group of `PURPOSES`; the default process group must exist (`init_process_group`).

    num_distributed_optimizer_instances: into so many parts dp is divided (dp_reduce and dp_gather are one of them,
    dp_outer goes across). experts: their grid; None where they lie as dense layers do.

    timeout: after which a collective gives up on a silent peer. observer: told of every collective, for a
    watchdog that says who is stuck. Communicates over the whole world; every rank calls it with the same
    arguments. Raises RankGridError when the instances do not divide dp, PeerLostError naming the purpose whose
    group was being made.
    """
    rank, world_size = (0, 1) if grid.world_size == 1 else (dist.get_rank(), dist.get_world_size())
    assert world_size == grid.world_size, f"world of {world_size} ranks, grid for {grid.world_size}"
    everyone = WorldPart(tuple(range(world_size)), grid, num_distributed_optimizer_instances, experts)
    return make_state_of_parts([everyone], rank, device, timeout, observer)


def make_state_of_parts(
    parts: list[WorldPart],
    rank: int,
    device: Device,
    timeout: datetime.timedelta,
    observer: Observer | None = None,
) -> ParallelState:
    """A state of the part of torch's world in which this rank of that world stands. parts: all of them, on every rank.

    Communicates over the default process group: every rank goes through the groups of all parts and keeps its own.
    Raises PeerLostError naming the purpose whose group was being made.
    """
    own = next(part for part in parts if rank in part.ranks)
    groups: dict[str, Group] = {}
    transports: list[ShmTransport] = []
    for purpose in PURPOSES:
        if (shared := own.shared_purpose(purpose)) is not None:
            groups[purpose.name] = groups[shared]
            continue
        ranks = own.own_ranks(purpose, rank)
        lists = [one for part in parts for one in part.rank_lists(purpose)]
        backend = _backend(purpose, device)
        if observer is not None and len(ranks) > 1:
            observer("new_group", purpose.name, ranks)
        with peer_loss_named("new_group", purpose.name, ranks, rank):
            process_group = _make_communicator(purpose, lists, ranks, backend, timeout)
        group = Group(purpose.name, ranks, ranks.index(rank), backend, process_group, device, timeout)
        shm = open_shm_transport(group, transports) if purpose.shared_memory else None
        groups[purpose.name] = dataclasses.replace(group, observer=observer, shm=shm)
    place, size = own.ranks.index(rank), len(own.ranks)
    return ParallelState(place, size, own.grid, device, MappingProxyType(groups), own.experts)


def single_process(
    device: Device | None = None, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT
) -> ParallelState:
    """A world of one: no process group, no communication at all."""
    alone = WorldPart((0,), RankGrid(world_size=1))
    return make_state_of_parts([alone], 0, device or current_device(), timeout)


def imagined_state(part: WorldPart, rank: int, device: Device, peers: ImaginedPeers) -> ParallelState:
    """A rank of a world that is not there. Communicates with nobody."""
    groups: dict[str, Group] = {}
    for purpose in PURPOSES:
        if (shared := part.shared_purpose(purpose)) is not None:
            groups[purpose.name] = groups[shared]
            continue
        ranks = part.own_ranks(purpose, rank)
        where = _backend(purpose, device), None, device, DEFAULT_TIMEOUT
        others = peers if len(ranks) > 1 else None
        groups[purpose.name] = Group(purpose.name, ranks, ranks.index(rank), *where, peers=others)
    return ParallelState(rank, len(part.ranks), part.grid, device, MappingProxyType(groups), part.experts)


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
            options = _options(purpose, ranks, backend, timeout)
            made = dist.new_group(list(ranks), timeout, backend, group_desc=purpose.name, **options)
            mine = made if ranks == own else mine
    if mine is not None and backend == "nccl" and purpose.point_to_point:
        dist.barrier(mine)  # all ranks of a communicator must take part in its first use
    return mine


def group_of_this_rank() -> dist.ProcessGroup:
    """torch's group of this rank alone, for callers to whom None is the whole world. Communicates with nobody."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _options(
    purpose: Purpose, ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta
) -> dict[str, Any]:
    """What a communicator asks for beyond the usual."""
    options: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):  # a mesh in an order of its own; torch sorts unless told
        options["sort_ranks"] = False
    if backend == "nccl" and purpose.high_priority:
        nccl = options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        nccl._timeout = timeout  # torch warns where the two differ
    return options
