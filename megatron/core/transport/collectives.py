"""Every collective, named. The only module that calls torch.distributed's collectives; `point_to_point` has messages.

Each takes a `Group` of the parallel state (never a bare process group), does nothing over a group of one, and
turns the loss of a peer into `PeerLostError`, which says which call, which purpose, which rank and after how
long. `async_op=True` returns a `Pending`; its result exists only after `wait()`, and it keeps the buffers
alive until then.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.transport.gloo_pairs import (
    Pairs,
    Works,
    add_in_rank_order,
    exchange_in_pairs,
    exchange_uneven,
    gather_in_pairs,
    own_rows,
)
from megatron.core.transport.peer_loss import blame
from megatron.core.transport.pending import Call, Kept, Pending

if TYPE_CHECKING:
    from megatron.core.transport.parallel_state import Group, ParallelState  # uses these
    from megatron.core.transport.pending import Prepared, Running
    from megatron.core.transport.shm_transport import ShmTransport

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed it and warns about the old name; both take (output, input, group, async_op).
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_all_gather_flat = dist.all_gather_single if _TORCH >= (2, 13) else dist.all_gather_into_tensor
_reduce_scatter_flat = dist.reduce_scatter_single if _TORCH >= (2, 13) else dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", *, async_op: bool = False) -> Pending:
    """tensor [...] <- its sum, max or min over the group, in place."""
    if group.size == 1:
        return Pending("all_reduce", group)

    start = functools.partial(dist.all_reduce, tensor, _OPS[op], group.process_group, async_op=True)
    return Call("all_reduce", group, lambda: (start, None, ()), (tensor,), tensor.nbytes).launch(async_op)


def mean_over(tensor: Tensor, group: Group) -> Tensor:
    """The mean of the group's tensors [...], in memory of its own."""
    total = tensor.clone()
    all_reduce(total, group)
    return total.div_(group.size)


def all_gather(output: Tensor, input: Tensor, group: Group, *, async_op: bool = False) -> Pending:
    """output [size * n] <- every rank's input [n], in group order. `input` may be a slice of `output`."""
    return all_gather_units([(output, input)], group, async_op=async_op)


def all_gather_units(pairs: Pairs, group: Group, *, async_op: bool = True) -> Pending:
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
        for row, input in own_rows(flat, 0):
            row.copy_(input)
        return Pending("all_gather", group)
    prepare = (_gather_each if group.backend == "gloo" else _gather_at_once)(flat, group)
    return _first_call("all_gather", group, prepare, pairs, 0, None).launch(async_op)


def reduce_scatter(output: Tensor, input: Tensor, group: Group, *, async_op: bool = False) -> Pending:
    """output [n] <- this rank's slice of the sum of every rank's input [size * n].

    On gloo the sum runs in rank order, see `reduce_scatter_units`. `output` may be this rank's slice of `input`.
    """
    return reduce_scatter_units([(output, input)], group, accumulate=False, async_op=async_op)


def reduce_scatter_units(items: Pairs, group: Group, *, accumulate: bool, async_op: bool = True) -> Pending:
    """Several reduce-scatters in one call: of each (shard [n], full [size * n]), shard <- this rank's slice of the
    sum over ranks of full; with `accumulate`, shard <- shard + that sum.

    Values travel in full's type and end in shard's. `full` is only read, until `wait()`; a shard that does not
    accumulate may be its own slice of it. gloo's own reduce-scatter is a hidden all-reduce at more than twice the
    CPU time, so there ranks exchange their slices and each sums its own in rank order: 16-bit values in fp32, the
    same bits on every run. NCCL sums in full's type, in an order of its own.
    """
    if isinstance(items, Kept) and (kept := items.calls.get(accumulate)) is not None:
        return kept.launch(async_op, group)
    flat = _rows(items, group)
    if group.size == 1 or not flat:
        for shard, full in flat:
            _take(shard, full[0], accumulate)
        return Pending("reduce_scatter", group)
    prepare = _reduce(flat, group, accumulate)
    return _first_call("reduce_scatter", group, prepare, items, 1, accumulate).launch(async_op)


def all_to_all(
    output: Tensor,
    input: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: Group,
    *,
    most: int | None = None,
    async_op: bool = False,
) -> Pending:
    """output [sum(received), ...] <- the rows that each rank sends here, in group order; input [sum(sent), ...]: the
    rows for each rank. Numbers of rows may be 0; what one rank sends another is what that receives from it. What counts
    as moved is what leaves this rank. most: rows that no rank exceeds to any other, the same on all: where it is given,
    ranks of one host send no messages.
    """
    assert (len(output), len(input)) == (sum(received), sum(sent)), (
        f"{len(output)} rows of {received}, {len(input)} of {sent}"
    )
    assert input.is_contiguous() and output.is_contiguous(), "rows of one block of memory"  # noqa: PT018
    if group.size == 1:
        output.copy_(input)
        return Pending("all_to_all", group)
    parts, into = input.split(list(sent)), output.split(list(received))
    row_bytes, host = input.element_size() * math.prod(input.shape[1:]), group.shm

    def start() -> Running:
        if host is not None and most is not None and host.has_room(most * row_bytes):
            return host.all_to_all(into, parts, most * row_bytes)
        if group.backend == "gloo":
            return exchange_uneven(into, parts, _process_group(group))
        sizes = list(received), list(sent)
        return dist.all_to_all_single(output, input, *sizes, group.process_group, async_op=True)

    away = input.nbytes - parts[group.rank].nbytes
    return Call("all_to_all", group, lambda: (start, None, ()), (output, input), away).launch(async_op)


def sum_gradients(bucket: Tensor, group: Group) -> Pending:
    """bucket <- its sum over the group, in place, always asynchronous. Its size is a multiple of the group's.

    On gloo the sum runs in rank order, in fp32 at least: see [Note: sums in rank order] in
    distributed/custom_fsdp/grad_reduce_pipeline. It receives beside the bucket (`temporary_bytes`), and its second half
    (gathering the sums) is issued by `wait()`, so waits on several must come in the same order on all ranks.
    """
    parts = bucket.view(group.size, bucket.numel() // group.size)
    if _sums_at_once(parts, group):
        return all_reduce(bucket, group, async_op=True)
    share = parts[group.rank]
    group.traffic.count("all_reduce", bucket.nbytes)
    reduce = _reduce([(share, parts)], group, False)

    def prepare() -> Prepared:
        start, sum_parts, temporaries = reduce()

        def gather_sums() -> None:
            if sum_parts is not None:
                sum_parts()
            Call("all_gather", group, _gather_each([(parts, share)], group), (bucket,)).launch(False)

        return start, gather_sums, temporaries

    return Call("sum_gradients", group, prepare, (bucket,)).launch(True)


def temporary_bytes(what: Tensor | Pairs, group: Group, *, accumulate: bool) -> int:
    """Of `sum_gradients` of a bucket, or of `reduce_scatter_units`: `Pending.temporary_bytes` once it runs."""
    if isinstance(what, Tensor):
        parts = what.view(group.size, what.numel() // group.size)
        flat, accumulate = [] if _sums_at_once(parts, group) else [(parts[group.rank], parts)], False
    else:
        flat = _rows(what, group)
    return sum(one.nbytes for one in _reduce(flat, group, accumulate)()[2]) if flat and group.size > 1 else 0


def _sums_at_once(parts: Tensor, group: Group) -> bool:
    """Whether one call of the backend sums parts [size, n] as `sum_gradients` does."""
    order_free = group.size == 2 and parts.element_size() >= 4  # a sum of two has one order
    return group.size == 1 or group.backend != "gloo" or (order_free and not _on_host([parts[1:]], group))


def _rows(items: Pairs, group: Group) -> list[tuple[Tensor, Tensor]]:
    """(shard [n], full [size, n]) of each that is not empty."""
    for shard, full in items:
        assert full.numel() == group.size * shard.numel(), f"{full.shape} != {group.size} x {shard.shape}"
    # The shard itself where it can be: a view of it would keep the memory of gradients at rest.
    flat = [(one if one.dim() == 1 else one.view(-1), full.view(group.size, -1)) for one, full in items]
    return [pair for pair in flat if pair[0].numel()]


def _first_call(
    op: str, group: Group, prepare: Callable[[], Prepared], pairs: Pairs, whole: int, key: bool | None
) -> Call:
    """Kept where pairs are. whole: which of each pair is the full buffer, as traffic is counted."""
    payload = sum(pair[whole].nbytes for pair in pairs)
    call = Call(op, group, prepare, tuple(itertools.chain.from_iterable(pairs)), payload)
    if isinstance(pairs, Kept):
        pairs.calls[key] = call
    return call


def _take(shard: Tensor, total: Tensor, accumulate: bool) -> None:
    """The sum has arrived."""
    if accumulate:
        shard.add_(total)
    elif shard.data_ptr() != total.data_ptr():
        shard.copy_(total)


def _gather_each(flat: Pairs, group: Group) -> Callable[[], Prepared]:
    """All-gather on gloo."""
    if host := _on_host([input for _, input in flat], group):
        call = host.all_gather(flat)
        return lambda: (call, None, ())
    own = own_rows(flat, group.rank)

    def start() -> Running:
        work = gather_in_pairs(flat, _process_group(group))
        for row, input in own:
            row.copy_(input)
        return work

    return lambda: (start, None, ())


def _gather_at_once(flat: Pairs, group: Group) -> Callable[[], Prepared]:
    """All-gather by the backend; several as bytes, since one of its calls takes one type."""
    as_bytes = [(output.view(-1).view(torch.uint8), input.view(torch.uint8)) for output, input in flat]

    def start() -> Running:
        if len(flat) == 1:
            output, input = flat[0]
            return _all_gather_flat(output.view(-1), input, group=group.process_group, async_op=True)
        with dist._coalescing_manager(group.process_group, async_ops=True) as together:
            for pair in as_bytes:
                _all_gather_flat(*pair, group=group.process_group, async_op=True)
        return Works(together.works)

    return lambda: (start, None, ())


def _reduce(flat: Pairs, group: Group, accumulate: bool) -> Callable[[], Prepared]:
    """Reduce-scatter of each (shard [n], full [size, n]), by the best way that the group has."""
    if host := _on_host([full[1:] for _, full in flat], group):
        call = host.reduce_scatter(flat, accumulate)
        return lambda: (call, None, ())
    way = _exchange if group.backend == "gloo" else _reduce_at_once
    return functools.partial(way, flat, group, accumulate)


def _on_host(tensors: Sequence[Tensor], group: Group) -> ShmTransport | None:
    """What takes these from rank to rank without a message; None where messages have to."""
    return group.shm if group.shm is not None and group.shm.fits(tensors) else None


def _exchange(flat: Pairs, group: Group, accumulate: bool) -> Prepared:
    """Reduce-scatter on gloo: slices to their owners, each of whom sums his own in rank order."""
    received = [full.new_empty(group.size - 1, full.shape[1]) for _, full in flat]

    def finish() -> None:
        for (shard, full), others in zip(flat, received, strict=True):
            in_order = [*others[: group.rank], full[group.rank], *others[group.rank :]]
            add_in_rank_order(in_order, shard, accumulate=accumulate)

    def start() -> Running:
        return exchange_in_pairs([full for _, full in flat], received, _process_group(group))

    return start, finish, tuple(received)


def _reduce_at_once(flat: Pairs, group: Group, accumulate: bool) -> Prepared:
    """Reduce-scatter by the backend: into the shard itself where its type is full's and nothing is added."""
    direct = [not accumulate and shard.dtype == full.dtype for shard, full in flat]
    totals = [
        shard if into else full.new_empty(shard.shape)
        for (shard, full), into in zip(flat, direct, strict=True)
    ]
    temporaries = tuple(total for total, into in zip(totals, direct, strict=True) if not into)

    def start_one(full: Tensor, total: Tensor) -> dist.Work:
        return _reduce_scatter_flat(total, full.view(-1), group=group.process_group, async_op=True)

    def start() -> Running:
        if len(flat) == 1:
            return start_one(flat[0][1], totals[0])
        works = []
        for dtype in dict.fromkeys(full.dtype for _, full in flat):  # one of its calls takes one type
            with dist._coalescing_manager(group.process_group, async_ops=True) as together:
                for (_, full), total in zip(flat, totals, strict=True):
                    if full.dtype == dtype:
                        start_one(full, total)
            works += together.works
        return Works(works)

    def finish() -> None:
        for (shard, _), total, into in zip(flat, totals, direct, strict=True):
            if not into:
                _take(shard, total, accumulate)
                group.device.record_use(total)

    return start, finish, temporaries


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, async_op: bool = False) -> Pending:
    """tensor [...] <- that of the group's rank `source`, in place."""
    if group.size == 1:
        return Pending("broadcast", group)

    start = functools.partial(
        dist.broadcast, tensor, group=group.process_group, group_src=source, async_op=True
    )
    return Call("broadcast", group, lambda: (start, None, ()), (tensor,), tensor.nbytes).launch(async_op)


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
    if group.size == 1 or group.peers is not None:
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
