"""Every collective, named. The only module that calls torch.distributed's collectives.

Each takes a `Group` of the parallel state (never a bare process group), does nothing over a group of one, and
turns the loss of a peer into `PeerLostError`, which says which call, which purpose, which rank and after how
long. `async_op=True` returns a `Pending`; its result exists only after `wait()`, and it keeps the buffers
alive until then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Group
from megatron.core.peer_loss import peer_loss_named

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed it and warns about the old name; both take (output, input, group, async_op).
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_all_gather_flat = dist.all_gather_single if _TORCH >= (2, 13) else dist.all_gather_into_tensor
_reduce_scatter_flat = dist.reduce_scatter_single if _TORCH >= (2, 13) else dist.reduce_scatter_tensor


class Pending:
    """A collective under way. `wait()` completes it (once; later calls do nothing).

    buffers: tensors in use until then. finish: what is left to do once the data has arrived. peer: the world
    rank of the other end, of a point to point message. holds_temporary: one of the buffers is neither the caller's
    input nor output, so every one of these under way takes memory of its own.
    """

    def __init__(
        self,
        op: str,
        group: Group,
        work: dist.Work | None,
        buffers: tuple[Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
        peer: int | None = None,
        *,
        holds_temporary: bool = False,
    ) -> None:
        self.holds_temporary = holds_temporary
        self._op = op
        self._group = group
        self._work = work
        self._buffers = buffers
        self._finish = finish
        self._peer = peer
        self._started = time.monotonic()

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once, or raise. gloo says so of what was waited for, and of nothing else."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with _peer_loss_named(self._op, self._group, self._started, self._peer):
                work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        self._buffers = ()


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", *, async_op: bool = False) -> Pending:
    """tensor <- sum, max or min over the group, in place."""
    if group.size == 1:
        return _done("all_reduce", group)
    return _launch(
        "all_reduce",
        group,
        async_op,
        lambda: dist.all_reduce(tensor, _OPS[op], group.process_group, async_op=True),
        (tensor,),
    )


def all_gather(output: Tensor, input: Tensor, group: Group, *, async_op: bool = False) -> Pending:
    """output [size * n] <- every rank's input [n], in group order. `input` may be a slice of `output`."""
    assert output.numel() == group.size * input.numel(), f"{output.shape} != {group.size} x {input.shape}"
    if group.size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input.view_as(output))
        return _done("all_gather", group)
    return _launch(
        "all_gather",
        group,
        async_op,
        lambda: _all_gather_flat(output.view(-1), input.view(-1), group=group.process_group, async_op=True),
        (output, input),
    )


def reduce_scatter(output: Tensor, input: Tensor, group: Group, *, async_op: bool = False) -> Pending:
    """output [n] <- this rank's slice of the sum of every rank's input [size * n].

    gloo's own is a hidden all-reduce at twice the CPU time, so there it is an all-to-all and a local sum: in
    rank order (same bits on every run), in fp32 for 16-bit inputs. `output` may be this rank's slice of
    `input`.
    """
    assert input.numel() == group.size * output.numel(), f"{input.shape} != {group.size} x {output.shape}"
    if group.size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input.view_as(output))
        return _done("reduce_scatter", group)
    if group.backend != "gloo":
        return _launch(
            "reduce_scatter",
            group,
            async_op,
            lambda: _reduce_scatter_flat(
                output.view(-1), input.view(-1), group=group.process_group, async_op=True
            ),
            (output, input),
        )
    received = torch.empty(group.size, output.numel(), dtype=input.dtype, device=input.device)
    return _launch(
        "reduce_scatter",
        group,
        async_op,
        lambda: dist.all_to_all_single(
            received.view(-1), input.view(-1), group=group.process_group, async_op=True
        ),
        (received, input, output),
        finish=lambda: sum_in_rank_order(received, output),
        holds_temporary=True,
    )


def sum_in_rank_order(parts: Tensor, output: Tensor) -> None:
    """output [n] <- parts [ranks, n] added from the first to the last, 16-bit parts in fp32."""
    if parts.element_size() >= 4 and output.dtype == parts.dtype:
        total = output.view(-1).copy_(parts[0])
    else:
        total = parts[0].to(torch.float32 if parts.element_size() < 4 else parts.dtype)
    for part in parts[1:]:
        total.add_(part)
    if total.data_ptr() != output.data_ptr():
        output.view(-1).copy_(total)


def sum_gradients(bucket: Tensor, group: Group) -> Pending:
    """bucket <- its sum over the group, in place, always asynchronous. Its size is a multiple of the group's.

    On gloo the sum runs in rank order, in fp32 at least: see [Note: sums in rank order] in
    distributed/distributed_data_parallel. It receives beside the bucket (`holds_temporary`), and its second half
    (gathering the sums) is issued by `wait()`, so waits on several must come in the same order on all ranks.
    """
    order_free = group.size == 2 and bucket.element_size() >= 4  # a sum of two has one order
    if group.size == 1 or group.backend != "gloo" or order_free:
        return all_reduce(bucket, group, async_op=True)
    share = bucket.view(group.size, -1)[group.rank]
    received = torch.empty_like(bucket)

    def gather_sums() -> None:
        sum_in_rank_order(received.view(group.size, -1), share)
        all_gather(bucket, share, group)

    return _launch(
        "sum_gradients",
        group,
        True,
        lambda: dist.all_to_all_single(received, bucket, group=group.process_group, async_op=True),
        (received, bucket),
        finish=gather_sums,
        holds_temporary=True,
    )


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, async_op: bool = False) -> Pending:
    """tensor <- that of the group's rank `source`, in place."""
    if group.size == 1:
        return _done("broadcast", group)
    return _launch(
        "broadcast",
        group,
        async_op,
        lambda: dist.broadcast(tensor, group=group.process_group, group_src=source, async_op=True),
        (tensor,),
    )


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
    current stream go on. Raises PeerLostError, which names the other end.
    """
    if group.backend == "gloo":
        return (
            [_start_message("send", tensor, place, group) for tensor, place in sends],
            [_start_message("receive", tensor, place, group) for tensor, place in receives],
        )
    return _start_batch(sends, receives, group)


def _start_message(op: str, tensor: Tensor, place: int, group: Group) -> Pending:
    """One message by itself: gloo has no batches. The shortest way to its backend: between two computations of a
    pipeline nothing is in the caches, and torch's batch took 120-270 us a message where this takes 50-100."""
    peer = _other_end(op, tensor, place, group)
    assert group.process_group is not None, f"{group.purpose!r} is a group of one"
    start = group.process_group.send if op == "send" else group.process_group.recv
    with _peer_loss_named(op, group, time.monotonic(), peer):
        work = start([tensor], place, 0)
    return Pending(op, group, work, (tensor,), peer=peer)


def _start_batch(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group
) -> tuple[list[Pending], list[Pending]]:
    """All messages as one operation of the backend."""
    messages = [("send", *one) for one in sends] + [("receive", *one) for one in receives]
    if not messages:
        return [], []
    peers = [_other_end(op, tensor, place, group) for op, tensor, place in messages]
    operations = [
        dist.P2POp(
            dist.isend if op == "send" else dist.irecv, tensor, group=group.process_group, group_peer=place
        )
        for op, tensor, place in messages
    ]
    only = peers[0] if len(set(peers)) == 1 else None
    with _peer_loss_named("send_receive", group, time.monotonic(), only):
        works = dist.batch_isend_irecv(operations)
    if len(works) == 1:  # NCCL: one work for the batch; each `wait()` makes its own stream wait for it
        works = works * len(messages)
    assert len(works) == len(messages), f"{len(works)} works for {len(messages)} messages"
    pending = [
        Pending(op, group, work, (tensor,), peer=peer)
        for (op, tensor, _), work, peer in zip(messages, works, peers, strict=True)
    ]
    return pending[: len(sends)], pending[len(sends) :]


def _other_end(op: str, tensor: Tensor, place: int, group: Group) -> int:
    """The world rank of a message's other end; the observer is told of the message."""
    assert 0 <= place < group.size, f"place {place} of {group.size} in {group.purpose!r}"
    assert place != group.rank, f"{op} of rank {group.ranks[place]} to itself in {group.purpose!r}"
    assert tensor.is_contiguous(), f"{op}: strides {tensor.stride()} of shape {tuple(tensor.shape)}"
    if group.observer is not None:
        # The pair and direction, not the whole group: its two ends then count the same messages.
        ends = (group.ranks[group.rank], group.ranks[place])
        source, target = ends if op == "send" else ends[::-1]
        group.observer(op, f"{group.purpose} {source}->{target}", tuple(sorted(ends)))
    return group.ranks[place]


def barrier(group: Group) -> None:
    """Wait for every rank of the group. On gloo the error names the ranks that did not come.

    Raises PeerLostError.
    """
    if group.size == 1:
        return
    _observe("barrier", group)
    with _peer_loss_named("barrier", group, time.monotonic()):
        if group.backend == "gloo":
            dist.monitored_barrier(group.process_group, group.timeout, wait_all_ranks=True)
        else:
            dist.barrier(group.process_group)


def _launch(
    op: str,
    group: Group,
    async_op: bool,
    call: Callable[[], dist.Work],
    buffers: tuple[Tensor, ...],
    finish: Callable[[], None] | None = None,
    *,
    holds_temporary: bool = False,
) -> Pending:
    _observe(op, group)
    with _peer_loss_named(op, group, time.monotonic()):
        work = call()
    pending = Pending(op, group, work, buffers, finish, holds_temporary=holds_temporary)
    if not async_op:
        pending.wait()
    return pending


def _observe(op: str, group: Group) -> None:
    if group.observer is not None:
        group.observer(op, group.purpose, group.ranks)


def _done(op: str, group: Group) -> Pending:
    return Pending(op, group, None)


def _peer_loss_named(
    op: str, group: Group, started: float, peer: int | None = None
) -> contextlib.AbstractContextManager[None]:
    me = group.ranks[group.rank]
    return peer_loss_named(op, group.purpose, group.ranks, me, started=started, peer=peer)
