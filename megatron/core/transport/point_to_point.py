"""Messages from rank to rank: batches of them, and routes, which carry many one after the other.

Raises and calls are those of `collectives`: a lost peer is a `PeerLostError` that names the other end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from megatron.core.transport.peer_loss import blame
from megatron.core.transport.pending import Pending

if TYPE_CHECKING:
    from megatron.core.transport.parallel_state import Group
    from megatron.core.transport.pending import Running

_TAG = 0  # not those of gloo_pairs and shm_messages: none must be taken for another


class P2PRoute:
    """Messages from this rank to one other of a gloo group, or from it. What is the same for every message is done
    once: between two computations of a pipeline the caches are cold and every line of Python costs. torch's batches
    took 120-270 us a message, this takes 20-50.

    op: "send" or "receive". place: of the other end in the group. tag: messages of one tag arrive in order.
    """

    def __init__(self, op: str, place: int, group: Group, tag: int = _TAG) -> None:
        self._described = described(op, place, group)
        assert group.backend == "gloo", f"{group.purpose!r} is on {group.backend}"
        self._op, self._place, self._peer, self._group, self._tag = op, place, group.ranks[place], group, tag
        if (talk := group.process_group) is not None:
            self._begin = {"send": talk.send, "receive": talk.recv}[op]
        else:
            assert group.peers is not None, f"{group.purpose!r} is a group of one"

    def start(self, tensor: Tensor) -> Pending:
        """Send it, or receive into it; contiguous. Raises PeerLostError, which names the other end."""
        if self._group.observer is not None:
            self._group.observer(*self._described)
        try:
            if self._group.peers is not None:
                work: Running = self._group.peers.message(self._op, tensor, self._group, self._place)
            else:
                work = self._begin([tensor], self._place, self._tag)
        except RuntimeError as error:
            blame(error, self._op, self._group, time.monotonic(), self._peer)
        return Pending(self._op, self._group, work, (tensor,), peer=self._peer)


def send_receive(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group
) -> tuple[list[Pending], list[Pending]]:
    """Start one batch of point to point messages; a `Pending` for each send and for each receive.

    A message is (contiguous tensor, the other end's place in the group). Returns at once: whoever reads a
    received tensor waits for it first, and a sent tensor is not written before its send was waited for. gloo
    never buffers: a send ends only once its receive is posted. Between two ranks, messages of one direction
    arrive in the order in which they were started, whichever batch they were in; one end may batch what the
    other does not. Groups of different purposes are independent of each other.

    On NCCL a batch is one operation: all its messages have to arrive before any of its `wait()`s lets the
    current stream go on; gloo has no batches. Raises PeerLostError, which names the other end.
    """
    messages = [("send", *one) for one in sends] + [("receive", *one) for one in receives]
    for op, tensor, _ in messages:
        assert tensor.is_contiguous(), f"{op}: strides {tensor.stride()} of shape {tuple(tensor.shape)}"
    if group.backend == "gloo":
        pending = [P2PRoute(op, place, group).start(tensor) for op, tensor, place in messages]
    else:
        pending = _start_batch(messages, group) if messages else []
    return pending[: len(sends)], pending[len(sends) :]


def _start_batch(messages: Sequence[tuple[str, Tensor, int]], group: Group) -> list[Pending]:
    """All messages as one operation of the backend."""
    for told in [described(op, place, group) for op, _, place in messages]:
        if group.observer is not None:
            group.observer(*told)
    if group.peers is not None:
        return [
            Pending(
                op, group, group.peers.message(op, tensor, group, place), (tensor,), peer=group.ranks[place]
            )
            for op, tensor, place in messages
        ]
    calls = {"send": dist.isend, "receive": dist.irecv}
    operations = [
        dist.P2POp(calls[op], tensor, group=group.process_group, group_peer=place)
        for op, tensor, place in messages
    ]
    peers = [group.ranks[place] for _, _, place in messages]
    started = time.monotonic()
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:
        blame(error, "send_receive", group, started, peers[0] if len(set(peers)) == 1 else None)
    if len(works) == 1:  # NCCL: one work for the batch; each `wait()` makes its own stream wait for it
        works = works * len(messages)
    return [
        Pending(op, group, work, (tensor,), peer=peer)
        for (op, tensor, _), work, peer in zip(messages, works, peers, strict=True)
    ]


def described(op: str, place: int, group: Group) -> tuple[str, str, tuple[int, ...]]:
    """What the observer hears of a message: the pair and direction, not the whole group; its two ends then count the
    same messages."""
    assert op in ("send", "receive"), op
    assert 0 <= place < group.size, f"place {place} of {group.size} in {group.purpose!r}"
    assert place != group.rank, f"{op} of rank {group.ranks[place]} to itself in {group.purpose!r}"
    ends = (group.ranks[group.rank], group.ranks[place])
    source, target = ends if op == "send" else ends[::-1]
    return op, f"{group.purpose} {source}->{target}", tuple(sorted(ends))
