"""Messages of post-validation between neighbours in a pipeline: a few numbers, from host to host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.transport.collectives import Pending
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.point_to_point import send_receive


class StateArrival(Protocol):
    """A state that was asked for."""

    def wait(self) -> list[float]:
        """Its numbers, once they are there. Called once."""


class StateMessages(Protocol):
    """What `PostValidator` asks of a transport. peer: a place in the pipeline. A route (sender, receiver) keeps its
    order; partial states and whole ones have routes of their own, since they go opposite ways."""

    def send(self, peer: int, numbers: Sequence[float]) -> None:
        """Without waiting for the peer, unless its last message has not been taken."""

    def receive(self, peer: int) -> StateArrival:
        """Ask for the next message."""

    def drain(self) -> None:
        """Return once every send is complete."""


class StateChannel:
    """`StateMessages` over the group `control`, which is gloo on every device: the host decides on steps, and its
    messages wait for no stream. All messages of a route have one length, which goes ahead of the first.

    Raises PeerLostError naming the message.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._group = ps.control_group
        self._places = [ps.control_group.ranks.index(rank) for rank in ps.pp_group.ranks]
        self._sends: dict[int, list[Pending]] = {}
        self._lengths: dict[tuple[str, int], int] = {}  # (direction, peer) -> numbers of its messages

    def send(self, peer: int, numbers: Sequence[float]) -> None:
        self._finish(peer)
        route = ("to", peer)
        messages = [torch.tensor(numbers, dtype=torch.float64)]
        if route not in self._lengths:
            self._lengths[route] = len(numbers)
            messages.insert(0, torch.tensor([len(numbers)]))
        assert len(numbers) == self._lengths[route], f"{len(numbers)} numbers, not {self._lengths[route]}"
        self._sends[peer] = [self._start(message, *route) for message in messages]

    def receive(self, peer: int) -> StateArrival:
        length = self._lengths.get(("from", peer))
        return _Arrival(self, peer, None if length is None else self._ask(peer, length))

    def drain(self) -> None:
        for peer in list(self._sends):
            self._finish(peer)

    def _length_from(self, peer: int) -> int:
        """Waits for it if need be."""
        route = ("from", peer)
        if route not in self._lengths:
            header = torch.empty(1, dtype=torch.int64)
            _wait(self._start(header, *route), _name(*route))
            self._lengths[route] = int(header.item())
        return self._lengths[route]

    def _ask(self, peer: int, length: int) -> tuple[Tensor, Pending]:
        buffer = torch.empty(length, dtype=torch.float64)
        return buffer, self._start(buffer, "from", peer)

    def _start(self, message: Tensor, direction: str, peer: int) -> Pending:
        one = [(message, self._places[peer])]
        try:
            sent, received = send_receive(*((one, []) if direction == "to" else ([], one)), self._group)
        except PeerLostError as error:
            raise error.at(_name(direction, peer)) from error
        return (*sent, *received)[0]

    def _finish(self, peer: int) -> None:
        for pending in self._sends.pop(peer, ()):
            _wait(pending, _name("to", peer))


class _Arrival:
    """posted: the buffer and what fills it; None before the first message of a route, whose length is not known: it is
    asked for when it is waited for. No two of these are asked for at once."""

    def __init__(self, channel: StateChannel, peer: int, posted: tuple[Tensor, Pending] | None) -> None:
        self._channel, self._peer, self._posted = channel, peer, posted

    def wait(self) -> list[float]:
        buffer, pending = self._posted or self._channel._ask(
            self._peer, self._channel._length_from(self._peer)
        )
        _wait(pending, _name("from", self._peer))
        numbers: list[float] = buffer.tolist()
        return numbers


def _wait(pending: Pending, name: str) -> None:
    try:
        pending.wait()
    except PeerLostError as error:
        raise error.at(name) from error


def _name(direction: str, peer: int) -> str:
    return f"post-validation's state {direction} pipeline rank {peer}"
