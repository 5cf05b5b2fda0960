"""Activations and their gradients between a stage and one beside it: receives posted ahead, sends nobody waits for."""

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

    peer: the other end's global rank. order: all messages by their planned time, the same at both ends, which post them
    in this order: with NCCL the messages of two ranks have one queue, and an end must not stand in it before the other
    gets to it. sends: F or B, this end's. delivered: by microbatch received, how many of this end's messages its
    sender had received before. buffer: a tensor to receive into.
    """

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        order: Sequence[Op],
        sends: str,
        delivered: Sequence[int],
        buffer: Callable[[], Tensor],
    ) -> None:
        self._peer, self._group, self._order, self._sends = peer, group, order, sends
        self._delivered, self._buffer = delivered, buffer
        self._place = 0  # in the order: what is posted next
        self._posted: dict[int, tuple[Tensor, Any]] = {}
        self._sent: deque[tuple[Tensor, Any]] = deque()
        self._released = 0
        self._post_ahead()

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Begins to send a tensor, which stays as it is until it has come."""
        self._post_until((self._sends, microbatch))
        self._place += 1
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._peer, group=self._group, tag=self._tag(self._sends, microbatch))
        self._sent.append((tensor, work))
        self._post_ahead()

    def receive(self, microbatch: int) -> Tensor:
        """Waits for the message of a microbatch."""
        while microbatch not in self._posted:
            self._post()
        tensor, work = self._posted.pop(microbatch)
        work.wait()
        self._release(self._delivered[microbatch])
        self._post_ahead()
        return tensor

    def finish(self) -> None:
        """All messages have come, behind the last operation of a step."""
        assert self._place == len(self._order), (self._place, len(self._order))
        self._release(self._released + len(self._sent))

    def _post_ahead(self) -> None:
        while (
            len(self._posted) < AHEAD
            and self._place < len(self._order)
            and self._order[self._place][0] != self._sends
        ):
            self._post()

    def _post_until(self, message: Op) -> None:
        while self._order[self._place] != message:
            self._post()

    def _post(self) -> None:
        kind, microbatch = self._order[self._place]
        assert kind != self._sends, (
            kind,
            microbatch,
            "is sent by this end: the plan's order is not that of its times",
        )
        self._place += 1
        tensor = self._buffer()
        work = dist.irecv(tensor, self._peer, group=self._group, tag=self._tag(kind, microbatch))
        self._posted[microbatch] = tensor, work

    def _release(self, count: int) -> None:
        """Lets go of the first so many messages, which have come: waiting for them takes no time."""
        while self._released < count:
            _, work = self._sent.popleft()
            work.wait()
            self._released += 1

    @staticmethod
    def _tag(kind: str, microbatch: int) -> int:
        return 2 * microbatch + (kind == B)
