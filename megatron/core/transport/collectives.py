"""Every collective, named. The only module that calls torch.distributed's collectives; `point_to_point` has messages.

Each takes a `Group` of the parallel state (never a bare process group), does nothing over a group of one, and
turns the loss of a peer into `PeerLostError`, which says which call, which purpose, which rank and after how
long. `async_op=True` returns a `Pending`; its result exists only after `wait()`, and it keeps the buffers
alive until then.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.transport.gloo_pairs import Works, exchange_in_pairs, gather_in_pairs
from megatron.core.transport.peer_loss import blame
from megatron.core.transport.pending import Call, Kept, Pending, done
from megatron.core.transport.rank_order import add_in_rank_order

if TYPE_CHECKING:
    from megatron.core.transport.parallel_state import Group, ParallelState  # uses these
    from megatron.core.transport.pending import Begun, Running
    from megatron.core.transport.shm_transport import ShmTransport

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed it and warns about the old name; both take (output, input, group, async_op).
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_all_gather_flat = dist.all_gather_single if _TORCH >= (2, 13) else dist.all_gather_into_tensor
_reduce_scatter_flat = dist.reduce_scatter_single if _TORCH >= (2, 13) else dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", *, async_op: bool = False) -> Pending:
    """tensor <- sum, max or min over the group, in place."""
    if group.size == 1:
        return done("all_reduce", group)

    def begin() -> Begun:
        return dist.all_reduce(tensor, _OPS[op], group.process_group, async_op=True), None, ()

    return Call("all_reduce", group, begin, (tensor,), tensor.nbytes).launch(async_op)


def all_gather(output: Tensor, input: Tensor, group: Group, *, async_op: bool = False) -> Pending:
    """output [size * n] <- every rank's input [n], in group order. `input` may be a slice of `output`."""
    return all_gather_units([(output, input)], group, async_op=async_op)


def all_gather_units(
    pairs: Sequence[tuple[Tensor, Tensor]], group: Group, *, async_op: bool = True
) -> Pending:
    """Several all-gathers in one call: of each (output, input), output [size * n] <- every rank's input [n].

    Types and sizes may differ from pair to pair, and are the same on all ranks; an `input` may be its own slice of
    its `output`. Nothing is copied or packed on the way. Neither is read or written by others before `wait()`.
    """
    if isinstance(pairs, Kept) and (kept := pairs.calls.get(None)) is not None:
        return kept.launch(async_op, group)
    for output, input in pairs:
        assert output.numel() == group.size * input.numel(), f"{output.shape} != {group.size} x {input.shape}"
        assert output.dtype == input.dtype, f"{output.dtype} gathered from {input.dtype}"
    flat = [(output.view(group.size, -1), input.view(-1)) for output, input in pairs if input.numel()]
    if group.size == 1 or not flat:
        for row, input in _own_rows(flat, 0):
            row.copy_(input)
        return done("all_gather", group)
    begin = (_gather_each if group.backend == "gloo" else _gather_at_once)(flat, group)
    payload = sum(output.nbytes for output, _ in flat)
    call = Call("all_gather", group, begin, _tensors(pairs), payload)
    if isinstance(pairs, Kept):
        pairs.calls[None] = call
    return call.launch(async_op)


def reduce_scatter(output: Tensor, input: Tensor, group: Group, *, async_op: bool = False) -> Pending:
    """output [n] <- this rank's slice of the sum of every rank's input [size * n].

    On gloo the sum runs in rank order, see `reduce_scatter_units`. `output` may be this rank's slice of `input`.
    """
    return reduce_scatter_units([(output, input)], group, accumulate=False, async_op=async_op)


def reduce_scatter_units(
    items: Sequence[tuple[Tensor, Tensor]],
    group: Group,
    *,
    accumulate: bool | Sequence[bool],
    async_op: bool = True,
) -> Pending:
    """Several reduce-scatters in one call: of each (shard [n], full [size * n]), shard <- this rank's slice of the
    sum over ranks of full; with `accumulate` (one for all, or one an item), shard <- shard + that sum.

    Values travel in full's type and end in shard's. `full` is only read, until `wait()`; a shard that does not
    accumulate may be its own slice of it. gloo's own reduce-scatter is a hidden all-reduce at more than twice the
    CPU time, so there ranks exchange their slices and each sums its own in rank order: 16-bit values in fp32, the
    same bits on every run. NCCL sums in full's type, in an order of its own.
    """
    one = accumulate if isinstance(accumulate, bool) else None
    if isinstance(items, Kept) and one is not None and (kept := items.calls.get(one)) is not None:
        return kept.launch(async_op, group)
    adds = [accumulate] * len(items) if isinstance(accumulate, bool) else list(accumulate)
    assert len(adds) == len(items), f"accumulate for {len(adds)} of {len(items)} items"
    for shard, full in items:
        assert full.numel() == group.size * shard.numel(), f"{full.shape} != {group.size} x {shard.shape}"
    parts = [
        _Part(shard if shard.dim() == 1 else shard.view(-1), full.view(group.size, -1), add)
        for (shard, full), add in zip(items, adds, strict=True)
        if shard.numel()
    ]
    if group.size == 1 or not parts:
        for part in parts:
            part.take(part.full[0])
        return done("reduce_scatter", group)
    payload = sum(part.full.nbytes for part in parts)
    call = Call("reduce_scatter", group, _reduce(parts, group), _tensors(items), payload)
    if isinstance(items, Kept) and one is not None:
        items.calls[one] = call
    return call.launch(async_op)


def sum_gradients(bucket: Tensor, group: Group) -> Pending:
    """bucket <- its sum over the group, in place, always asynchronous. Its size is a multiple of the group's.

    On gloo the sum runs in rank order, in fp32 at least: see [Note: sums in rank order] in
    distributed/distributed_data_parallel. It receives beside the bucket (`temporary_bytes`), and its second half
    (gathering the sums) is issued by `wait()`, so waits on several must come in the same order on all ranks.
    """
    parts = bucket.view(group.size, bucket.numel() // group.size)
    order_free = group.size == 2 and bucket.element_size() >= 4  # a sum of two has one order
    if group.size == 1 or group.backend != "gloo" or (order_free and not _on_host([parts[1:]], group)):
        return all_reduce(bucket, group, async_op=True)
    share = parts[group.rank]
    group.traffic.count("all_reduce", bucket.nbytes)
    reduce = _reduce([_Part(share, parts, False)], group)

    def begin() -> Begun:
        work, sum_parts, temporaries = reduce()

        def gather_sums() -> None:
            if sum_parts is not None:
                sum_parts()
            Call("all_gather", group, _gather_each([(parts, share)], group), (bucket,)).launch(False)

        return work, gather_sums, temporaries

    return Call("sum_gradients", group, begin, (bucket,)).launch(True)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One item of a reduce-scatter: shard [n] (+)= sums of full [size, n]."""

    shard: Tensor
    full: Tensor
    accumulate: bool

    def take(self, total: Tensor) -> None:
        """The sum has arrived."""
        if self.accumulate:
            self.shard.add_(total)
        elif self.shard.data_ptr() != total.data_ptr():
            self.shard.copy_(total)


def _tensors(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(tensor for item in items for tensor in item)


def _own_rows(flat: Sequence[tuple[Tensor, Tensor]], rank: int) -> list[tuple[Tensor, Tensor]]:
    """(row, input): of outputs that their inputs are no part of."""
    rows = [(output[rank], input) for output, input in flat]
    return [(row, input) for row, input in rows if row.data_ptr() != input.data_ptr()]


def _gather_each(flat: Sequence[tuple[Tensor, Tensor]], group: Group) -> Callable[[], Begun]:
    """All-gather on gloo."""
    if host := _on_host([input for _, input in flat], group):
        call = host.all_gather(flat)
        return lambda: (call(), None, ())
    own = _own_rows(flat, group.rank)

    def begin() -> Begun:
        work = gather_in_pairs(flat, _process_group(group))
        for row, input in own:
            row.copy_(input)
        return work, None, ()

    return begin


def _gather_at_once(flat: Sequence[tuple[Tensor, Tensor]], group: Group) -> Callable[[], Begun]:
    """All-gather by the backend; several as bytes, since one of its calls takes one type."""
    as_bytes = [(output.view(-1).view(torch.uint8), input.view(torch.uint8)) for output, input in flat]

    def begin() -> Begun:
        if len(flat) == 1:
            output, input = flat[0]
            work = _all_gather_flat(output.view(-1), input, group=group.process_group, async_op=True)
            return work, None, ()
        with dist._coalescing_manager(group.process_group, async_ops=True) as together:
            for pair in as_bytes:
                _all_gather_flat(*pair, group=group.process_group, async_op=True)
        return Works(together.works), None, ()

    return begin


def _reduce(parts: Sequence[_Part], group: Group) -> Callable[[], Begun]:
    """Reduce-scatter by the best way that the group has."""
    if host := _on_host([part.full[1:] for part in parts], group):
        call = host.reduce_scatter([(part.shard, part.full, part.accumulate) for part in parts])
        return lambda: (call(), None, ())
    return functools.partial(_exchange if group.backend == "gloo" else _reduce_at_once, parts, group)


def _on_host(tensors: Sequence[Tensor], group: Group) -> ShmTransport | None:
    """What takes these from rank to rank without a message; None where messages have to."""
    return group.shm if group.shm is not None and group.shm.fits(tensors) else None


def _exchange(parts: Sequence[_Part], group: Group) -> Begun:
    """Reduce-scatter on gloo: slices to their owners, each of whom sums his own in rank order."""
    received = [part.full.new_empty(group.size - 1, part.full.shape[1]) for part in parts]

    def finish() -> None:
        for part, others in zip(parts, received, strict=True):
            own = part.full[group.rank]
            in_order = [*others[: group.rank], own, *others[group.rank :]]
            add_in_rank_order(in_order, part.shard, accumulate=part.accumulate)

    full = [part.full for part in parts]
    return exchange_in_pairs(full, received, _process_group(group)), finish, tuple(received)


def _reduce_at_once(parts: Sequence[_Part], group: Group) -> Begun:
    """Reduce-scatter by the backend: into the shard itself where its type is full's and nothing is added."""
    direct = [not part.accumulate and part.shard.dtype == part.full.dtype for part in parts]
    totals = [
        part.shard if into else part.full.new_empty(part.shard.shape)
        for part, into in zip(parts, direct, strict=True)
    ]

    def start_one(part: _Part, total: Tensor) -> dist.Work:
        return _reduce_scatter_flat(total, part.full.view(-1), group=group.process_group, async_op=True)

    def call() -> Running:
        if len(parts) == 1:
            return start_one(parts[0], totals[0])
        works = []
        for dtype in dict.fromkeys(part.full.dtype for part in parts):  # one of its calls takes one type
            with dist._coalescing_manager(group.process_group, async_ops=True) as together:
                for part, total in zip(parts, totals, strict=True):
                    if part.full.dtype == dtype:
                        start_one(part, total)
            works += together.works
        return Works(works)

    def finish() -> None:
        for part, total, into in zip(parts, totals, direct, strict=True):
            if not into:
                part.take(total)
                group.device.record_use(total)

    temporaries = tuple(total for total, into in zip(totals, direct, strict=True) if not into)
    return call(), finish, temporaries


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, async_op: bool = False) -> Pending:
    """tensor <- that of the group's rank `source`, in place."""
    if group.size == 1:
        return done("broadcast", group)

    def begin() -> Begun:
        work = dist.broadcast(tensor, group=group.process_group, group_src=source, async_op=True)
        return work, None, ()

    return Call("broadcast", group, begin, (tensor,), tensor.nbytes).launch(async_op)


def broadcast_weights(
    modules: Iterable[nn.Module], ps: ParallelState, *, without: Collection[int] = ()
) -> None:
    """Every rank takes data parallel rank 0's parameters and buffers: for modules that are initialised from the rank's
    own generator, before an engine cuts them. without: ids of tensors that ranks have alike. Communicates over dp."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and id(tensor) not in without:
                broadcast(tensor.detach(), ps.dp_group)


def barrier(group: Group) -> None:
    """Wait for every rank of the group. On gloo the error names the ranks that did not come.

    Raises PeerLostError.
    """
    if group.size == 1:
        return
    group.tell("barrier")
    started, all_came = time.monotonic(), functools.partial(dist.barrier, group.process_group)
    if group.backend == "gloo":
        all_came = functools.partial(
            dist.monitored_barrier, group.process_group, group.timeout, wait_all_ranks=True
        )
    try:
        group.traffic.wait_for(all_came)
    except RuntimeError as error:
        blame(error, "barrier", group, started)


def _process_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None, f"{group.purpose!r} is a group of one"
    return group.process_group
