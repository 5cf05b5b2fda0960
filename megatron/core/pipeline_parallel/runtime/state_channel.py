"""Messages of post-validation between neighbours in a pipeline: a few numbers, from host to host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.collectives import Pending, send_receive
from megatron.core.parallel_state import ParallelState
from megatron.core.peer_loss import PeerLostError


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
    messages wait for no stream. num_numbers: of a message, the same for all.

    Raises PeerLostError naming the message.
    """

    def __init__(self, ps: ParallelState, num_numbers: int) -> None:
        self._group, self._num_numbers = ps.control_group, num_numbers
        self._places = [ps.control_group.ranks.index(rank) for rank in ps.pp_group.ranks]
        self._sends: dict[int, Pending] = {}

    def send(self, peer: int, numbers: Sequence[float]) -> None:
        assert len(numbers) == self._num_numbers, f"{len(numbers)} numbers, not {self._num_numbers}"
        self._finish(peer)
        message = torch.tensor(numbers, dtype=torch.float64)
        try:
            sent, _ = send_receive([(message, self._places[peer])], [], self._group)
        except PeerLostError as error:
            raise error.at(_name("to", peer)) from error
        self._sends[peer] = sent[0]

    def receive(self, peer: int) -> StateArrival:
        buffer = torch.empty(self._num_numbers, dtype=torch.float64)
        try:
            _, received = send_receive([], [(buffer, self._places[peer])], self._group)
        except PeerLostError as error:
            raise error.at(_name("from", peer)) from error
        return _Arrival(buffer, received[0], peer)

    def drain(self) -> None:
        for peer in list(self._sends):
            self._finish(peer)

    def _finish(self, peer: int) -> None:
        pending = self._sends.pop(peer, None)
        if pending is not None:
            _wait(pending, _name("to", peer))


class _Arrival:
    def __init__(self, buffer: Tensor, pending: Pending, peer: int) -> None:
        self._buffer, self._pending, self._peer = buffer, pending, peer

    def wait(self) -> list[float]:
        _wait(self._pending, _name("from", self._peer))
        numbers: list[float] = self._buffer.tolist()
        return numbers


def _wait(pending: Pending, name: str) -> None:
    try:
        pending.wait()
    except PeerLostError as error:
        raise error.at(name) from error


def _name(direction: str, peer: int) -> str:
    return f"post-validation's state {direction} pipeline rank {peer}"
