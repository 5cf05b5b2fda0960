"""Messages between pipeline ranks: asynchronous, over one communicator a direction, batched where that is a thing.

A route is what messages of one sender, receiver and direction take.

[Note: shape handshake] A receive needs a buffer before its message comes. The first message of a route is therefore
preceded by a header with dtype and shape, for which the receiver waits; all later messages of the route have that
shape. On gloo both ends then agree on its way (`open_route`). Waiting there cannot deadlock: `add_comm` puts messages
into both rows in one global order that is a valid execution even if every message blocks. A batch in which a route is
new is posted message by message in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from time import monotonic_ns
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.held.sends import Key, most_sends
from megatron.core.pipeline_parallel.plan.ir import RECV_B, RECV_F, SEND_B, SEND_F, RawOp, op_text
from megatron.core.transport.collectives import Pending
from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.point_to_point import P2PRoute, send_receive
from megatron.core.transport.shm_messages import SharedRoute, open_route

MAX_DIMS = 8
# A dtype's place in this list is its number in headers: only ever append.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PINGS = 5  # of a link, behind one that brings both ends together

_RECEIVE_OF = {SEND_F: RECV_F, SEND_B: RECV_B}

Message = tuple[RawOp, Tensor | None]  # a SEND_* with what it sends, or a RECV_*
Shape = tuple[torch.dtype, tuple[int, ...]]
Route = tuple[int, int]  # (kind of transfer, peer)


class Arrival(Protocol):
    """A message that was posted to be received."""

    def wait(self) -> Tensor:
        """The tensor, once it is there. Called once."""


class Channel(Protocol):
    """What an executor asks of a transport between the places of one pipeline."""

    def post(self, messages: Sequence[Message]) -> list[Arrival]:
        """Start a batch of transfers, in the order of the plan; an `Arrival` for each receive among them.

        A sent tensor belongs to the channel from now on, and nobody writes to it.
        """

    def release(self, sends: Iterable[Key]) -> None:
        """These sends are complete, something that arrived proves it: nothing of them need be kept beyond the next
        `post`. The channel may know already."""

    def drain(self) -> None:
        """After the step's last operation: return once nothing that was sent is needed here any more."""


class P2P:
    """The `Channel` over a parallel state's groups pp_forward and pp_backward; a peer is a place in them.

    gloo has no batches: there each message goes the shortest way (`open_route`), sends before receives, since a result
    was just computed and somebody waits for it.

    A sent tensor's memory is held until its send was waited for: on gloo nothing else says that it is through, and what
    plans count holds on every route. Whoever knows says so by `release`; NCCL is asked at every batch. max_sends: so
    many of the others may be under way once a batch is posted, the oldest are waited for; `most_sends` by default.

    Raises PeerLostError naming the operation.
    """

    def __init__(self, ps: ParallelState, *, max_sends: int | None = None) -> None:
        self._groups = dict.fromkeys((SEND_F, RECV_F), ps.pp_forward_group)
        self._groups |= dict.fromkeys((SEND_B, RECV_B), ps.pp_backward_group)
        self._device = ps.device
        self._max_sends = most_sends(ps.pp_forward_group.size) if max_sends is None else max_sends
        # This rank's routes: what they carry; where there are no batches, the way and an empty tensor of that dtype.
        self._shapes: dict[Route, Shape] = {}
        self._routes: dict[Route, tuple[P2PRoute | SharedRoute, Tensor]] = {}
        # Under way, in the order in which they were posted; headers apart.
        self._sends: dict[Key, tuple[RawOp, Pending]] = {}
        self._headers: list[tuple[RawOp, Pending]] = []
        self._proven: list[Key] = []  # sends that are known to be complete
        # Whether the backend takes batches, and can be asked if a send is through.
        self._batches = ps.pp_forward_group.backend != "gloo"

    def post(self, messages: Sequence[Message]) -> list[Arrival]:
        """Start a batch of transfers; returns without waiting for any of them to arrive.

        Waits for the oldest sends where too many are under way, for room on routes through memory, and for the other
        end of routes that are used for the first time. Raises ModelError where a tensor has not the shape that its
        route carries, or cannot be sent.
        """
        known = True
        for op, tensor in messages:
            shape = self._shapes.get((op[0], op[6]))
            if shape is None:
                known = False
            elif tensor is not None and (tensor.dtype != shape[0] or tensor.shape != shape[1]):
                raise ModelError(
                    f"{op_text(op)}: {_shape_text(tensor.dtype, tensor.shape)} after {_shape_text(*shape)}; what"
                    " stages hand on must have one shape for all microbatches, in training and in evaluation"
                )
        start = self._start_batch if self._batches else self._start_each
        if known:
            arrivals = start(messages)
        else:
            arrivals = []
            for message in messages:  # see [Note: shape handshake]
                self._shake_hands(*message)
                arrivals += start([message])
        while self._proven:
            key = self._proven.pop()
            if key in self._sends:  # not waited for before, to make room
                self._finish_send(key)
        if self._batches:  # oldest first, up to one that is under way
            while self._sends and next(iter(self._sends.values()))[1].is_completed():
                self._finish_send(next(iter(self._sends)))
        while len(self._sends) > self._max_sends:
            self._finish_send(next(iter(self._sends)))
        return arrivals

    def release(self, sends: Iterable[Key]) -> None:
        """Sends that an arrival proved complete: their memory is given back by the next `post`, once its messages are
        on their way. Here a computation is about to start that somebody waits for."""
        self._proven += sends

    def drain(self) -> None:
        """Return once every send is complete."""
        self._proven.clear()
        while self._headers:
            _wait(*self._headers.pop())
        while self._sends:
            self._finish_send(next(iter(self._sends)))

    def ping(self) -> int:
        """Nanoseconds of a message on the slowest of this rank's links: half a round trip of what the link's forwards
        carry, the median of `PINGS`; a forward's way there, a backward's back, where backwards have gone. 0 where none
        has carried anything. To be called by all ranks between two steps; communicates over the pipeline, link by link
        in one order on all ranks."""
        group, slowest = self._groups[SEND_F], 0

        def link(route: Route) -> tuple[int, int]:
            kind, peer = route
            return (group.rank, peer) if kind == SEND_F else (peer, group.rank)

        for route in sorted((one for one in self._shapes if one[0] in (SEND_F, RECV_F)), key=link):
            (kind, peer), (dtype, shape) = route, self._shapes[route]
            message = torch.zeros(shape, dtype=dtype, device=self._device.torch_device)
            took = []
            for _ in range(1 + PINGS):
                begin = monotonic_ns()
                for way in (SEND_F, RECV_B) if kind == SEND_F else (RECV_F, SEND_B):
                    try:
                        self._start_one(way, peer, message).wait()
                    except PeerLostError as error:
                        raise error.at(f"measuring the link to pipeline rank {peer}") from error
                self._device.synchronize()  # sync: a round trip
                took.append(monotonic_ns() - begin)
            slowest = max(slowest, sorted(took[1:])[PINGS // 2] // 2)
        return slowest

    # Starting messages -------------------------------------------------------------------------------

    def _start_one(self, kind: int, peer: int, message: Tensor) -> Pending:
        """On its route, where it has one."""
        if (kind, peer) in self._routes:
            return self._routes[kind, peer][0].start(message)
        ends = [(message, peer)]
        sent, received = send_receive(
            *((ends, []) if kind in _RECEIVE_OF else ([], ends)), self._groups[kind]
        )
        return (*sent, *received)[0]

    def _start_each(self, messages: Sequence[Message]) -> list[Arrival]:
        """Every message by itself, over known routes."""
        arrivals: list[Arrival] = []
        op: RawOp | None = None
        try:
            for op, tensor in messages:
                if tensor is not None:
                    self._keep(op, self._route(op)[0].start(tensor.contiguous()))
            for op, tensor in messages:
                if tensor is None:
                    route, like = self._route(op)
                    buffer = like.new_empty(self._shapes[op[0], op[6]][1])
                    arrivals.append(_Receive(op, buffer, route.start(buffer)))
        except PeerLostError as error:
            raise error if op is None else error.at(op_text(op)) from error
        return arrivals

    def _route(self, op: RawOp) -> tuple[P2PRoute | SharedRoute, Tensor]:
        return self._routes[op[0], op[6]]

    def _start_batch(self, messages: Sequence[Message]) -> list[Arrival]:
        """One batch a direction, over known routes. A direction that sends goes first: a result was just computed, and
        somebody waits for it."""
        arrivals: dict[RawOp, Arrival] = {}
        backward_first = any(op[0] == SEND_B for op, _ in messages)
        for send in (SEND_B, SEND_F) if backward_first else (SEND_F, SEND_B):
            sends = [(op, one.contiguous()) for op, one in messages if op[0] == send and one is not None]
            receives = [(op, self._buffer(op)) for op, _ in messages if op[0] == _RECEIVE_OF[send]]
            if not sends and not receives:
                continue
            sent, received = self._start(sends, receives, self._groups[send])
            for (op, _), pending in zip(sends, sent, strict=True):
                self._keep(op, pending)
            for (op, buffer), pending in zip(receives, received, strict=True):
                arrivals[op] = _Receive(op, buffer, pending)
        return [arrivals[op] for op, tensor in messages if tensor is None]

    def _start(
        self, sends: Sequence[tuple[RawOp, Tensor]], receives: Sequence[tuple[RawOp, Tensor]], group: Group
    ) -> tuple[list[Pending], list[Pending]]:
        try:
            return send_receive(
                [(tensor, op[6]) for op, tensor in sends], [(tensor, op[6]) for op, tensor in receives], group
            )
        except PeerLostError as error:
            raise error.at(", ".join(op_text(op) for op, _ in (*sends, *receives))) from error

    def _buffer(self, op: RawOp) -> Tensor:
        dtype, shape = self._shapes[op[0], op[6]]
        return torch.empty(shape, dtype=dtype, device=self._device.torch_device)

    def _keep(self, op: RawOp, pending: Pending) -> None:
        assert op[:3] not in self._sends, f"{op_text(op)}: posted again before it was through"
        self._sends[op[:3]] = (op, pending)

    def _shake_hands(self, op: RawOp, tensor: Tensor | None) -> None:
        """Tell or hear what a route will carry, unless both ends know."""
        route = (op[0], op[6])
        if route in self._shapes:
            return
        imagined = self._groups[op[0]].peers is not None
        where = torch.device("cpu") if imagined else self._device.torch_device
        if tensor is not None:
            header = torch.tensor(_header(op, tensor), device=where)
            sent, _ = self._start([(op, header)], [], self._groups[op[0]])
            self._headers.append((op, sent[0]))
            shape = (tensor.dtype, tuple(tensor.shape))
        else:
            header = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=where)
            _, received = self._start([], [(op, header)], self._groups[op[0]])
            _wait(op, received[0])
            code, num_dims, *dims = header.tolist()  # sync: the shape of a route, once
            shape = (DTYPES[code], tuple(dims[:num_dims]))
        self._shapes[route] = shape
        if not self._batches:
            self._routes[route] = self._open(op, *shape)

    def _open(
        self, op: RawOp, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[P2PRoute | SharedRoute, Tensor]:
        way, num_bytes = "send" if op[0] in _RECEIVE_OF else "receive", dtype.itemsize * math.prod(shape)
        try:
            route = open_route(way, op[6], self._groups[op[0]], num_bytes, self._max_sends)
        except PeerLostError as error:
            raise error.at(op_text(op)) from error
        return route, torch.empty(0, dtype=dtype, device=self._device.torch_device)

    def _finish_send(self, key: Key) -> None:
        """Wait even where it is known to be through: that is what gives the memory back, and tells of an error."""
        _wait(*self._sends.pop(key))


class _Receive(NamedTuple):
    """A receive under way and the buffer that it fills."""

    op: RawOp
    buffer: Tensor
    pending: Pending

    def wait(self) -> Tensor:
        _wait(self.op, self.pending)
        return self.buffer


def _wait(op: RawOp, pending: Pending) -> None:
    try:
        pending.wait()
    except PeerLostError as error:
        raise error.at(op_text(op)) from error


def _header(op: RawOp, tensor: Tensor) -> list[int]:
    """What goes ahead of a route's first tensor. Raises ModelError for what a header cannot say."""
    told = f"{op_text(op)}: a stage handed on {_shape_text(tensor.dtype, tensor.shape)}; "
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ModelError(f"{told}between stages go hidden states of one of the types {names}")
    if tensor.dim() > MAX_DIMS:
        raise ModelError(f"{told}that is {tensor.dim()} dimensions, and between stages go at most {MAX_DIMS}")
    return [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]


def _shape_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
