"""Messages between pairs of ranks on gloo: all-gather and exchange out of them, which collectives.py does with nothing
else, and the lines of a pipeline's routes.

gloo's own collectives send each rank's own slice through the loopback too, or go round a ring. All calls return at
once; what they were given belongs to them until `wait()`. Messages of one kind between two ranks arrive in the order
of their start, so several of a kind may be under way in one order on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist
from torch import Tensor

from megatron.core.peer_loss import peer_loss_named

if TYPE_CHECKING:
    from megatron.core.parallel_state import Group

# Messages of two kinds must not be taken for each other. Those of a line are collectives.send_receive's: both ends of a
# route begin with that.
_MESSAGE_TAG, _GATHER_TAG, _EXCHANGE_TAG = 0, 1, 2


class Works:
    """Several works of a backend that end as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def gather_in_pairs(pairs: Sequence[tuple[Tensor, Tensor]], talk: dist.ProcessGroup) -> Works:
    """Of each (output [size, n], input [n]): input into its row on every other rank; the own row is left alone.

    CPU ms a rank, one thread, median of 14 to 60, fp32 (gloo's own -> this): 2 ranks, 1 MB 0.38 -> 0.20, 4 MB
    1.40 -> 0.86, 16 MB 5.9 -> 3.5; 4 ranks 0.77 -> 0.45, 2.28 -> 1.47, 7.5 -> 5.7.
    """
    works = []
    for source, _ in _others(talk):  # receives first: what a send finds posted leaves at once
        works += [talk.recv([output[source]], source, _GATHER_TAG) for output, _ in pairs]
    for _, target in _others(talk):
        works += [talk.send([input], target, _GATHER_TAG) for _, input in pairs]
    return Works(works)


def exchange_in_pairs(full: Sequence[Tensor], received: Sequence[Tensor], talk: dist.ProcessGroup) -> Works:
    """Rows to their owners: of each full [size, n], row r to rank r; what others send here into received
    [size - 1, n], in rank order without this one.

    CPU ms a rank, one thread, median of 14 to 60, fp32, the sum included (gloo's reduce-scatter, all-to-all ->
    this): 2 ranks, 1 MB 0.71, 0.39 -> 0.30, 4 MB 2.5, 1.52 -> 1.13, 16 MB 12.4, 6.3 -> 4.9; 4 ranks 1.40, 0.74 ->
    0.58, 4.3, 2.6 -> 2.2, 17.1, 10.3 -> 8.1. All-to-all with no own split, possible with 2 ranks: 0.31, 1.17, 4.5.
    """
    rank, works = talk.rank(), []
    for source, _ in _others(talk):
        row = source if source < rank else source - 1
        works += [talk.recv([box[row]], source, _EXCHANGE_TAG) for box in received]
    for _, target in _others(talk):
        works += [talk.send([one[target]], target, _EXCHANGE_TAG) for one in full]
    return Works(works)


def _others(talk: dist.ProcessGroup) -> list[tuple[int, int]]:
    """(from whom, to whom) at every distance: no rank is everybody's first."""
    rank, size = talk.rank(), talk.size()
    return [((rank - distance) % size, (rank + distance) % size) for distance in range(1, size)]


class Line:
    """Messages from this rank to one other of a gloo group, or from it: `collectives.send_receive` of single messages,
    with all that is the same for every message done once.

    Between two computations of a pipeline nothing is in the caches, and every line of Python costs: a message takes 50
    to 80 us less than there.

    op: "send" or "receive". place: of the other end in the group.
    """

    def __init__(self, op: str, place: int, group: Group) -> None:
        talk = group.process_group
        assert talk is not None, f"{group.purpose!r} is a group of one"
        assert group.backend == "gloo", f"{group.purpose!r} is on {group.backend}"
        assert op in ("send", "receive"), op
        assert 0 <= place < group.size, f"place {place} of {group.size} in {group.purpose!r}"
        assert place != group.rank, f"{op} of rank {group.ranks[place]} to itself in {group.purpose!r}"
        self._op, self._place, self._group = op, place, group
        self.traffic = group.traffic
        self._begin = talk.send if op == "send" else talk.recv
        ends = (group.ranks[group.rank], group.ranks[place])
        source, target = ends if op == "send" else ends[::-1]
        self._told = (op, f"{group.purpose} {source}->{target}", tuple(sorted(ends)))

    def start(self, tensor: Tensor) -> LineMessage:
        """Send it, or receive into it; contiguous. Raises PeerLostError, which names the other end."""
        if self._group.observer is not None:
            self._group.observer(*self._told)
        started = time.monotonic()
        try:
            return LineMessage(self, self._begin([tensor], self._place, _MESSAGE_TAG), tensor, started)
        except RuntimeError as error:
            self.blame(error, started)

    def blame(self, error: RuntimeError, started: float) -> NoReturn:
        """Raise it: as PeerLostError where the other end is to blame."""
        group = self._group
        me, peer = group.ranks[group.rank], group.ranks[self._place]
        with peer_loss_named(self._op, group.purpose, group.ranks, me, started=started, peer=peer):
            raise error
        raise AssertionError("not reached: an error passes or is told in other words")


class LineMessage:
    """A message of a line under way; its tensor is kept until it is dropped itself."""

    __slots__ = ("_line", "_started", "_work", "tensor")

    def __init__(self, line: Line, work: dist.Work, tensor: Tensor, started: float) -> None:
        self._line, self._work, self._started = line, work, started
        self.tensor = tensor

    def is_completed(self) -> bool:
        """gloo says so of what was waited for, and of nothing else."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Once. Raises PeerLostError."""
        traffic = self._line.traffic
        traffic.waits = True  # by hand: `waiting()` takes 2 us
        try:
            self._work.wait()
        except RuntimeError as error:
            self._line.blame(error, self._started)
        traffic.waits = False
