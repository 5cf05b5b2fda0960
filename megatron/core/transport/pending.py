"""A collective or a message under way, and how each begins: counted, observed, and its errors told by name."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor

from megatron.core.transport.peer_loss import blame

if TYPE_CHECKING:
    from megatron.core.transport.gloo_pairs import Works
    from megatron.core.transport.parallel_state import Group
    from megatron.core.transport.shm_messages import Arriving
    from megatron.core.transport.shm_transport import Operation

    Running: TypeAlias = dist.Work | Works | Operation | Arriving | "Imagined"
    # What starts it, what is to be done once the data has arrived, temporaries.
    Prepared: TypeAlias = tuple[Callable[[], Running], Callable[[], None] | None, tuple[Tensor, ...]]


class Imagined:
    """In place of what a backend has under way, in a group that talks to nobody: there is nothing to wait for. known:
    whether one may ask if it is through; of messages that is known, as on gloo, once they were waited for."""

    def __init__(self, known: bool) -> None:
        self._known = known

    def is_completed(self) -> bool:
        return self._known

    def wait(self) -> None:
        pass


ARRIVED, UNDER_WAY = Imagined(True), Imagined(False)


@dataclasses.dataclass(eq=False)
class Pending:
    """A collective under way. `wait()` completes it (once; later calls do nothing).

    work: None where there was nothing to do. buffers: tensors in use until then. finish: what is left to do once the
    data has arrived. peer: the world rank of the other end, of a point to point message. temporary_bytes: of buffers
    that are neither the caller's input nor output, so every one of these under way takes memory of its own.
    """

    op: str
    group: Group
    work: Running | None = None
    buffers: tuple[Tensor, ...] = ()
    finish: Callable[[], None] | None = None
    peer: int | None = None
    temporary_bytes: int = 0
    started: float = dataclasses.field(default_factory=time.monotonic)

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once, or raise. gloo says so of what was waited for, and of nothing else."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            finish, self.finish = self.finish, None  # never on what has not arrived
            try:
                self.group.traffic.wait_for(work.wait)
            except RuntimeError as error:
                blame(error, self.op, self.group, self.started, self.peer)
            if finish is not None:
                finish()
        self.buffers = ()


class Call(NamedTuple):
    """A collective that may be called many times. prepare: takes memory, and returns what starts it: in an imagined
    world nothing is started, all else is done. payload_bytes: what it counts as; 0 where that was counted."""

    op: str
    group: Group
    prepare: Callable[[], Prepared]
    buffers: tuple[Tensor, ...]
    payload_bytes: int = 0

    def launch(self, async_op: bool, over: Group | None = None) -> Pending:
        op, group, prepare, buffers, payload_bytes = self
        assert over in (None, group), f"{op} kept for {group.purpose}, called over {over}"
        if payload_bytes:
            group.traffic.count(op, payload_bytes)
        group.tell(op)
        started = time.monotonic()
        try:
            start, finish, temporaries = prepare()
            if group.peers is None:
                work = start()
            else:
                group.peers.fill(self, temporaries)
                work = ARRIVED
        except RuntimeError as error:
            blame(error, op, group, started)
        pending = Pending(op, group, work, buffers + temporaries, finish)
        if temporaries:
            pending.temporary_bytes = sum(tensor.nbytes for tensor in temporaries)
        if not async_op:
            pending.wait()
        return pending


class Kept(list[tuple[Tensor, Tensor]]):
    """Items that are gathered, or reduced, again and again over one group. `all_gather_units` and
    `reduce_scatter_units` (with one `accumulate` for all) make their checks and views in the first call only: with cold
    caches a view takes as long as the copy of many kB. Storages may be without memory between two calls.
    """

    def __init__(self, items: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__(items)
        # Gathers: None; reductions: whether they accumulate.
        self.calls: dict[bool | None, Call] = {}
