"""A peer died or stays silent: the error that says so, and how it is told from our own mistakes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.transport.parallel_state import Group

# What backends and stores say when a peer is gone or silent, as against a call with wrong shapes or types.
_LOST = re.compile(
    r"connection|timed? ?out|peer|socket|broken pipe|remote process|monitoredBarrier|aborted", re.IGNORECASE
)
# A port that is taken is this machine's trouble: no peer is to blame, and torch's text names the port.
_OWN = re.compile(r"EADDRINUSE|failed to (listen|bind)", re.IGNORECASE)


@dataclasses.dataclass(eq=False)
class PeerLostError(RuntimeError):
    """A peer died or stayed silent for longer than the timeout: this rank cannot go on (exit status 6).

    op, purpose: the call and the group it was made on. rank: the one that tells. peer: the lost one, where the
    call has only one. where: what the rank was doing, see `at`.
    """

    status = 6

    op: str
    purpose: str
    ranks: tuple[int, ...]
    rank: int
    elapsed_s: float
    detail: str
    peer: int | None = dataclasses.field(default=None, kw_only=True)
    where: str = dataclasses.field(default="", kw_only=True)

    def __str__(self) -> str:
        lost, ranks = "a peer" if self.peer is None else f"rank {self.peer}", str(list(self.ranks))
        if len(self.ranks) > 16:
            first = ", ".join(map(str, self.ranks[:8]))
            ranks = f"[{first}, ... {self.ranks[-1]}], {len(self.ranks)} in all"
        return (
            f"rank {self.rank}: {self.where + ': ' if self.where else ''}lost {lost} in {self.op} over group "
            f"{self.purpose!r} (ranks {ranks}) after {self.elapsed_s:.1f} s: {self.detail}"
        )

    def at(self, where: str) -> PeerLostError:
        """The same loss, told with where it hit, such as "stage 1, iteration 3, 1RECV_F5".

        An outer `where` goes in front of an inner one. `raise error.at(where) from error`.
        """
        return dataclasses.replace(self, where=f"{where}: {self.where}" if self.where else where)


@contextlib.contextmanager
def peer_loss_named(
    op: str, purpose: str, ranks: tuple[int, ...], rank: int, *, peer: int | None = None
) -> Iterator[None]:
    """PeerLostError where a peer is to blame; any other error (a wrong shape or type is our own) passes.

    ranks: those of the group. rank: this one's number in the world.
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        detail = _first_line(str(error))
        raise PeerLostError(op, purpose, ranks, rank, time.monotonic() - began, detail, peer=peer) from error


def blame(error: RuntimeError, op: str, group: Group, started: float, peer: int | None = None) -> NoReturn:
    """Raise the error of a call on a group: as PeerLostError where a peer is to blame. By hand, in an `except`, where a
    context manager around every call would cost too much. started: when the call began, by `time.monotonic`."""
    if not _is_loss(error):
        raise error
    me, elapsed_s = group.ranks[group.rank], time.monotonic() - started
    detail = _first_line(str(error))
    raise PeerLostError(op, group.purpose, group.ranks, me, elapsed_s, detail, peer=peer) from error


def _is_loss(error: RuntimeError) -> bool:
    """A peer is to blame, and it was not said yet."""
    text = str(error)
    ours = isinstance(error, PeerLostError) or _OWN.search(text) is not None
    return not ours and (isinstance(error, dist.DistError) or _LOST.search(text) is not None)


def _first_line(text: str) -> str:
    """The message without the C++ stack, and without the source positions that backends put into it."""
    line = text.strip().splitlines()[0] if text.strip() else "no message"
    line = line.partition(" This is typically caused by ")[0]  # gloo's advice to itself
    line = re.sub(r"\[[^\]]*\.(cc|cpp|h|hpp):\d+\]:?\s*", "", line)
    return re.sub(r"^\[[^\]]*\]:?\s*", "", line)
