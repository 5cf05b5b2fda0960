"""Messages between pipeline ranks: asynchronous, over one communicator a direction, batched where that is a thing.

A route is what messages of one sender, receiver and direction take.

[Note: shape handshake] A receive needs a buffer before its message comes. The first message of a route is therefore
preceded by a header with dtype and shape, for which the receiver waits; all later messages of the route have that
shape. Waiting there cannot deadlock: `add_comm` puts messages into both rows in one global order that is a valid
execution even if every message blocks. A batch in which a route is new is posted message by message in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.ir import RECV_B, RECV_F, SEND_B, SEND_F, RawOp, op_text
from megatron.core.pipeline_parallel.plan.send_completion import Key
from megatron.core.pipeline_parallel.runtime.channel import Arrival, Message
from megatron.core.transport.collectives import Pending
from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.point_to_point import P2PRoute, send_receive

MAX_DIMS = 8
# A dtype's place in this list is its number in headers: only ever append.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_RECEIVE_OF = {SEND_F: RECV_F, SEND_B: RECV_B}

Shape = tuple[torch.dtype, tuple[int, ...]]
Route = tuple[int, int]  # (kind of transfer, peer)


class P2P:
    """The `Channel` over a parallel state's groups pp_forward and pp_backward; a peer is a place in them.

    gloo has no batches: there each message goes its own way (`P2PRoute`), sends before receives, since a result was
    just computed and somebody waits for it.

    A sent tensor's memory is held until its send was waited for: on gloo nothing else says that it is through. Whoever
    knows says so by `release`; NCCL is asked at every batch. max_sends: so many of the others may be under way once a
    batch is posted, the oldest are waited for; twice the number of ranks by default.

    Raises PeerLostError naming the operation.
    """

    def __init__(self, ps: ParallelState, *, max_sends: int | None = None) -> None:
        self._groups = {
            SEND_F: ps.pp_forward_group,
            RECV_F: ps.pp_forward_group,
            SEND_B: ps.pp_backward_group,
            RECV_B: ps.pp_backward_group,
        }
        self._device = ps.device.torch_device
        self._max_sends = 2 * ps.pp_forward_group.size if max_sends is None else max_sends
        # This rank's routes: what they carry.
        self._shapes: dict[Route, Shape] = {}
        # Of known routes, where there are no batches: the line, and an empty tensor of what it carries.
        self._lines: dict[Route, tuple[P2PRoute, Tensor]] = {}
        # Under way, in the order in which they were posted; headers apart.
        self._sends: dict[Key, tuple[RawOp, Pending]] = {}
        self._proven: list[Key] = []  # sends that are known to be complete
        self._headers: list[tuple[RawOp, Pending]] = []
        # Whether the backend takes batches, and can be asked if a send is through.
        self._batches = ps.pp_forward_group.backend != "gloo"

    def post(self, messages: Sequence[Message]) -> list[Arrival]:
        """Start a batch of transfers; returns without waiting for any of them.

        Waits for the oldest sends where too many are under way, and for the headers of routes that are used for the
        first time. Raises ModelError where a tensor has not the shape that its route carries, or cannot be sent.
        """
        known = True
        for op, tensor in messages:
            if tensor is not None:
                self._check_shape(op, tensor)
            known = known and (op[0], op[6]) in self._shapes
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
        if self._batches:
            self._finish_completed_sends()
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

    def _start_each(self, messages: Sequence[Message]) -> list[Arrival]:
        """Every message by itself, over known routes."""
        arrivals: list[Arrival] = []
        op: RawOp | None = None
        try:
            for op, tensor in messages:
                if tensor is not None:
                    self._keep(op, self._line(op)[0].start(tensor.contiguous()))
            for op, tensor in messages:
                if tensor is None:
                    line, like = self._line(op)
                    buffer = like.new_empty(self._shapes[op[0], op[6]][1])
                    arrivals.append(_Receive(op, buffer, line.start(buffer)))
        except PeerLostError as error:
            raise error if op is None else error.at(op_text(op)) from error
        return arrivals

    def _line(self, op: RawOp) -> tuple[P2PRoute, Tensor]:
        route = (op[0], op[6])
        found = self._lines.get(route)
        if found is None:
            direction = "send" if op[0] in _RECEIVE_OF else "receive"
            line = P2PRoute(direction, op[6], self._groups[op[0]])
            found = (line, torch.empty(0, dtype=self._shapes[route][0], device=self._device))
            self._lines[route] = found
        return found

    def _keep(self, op: RawOp, pending: Pending) -> None:
        key = op[:3]
        assert key not in self._sends, f"{op_text(op)}: posted again before it was through"
        self._sends[key] = (op, pending)

    def _start_batch(self, messages: Sequence[Message]) -> list[Arrival]:
        """One batch a direction, over known routes."""
        arrivals: dict[RawOp, Arrival] = {}
        for send in self._directions(messages):
            sends: list[tuple[RawOp, Tensor]] = []
            receives: list[tuple[RawOp, Tensor]] = []
            for op, tensor in messages:
                if op[0] == send and tensor is not None:
                    sends.append((op, tensor.contiguous()))
                elif op[0] == _RECEIVE_OF[send]:
                    receives.append((op, self._buffer(op)))
            sent, received = self._start(sends, receives, self._groups[send])
            for (op, _), pending in zip(sends, sent, strict=True):
                self._keep(op, pending)
            for (op, buffer), pending in zip(receives, received, strict=True):
                arrivals[op] = _Receive(op, buffer, pending)
        return [arrivals[op] for op, tensor in messages if tensor is None]

    @staticmethod
    def _directions(messages: Sequence[Message]) -> list[int]:
        """SEND_F and SEND_B as far as they or their receives are there. One that sends goes first: a result was just
        computed, and somebody waits for it."""
        kinds = {op[0] for op, _ in messages}
        order = (SEND_B, SEND_F) if SEND_B in kinds else (SEND_F, SEND_B)
        return [send for send in order if send in kinds or _RECEIVE_OF[send] in kinds]

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
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _check_shape(self, op: RawOp, tensor: Tensor) -> None:
        """A route carries tensors of one shape."""
        known = self._shapes.get((op[0], op[6]))
        if known is not None and (tensor.dtype != known[0] or tensor.shape != known[1]):
            raise ModelError(
                f"{op_text(op)}: {_shape_text(tensor.dtype, tensor.shape)} after {_shape_text(*known)}; what stages"
                " hand on must have one shape for all microbatches, in training and in evaluation"
            )

    def _shake_hands(self, op: RawOp, tensor: Tensor | None) -> None:
        """Tell or hear what a route will carry, unless both ends know."""
        route = (op[0], op[6])
        if route in self._shapes:
            return
        if tensor is not None:
            header = torch.tensor(_header(op, tensor), device=self._device)
            sent, _ = self._start([(op, header)], [], self._groups[op[0]])
            self._headers.append((op, sent[0]))
            self._shapes[route] = (tensor.dtype, tuple(tensor.shape))
            return
        header = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self._device)
        _, received = self._start([], [(op, header)], self._groups[op[0]])
        _wait(op, received[0])
        code, num_dims, *dims = header.tolist()  # sync: the shape of a route, once
        self._shapes[route] = (DTYPES[code], tuple(dims[:num_dims]))

    def _finish_send(self, key: Key) -> None:
        """Wait even where it is known to be through: that is what gives the memory back, and tells of an error."""
        _wait(*self._sends.pop(key))

    def _finish_completed_sends(self) -> None:
        """Oldest first, up to one that is under way."""
        while self._sends:
            key = next(iter(self._sends))
            if not self._sends[key][1].is_completed():
                return
            self._finish_send(key)


class _Receive:
    """A receive under way and the buffer that it fills."""

    def __init__(self, op: RawOp, buffer: Tensor, pending: Pending) -> None:
        self._op, self._buffer, self._pending = op, buffer, pending

    def wait(self) -> Tensor:
        _wait(self._op, self._pending)
        return self._buffer


def _wait(op: RawOp, pending: Pending) -> None:
    try:
        pending.wait()
    except PeerLostError as error:
        raise error.at(op_text(op)) from error


def _header(op: RawOp, tensor: Tensor) -> list[int]:
    """What goes ahead of a route's first tensor. Raises ModelError for what a header cannot say."""
    told = f"{op_text(op)}: a stage handed on {_shape_text(tensor.dtype, tensor.shape)}; "
    if tensor.dtype not in DTYPES:
        names = ", ".join(_dtype_text(dtype) for dtype in DTYPES)
        raise ModelError(f"{told}between stages go hidden states of one of the types {names}")
    if tensor.dim() > MAX_DIMS:
        raise ModelError(f"{told}that is {tensor.dim()} dimensions, and between stages go at most {MAX_DIMS}")
    return [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]


def _shape_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{_dtype_text(dtype)} {list(shape)}"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
