"""An imagined world: the ranks of one copy of a model in one process, with groups of any size and no communicator.

Whatever is built for a rank of a world of thousands is built by the code that builds it there, on tensors without
memory (`Device.imagined`). Collectives give shapes and are counted (`pending.Call`). Only what ranks tell each other
from host to host has to be true, such as which regions of which parameters they hold, or the shapes that stages hand
on: so all ranks of one copy of the model run, each in a thread, one at a time, and wait for each other there. Ranks of
other copies say what theirs say; later, in steps, tensor parallel ranks say what the first of them says.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from megatron.core.device import Device, imagining
from megatron.core.transport.parallel_state import Group, ParallelState, imagined_state
from megatron.core.transport.pending import UNDER_WAY, Call, Imagined
from megatron.core.transport.rank_grid import PURPOSES, WorldPart

_T = TypeVar("_T")
OF_A_COPY = [purpose for purpose in PURPOSES if purpose.name in ("mp", "expert_mp")]
_Meeting = tuple[str, tuple[int, ...], int]  # purpose, ranks, how many there were before
_Route = tuple[str, int, int]  # purpose, sender, receiver


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
        self._messages: defaultdict[_Route, deque[Tensor]] = defaultdict(deque)
        self._first_messages: dict[_Route, Tensor] = {}
        self._left: set[int] = set()
        self._failure: BaseException | None = None
        # Whose lock the rank that runs has: not all of torch's kernels without memory are for threads.
        self._changed = threading.Condition()
        self._speaking = functools.cache(self._speakers_for)

    def keep_one_a_stage(self) -> None:
        """From now on one rank of each pipeline stage runs, and speaks for all that have a part of it."""
        grid = self._part.grid
        first = {**grid.coordinates(self.ranks[0]), "tp": 0}
        self.ranks = tuple(grid.group("pp", grid.rank(first)))
        by_stage = {grid.coordinates(rank)["pp"]: rank for rank in self.ranks}
        self._speakers = {places: by_stage[places[0]] for places in self._speakers}
        self._speaking.cache_clear()

    def run(self, body: Callable[[ParallelState], _T]) -> dict[int, _T]:
        """What `body` returns on each rank, by rank. Raises what the first rank to fail has raised."""
        self._left.clear()
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
            with self._changed, imagining(self.device):
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
        speakers = self._speaking(group.ranks)
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

    def told(self, purpose: str, ranks: tuple[int, ...], number: int) -> list[bytes]:
        """What ranks of a copy have each said when they met for the so many-th time, before one spoke for others."""
        told = self._told[purpose, ranks, number]
        return [told[rank] for rank in ranks]

    def first_message(self, purpose: str, source: int, target: int) -> Tensor:
        """Of the host, between the ranks that speak for these."""
        source, target = self._speaking((source, target))
        return self._first_messages[purpose, source, target]

    def fill(self, call: Call, temporaries: tuple[Tensor, ...]) -> None:
        """`ImaginedPeers`."""

    def message(self, op: str, tensor: Tensor, group: Group, place: int) -> Imagined:
        """`ImaginedPeers`."""
        if tensor.is_meta:
            return UNDER_WAY
        ends = group.ranks[group.rank], group.ranks[place]
        if op == "receive":
            return _HostMessage(self, (group.purpose, *ends[::-1]), tensor)
        with self._changed:
            self._messages[group.purpose, *ends].append(message := tensor.clone())
            self._first_messages.setdefault((group.purpose, *ends), message)
            self._changed.notify_all()
        return UNDER_WAY

    def take(self, route: _Route) -> Tensor:
        """The next message. Raises WorldEndedError."""
        purpose, source, target = route
        with self._changed:
            while not self._messages[route]:
                if self._failure is not None or source in self._left:
                    raise WorldEndedError(f"{purpose}: rank {target} waits for {source}") from self._failure
                self._changed.wait()
            return self._messages[route].popleft()

    def _speakers_for(self, ranks: tuple[int, ...]) -> list[int]:
        """Who says what these ranks say."""
        return [self._speakers[self._places(rank)] for rank in ranks]

    def _places(self, rank: int) -> tuple[int, ...]:
        """Which part of the model a rank holds."""
        dense, experts = self._part.grid, self._part.experts or self._part.grid
        of_dense, of_experts = dense.coordinates(rank), experts.coordinates(rank)
        return of_dense["pp"], of_dense["tp"], of_experts["tp"], of_experts["ep"]


class _HostMessage(Imagined):
    """Of a message of the host. Waited for by whoever reads it."""

    def __init__(self, world: ImaginedWorld, route: _Route, tensor: Tensor) -> None:
        super().__init__(False)
        self._world, self._route, self._tensor = world, route, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._world.take(self._route))


def _of_a_copy(part: WorldPart, rank: int) -> tuple[int, ...]:
    """Ranks that hold, in every combination, the parts of a model."""
    groups = [{one: ranks for ranks in part.rank_lists(purpose) for one in ranks} for purpose in OF_A_COPY]
    found, new = set[int](), {rank}
    while new:
        found |= new
        new = {other for one in new for of_purpose in groups for other in of_purpose[one]} - found
    return tuple(sorted(found))
