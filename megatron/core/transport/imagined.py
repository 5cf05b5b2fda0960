"""An imagined world: the ranks of one copy of a model in one process, with groups of any size and no communicator.

Whatever is built for a rank of a world of thousands is built by the code that builds it there, on tensors without
memory (`Device.imagined`). Collectives give shapes and are counted (`pending.Call`). Only what ranks tell each other
from host to host has to be true, such as which regions of which parameters they hold: so all ranks of one copy of the
model run, each in a thread, and wait for each other there. Ranks of other copies say what theirs say.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megatron.core.device import Device, imagining
from megatron.core.transport.parallel_state import Group, ParallelState, imagined_state
from megatron.core.transport.rank_grid import PURPOSES, WorldPart

_T = TypeVar("_T")
_OF_A_COPY = [purpose for purpose in PURPOSES if purpose.name in ("mp", "expert_mp")]
_Meeting = tuple[str, tuple[int, ...], int]  # purpose, ranks, how many there were before


class WorldEndedError(Exception):
    """Another rank of an imagined world has failed, or has left while somebody waited for it."""


class ImaginedWorld:
    """`ImaginedPeers` of all ranks that share a copy of the model with `rank`, dense layers and experts.

    part: the whole world. device: what every rank computes on. Raises RankGridError where its grids do not fit.
    """

    def __init__(self, part: WorldPart, device: Device, *, rank: int = 0) -> None:
        assert device.imagined, f"ranks of an imagined world on {device}"
        self._part, self.device = part, device
        self.ranks = _of_a_copy(part, rank)
        self._speakers = {self._places(one): one for one in reversed(self.ranks)}
        self._calls: Counter[tuple[int, str]] = Counter()
        self._told: dict[_Meeting, dict[int, bytes]] = {}
        self._left: set[int] = set()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, body: Callable[[ParallelState], _T]) -> dict[int, _T]:
        """What `body` returns on each rank, by rank. Raises what the first rank to fail has raised."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            each = [pool.submit(contextvars.copy_context().run, self._run, body, rank) for rank in self.ranks]
        if self._failure is not None:
            raise self._failure
        return dict(zip(self.ranks, (one.result() for one in each), strict=True))

    def state(self, rank: int) -> ParallelState:
        """Of one of its ranks."""
        return imagined_state(self._part, rank, self.device, self)

    def _run(self, body: Callable[[ParallelState], _T], rank: int) -> _T:
        try:
            with imagining(self.device):
                return body(self.state(rank))
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            with self._changed:
                self._left.add(rank)
                self._changed.notify_all()

    def all_gather(self, data: bytes, group: Group) -> list[bytes]:
        """`ImaginedPeers`. Raises WorldEndedError."""
        own = group.ranks[group.rank]
        speakers = [self._speaker(rank) for rank in group.ranks]
        with self._changed:
            meeting = (group.purpose, group.ranks, self._calls[own, group.purpose])
            self._calls[own, group.purpose] += 1
            told = self._told.setdefault(meeting, {})
            told[own] = data
            self._changed.notify_all()
            while missing := set(speakers).difference(told):
                if self._failure is not None or missing & self._left:
                    raise WorldEndedError(
                        f"{group.purpose}: rank {own} waits for ranks {sorted(missing)}"
                    ) from self._failure
                self._changed.wait()
        return [told[rank] for rank in speakers]

    def _speaker(self, rank: int) -> int:
        """Who says what a rank says."""
        return self._speakers[self._places(rank)]

    def _places(self, rank: int) -> tuple[int, ...]:
        """Which part of the model a rank holds."""
        dense, experts = self._part.grid, self._part.experts or self._part.grid
        of_dense, of_experts = dense.coordinates(rank), experts.coordinates(rank)
        return of_dense["pp"], of_dense["tp"], of_experts["tp"], of_experts["ep"]


def _of_a_copy(part: WorldPart, rank: int) -> tuple[int, ...]:
    """Ranks that hold, in every combination, the parts of a model."""
    found, new = set[int](), {rank}
    while new:
        found |= new
        new = {
            other for one in new for purpose in _OF_A_COPY for other in part.own_ranks(purpose, one)
        } - found
    return tuple(sorted(found))
