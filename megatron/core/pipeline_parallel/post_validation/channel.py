"""Messages of post-validation between neighbours in a pipeline: a few numbers, from host to host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.pending import Pending
from megatron.core.transport.point_to_point import P2PRoute


class StateChannel:
    """Over the group `control`, which is gloo on every device: the host decides on steps, and its messages wait for no
    stream. peer: a place in the pipeline. A route (sender, receiver) keeps its order; partial states and whole ones
    have routes of their own, since they go opposite ways. All messages have one length, which both ends know.

    Raises PeerLostError naming the message.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._group = ps.control_group
        self._places = [ps.control_group.ranks.index(rank) for rank in ps.pp_group.ranks]
        self._sends: dict[int, Pending] = {}
        self.length = 0  # of messages; 0 before the first one

    def send(self, peer: int, numbers: Sequence[float]) -> None:
        """Without waiting for the peer, unless its last message has not been taken."""
        self._finish(peer)
        self.length = self.length or len(numbers)
        assert len(numbers) == self.length, f"{len(numbers)} numbers, not {self.length}"
        self._sends[peer] = self.start("send", peer, torch.tensor(numbers, dtype=torch.float64))

    def receive(self, peer: int) -> StateArrival:
        """Ask for the next message."""
        return StateArrival(self, peer)

    def drain(self) -> None:
        """Return once every send is complete."""
        for peer in list(self._sends):
            self._finish(peer)

    def _finish(self, peer: int) -> None:
        if peer in self._sends:
            with named("send", peer):
                self._sends.pop(peer).wait()

    def start(self, way: str, peer: int, message: Tensor) -> Pending:
        """way: "send" or "receive"."""
        with named(way, peer):
            return P2PRoute(way, self._places[peer], self._group).start(message)


class StateArrival:
    """A message that was asked for: at once, or where no length is known yet, when it is waited for."""

    def __init__(self, channel: StateChannel, peer: int) -> None:
        self._channel, self._peer = channel, peer
        self._posted = self._post() if channel.length else None

    def wait(self, length: int) -> list[float]:
        """Its so many numbers, once they are there. Called once."""
        self._channel.length = length
        buffer, pending = self._posted or self._post()
        with named("receive", self._peer):
            pending.wait()
        numbers: list[float] = buffer.tolist()
        return numbers

    def _post(self) -> tuple[Tensor, Pending]:
        buffer = torch.empty(self._channel.length, dtype=torch.float64)
        return buffer, self._channel.start("receive", self._peer, buffer)


@contextlib.contextmanager
def named(way: str, peer: int) -> Iterator[None]:
    try:
        yield
    except PeerLostError as error:
        direction = "to" if way == "send" else "from"
        raise error.at(f"post-validation's state {direction} pipeline rank {peer}") from error
