"""Activations and gradients between a stage and one beside it: receives posted ahead, sends nobody waits for."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp_light.schedules import Message


class Neighbour:
    """One end of all messages of a step between two stages.

    peer: the other end's global rank. sends: F or B, what this end sends. order: all messages by their planned time.
    Both ends post them in this order: with NCCL two ranks have one queue, and none may stand in it before the other
    gets to it. So whoever sends a message has posted the receives of all before it: once it has come, waiting for what
    this end sent before it takes no longer than bytes take, and its memory is free. buffer: shape, type, device of one.
    """

    def __init__(
        self, peer: int, group: dist.ProcessGroup, sends: str, order: Sequence[Message],
        buffer: tuple[torch.Size, torch.dtype, torch.device],
    ) -> None:  # fmt: skip
        self._peer, self._group, self._sends = peer, group, sends
        self._left, self._buffer = deque(order), buffer
        self._sent: list[tuple[Tensor, Any]] = []  # since the last receive was posted
        self._posted: dict[int, list[tuple[Tensor, Any]]] = {}  # by microbatch: a receive, and what was sent before

    def expect(self, time: int) -> None:
        """Posts the receives of all that is planned to be sent by then."""
        while self._left and self._left[0][0] <= time and self._left[0][1] != self._sends:
            self._post()

    def send(self, microbatch: int, tensor: Tensor) -> None:
        """Begins to send a tensor, and keeps it until it has gone."""
        shape, dtype, _ = self._buffer
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ValueError(
                f"zbpp_light: a stage has {tuple(tensor.shape)} of {tensor.dtype} for the next one, which receives "
                f"{tuple(shape)} of {dtype} (pipeline_dtype)"
            )
        while self._left[0][1:] != (self._sends, microbatch):
            self._post()
        self._left.popleft()
        tensor = tensor.detach().contiguous()
        self._sent.append((tensor, dist.isend(tensor, self._peer, self._group, microbatch)))

    def receive(self, microbatch: int) -> Tensor:
        """Waits for the message of a microbatch."""
        while microbatch not in self._posted:
            self._post()
        both_ways = self._posted.pop(microbatch)
        for _, work in both_ways:
            work.wait()
        return both_ways[0][0]

    def finish(self) -> None:
        """All messages have come, behind the last operation of a step."""
        assert not self._left, f"{self._left} are not sent and received"
        for _, work in self._sent:
            work.wait()

    def _post(self) -> None:
        _, kind, microbatch = self._left.popleft()
        assert kind != self._sends, f"{kind}{microbatch} is this end's to send: the order is not that of its row"
        shape, dtype, device = self._buffer
        tensor = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(tensor, self._peer, self._group, microbatch)
        self._posted[microbatch], self._sent = [(tensor, work), *self._sent], []
