"""How the executor moves tensors between the ranks of a pipeline: what it asks of a transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from megatron.core.pipeline_parallel.plan.ir import RawOp
from megatron.core.pipeline_parallel.plan.send_completion import Key

Message = tuple[RawOp, Tensor | None]  # a SEND_* with what it sends, or a RECV_*


class Arrival(Protocol):
    """A message that was posted to be received."""

    def wait(self) -> Tensor:
        """The tensor, once it is there. Called once."""


class Channel(Protocol):
    """A transport between the places of one pipeline."""

    def post(self, messages: Sequence[Message]) -> list[Arrival]:
        """Start a batch of transfers, in the order of the plan; an `Arrival` for each receive among them.

        A sent tensor belongs to the channel from now on, and nobody writes to it.
        """

    def release(self, sends: Iterable[Key]) -> None:
        """These sends are complete, something that arrived proves it: nothing of them need be kept beyond the next
        `post`. The channel may know already."""

    def drain(self) -> None:
        """After the step's last operation: return once every send is complete."""
