"""Messages of post-validation between neighbours in a pipeline: a few numbers, from host to host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transport.collectives import Pending
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.point_to_point import send_receive


class StateChannel:
    """Over the group `control`, which is gloo on every device: the host decides on steps, and its messages wait for no
    stream. peer: a place in the pipeline. A route (sender, receiver) keeps its order; partial states and whole ones
    have routes of their own, since they go opposite ways. All messages of a route have one length, which goes ahead of
    the first.

    Raises PeerLostError naming the message.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._group = ps.control_group
        self._places = [ps.control_group.ranks.index(rank) for rank in ps.pp_group.ranks]
        self._sends: dict[int, list[Pending]] = {}
        self._lengths: dict[tuple[str, int], int] = {}  # (direction, peer) -> numbers of its messages

    def send(self, peer: int, numbers: Sequence[float]) -> None:
        """Without waiting for the peer, unless its last message has not been taken."""
        self._finish(peer)
        messages = [torch.tensor(numbers, dtype=torch.float64)]
        if ("to", peer) not in self._lengths:
            self._lengths["to", peer] = len(numbers)
            messages.insert(0, torch.tensor([len(numbers)]))
        length = self._lengths["to", peer]
        assert len(numbers) == length, f"{len(numbers)} numbers, not {length}"
        self._sends[peer] = [self._start(message, "to", peer) for message in messages]

    def receive(self, peer: int) -> StateArrival:
        """Ask for the next message."""
        return StateArrival(self, peer)

    def drain(self) -> None:
        """Return once every send is complete."""
        for peer in list(self._sends):
            self._finish(peer)

    def _finish(self, peer: int) -> None:
        for pending in self._sends.pop(peer, ()):
            _wait(pending, "to", peer)

    def _start(self, message: Tensor, direction: str, peer: int) -> Pending:
        one = [(message, self._places[peer])]
        try:
            sent, received = send_receive(*((one, []) if direction == "to" else ([], one)), self._group)
        except PeerLostError as error:
            raise error.at(_name(direction, peer)) from error
        return (*sent, *received)[0]


class StateArrival:
    """A message that was asked for. The first one of a route, whose length is not known, is asked for when it is waited
    for; no two of these are asked for at once."""

    def __init__(self, channel: StateChannel, peer: int) -> None:
        self._channel, self._peer = channel, peer
        self._posted = self._post() if ("from", peer) in channel._lengths else None

    def wait(self) -> list[float]:
        """Its numbers, once they are there. Called once."""
        if self._posted is None:
            header = torch.empty(1, dtype=torch.int64)
            _wait(self._channel._start(header, "from", self._peer), "from", self._peer)
            self._channel._lengths["from", self._peer] = int(header.item())
            self._posted = self._post()
        buffer, pending = self._posted
        _wait(pending, "from", self._peer)
        numbers: list[float] = buffer.tolist()
        return numbers

    def _post(self) -> tuple[Tensor, Pending]:
        buffer = torch.empty(self._channel._lengths["from", self._peer], dtype=torch.float64)
        return buffer, self._channel._start(buffer, "from", self._peer)


def _wait(pending: Pending, direction: str, peer: int) -> None:
    try:
        pending.wait()
    except PeerLostError as error:
        raise error.at(_name(direction, peer)) from error


def _name(direction: str, peer: int) -> str:
    return f"post-validation's state {direction} pipeline rank {peer}"
