"""Activations and gradients between a stage and one beside it: receives posted ahead, sends nobody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zbpp_light.schedules import B, Op

AHEAD = 2  # receives that are posted before anybody needs them


class Neighbour:
    """One end of all messages of a step between two stages.

    peer: the other end's global rank. sends: F or B, what this end sends. order: all messages by their planned time.
    Both ends post them in this order: with NCCL two ranks have one queue, and none may stand in it before the other
    gets to it. delivered: by microbatch received, how many of this end's messages its sender had received before it.
    buffer: makes a tensor to receive into.
    """

    def __init__(
        self,
        peer: int,
        group: Any,
        sends: str,
        order: Sequence[Op],
        delivered: Sequence[int],
        buffer: Callable[[], Tensor],
    ) -> None:
        self._peer, self._group, self._sends = peer, group, sends
        self._left, self._delivered, self._buffer = deque(order), delivered, buffer
        self._posted: dict[int, tuple[Tensor, Any]] = {}
        self._sent: deque[tuple[Tensor, Any]] = deque()
        self._gone = 0  # of those that were sent
        self._post_ahead()

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Begins to send a tensor, and keeps it until it has come."""
        while self._left[0] != (self._sends, microbatch):
            self._post()
        tensor = tensor.detach().contiguous()
        self._sent.append((tensor, dist.isend(tensor, self._peer, self._group, _tag(*self._left.popleft()))))
        self._post_ahead()

    def receive(self, microbatch: int) -> Tensor:
        """Waits for the message of a microbatch."""
        while microbatch not in self._posted:
            self._post()
        tensor, work = self._posted.pop(microbatch)
        work.wait()
        self._let_go(self._delivered[microbatch])
        self._post_ahead()
        return tensor

    def finish(self) -> None:
        """All messages have come, behind the last operation of a step."""
        assert not self._left, f"{self._left} are not sent and received"
        self._let_go(self._gone + len(self._sent))

    def _post_ahead(self) -> None:
        while len(self._posted) < AHEAD and self._left and self._left[0][0] != self._sends:
            self._post()

    def _post(self) -> None:
        kind, microbatch = self._left.popleft()
        assert kind != self._sends, f"{kind}{microbatch} is this end's to send: the order is not that of its row"
        tensor = self._buffer()
        self._posted[microbatch] = tensor, dist.irecv(tensor, self._peer, self._group, _tag(kind, microbatch))

    def _let_go(self, count: int) -> None:
        """Of the first so many, which have come: waiting for them takes no time."""
        while self._gone < count:
            self._sent.popleft()[1].wait()
            self._gone += 1


def _tag(kind: str, microbatch: int) -> int:
    return 2 * microbatch + (kind == B)
