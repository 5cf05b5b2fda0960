"""All-gather and exchange on gloo out of messages between pairs of ranks, and sums of what came, in rank order.

gloo's own collectives send each rank's own slice through the loopback too, or go round a ring. All calls return at
once; what they were given belongs to them until `wait()`. Messages of one kind between two ranks arrive in the order
of their start, so several of a kind may be under way in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
# Elements summed at a time, so that the running total stays in the cache and a 16-bit sum needs no fp32 copy of its
# own. ms of one thread for 2 M fp32 elements from 2 ranks, accumulated: 2.35 in blocks of 2^14, 1.55 of 2^16, 1.15 of
# 2^18, and the same or more without blocks.
BLOCK = 1 << 18
# Messages of two kinds must not be taken for each other; point_to_point has 0.
_GATHER_TAG, _EXCHANGE_TAG, _UNEVEN_TAG = 1, 2, 3


class Works:
    """Several works of a backend that end as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def gather_in_pairs(pairs: Pairs, talk: dist.ProcessGroup) -> Works:
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


def exchange_uneven(received: Sequence[Tensor], sent: Sequence[Tensor], talk: dist.ProcessGroup) -> Works:
    """sent[r] to rank r, what rank r sends here into received[r]. Empty ones do not travel."""
    works = []
    for source, _ in _others(talk):
        if received[source].numel():
            works.append(talk.recv([received[source]], source, _UNEVEN_TAG))
    for _, target in _others(talk):
        if sent[target].numel():
            works.append(talk.send([sent[target]], target, _UNEVEN_TAG))
    received[talk.rank()].copy_(sent[talk.rank()])
    return Works(works)


def _others(talk: dist.ProcessGroup) -> list[tuple[int, int]]:
    """(from whom, to whom) at every distance: no rank is everybody's first."""
    rank, size = talk.rank(), talk.size()
    return [((rank - distance) % size, (rank + distance) % size) for distance in range(1, size)]


def add_in_rank_order(parts: Sequence[Tensor], output: Tensor, *, accumulate: bool = False) -> None:
    """output [n] <- parts[0] + parts[1] + ..., added from the first to the last; a part is [n], all of one dtype. The
    bits are the same on every run, whichever message came first.

    16-bit parts are summed in fp32, others in their own dtype; the sum is rounded to output's dtype once.
    accumulate: output <- output + that sum, which is complete before it meets output. `output` may be one of the
    parts.
    """
    flat = output.view(-1)
    shapes = [part.shape for part in parts]
    assert shapes.count(flat.shape) == max(1, len(parts)), (
        f"parts {[tuple(one) for one in shapes]}, output {tuple(flat.shape)}"
    )
    wide = parts[0].element_size() >= 4
    if len(parts) == 2 and flat.dtype == parts[0].dtype and not accumulate:
        torch.add(parts[0], parts[1], out=flat)  # of 16-bit values too rounded once
        return
    if wide and flat.numel() <= BLOCK and len(parts) > 1 and accumulate:
        total = parts[0] + parts[1]  # half the time of `out`, where nothing is in the caches
        for part in parts[2:]:
            total += part
        flat.add_(total)
        return
    dtype = parts[0].dtype if wide else torch.float32
    in_place = not accumulate and flat.dtype == dtype and flat.data_ptr() not in [p.data_ptr() for p in parts]
    scratch = torch.empty(0 if in_place else min(BLOCK, flat.numel()), dtype=dtype, device=flat.device)
    for into, first, *rest in zip(flat.split(BLOCK), *(part.split(BLOCK) for part in parts), strict=True):
        total = into if in_place else scratch[: into.numel()]
        if wide and rest:
            torch.add(first, rest.pop(0), out=total)
        else:
            total.copy_(first)
        for part in rest:
            total.add_(part)
        if accumulate:
            into.add_(total)
        elif not in_place:
            into.copy_(total)


def own_rows(flat: Pairs, rank: int) -> list[tuple[Tensor, Tensor]]:
    """(row, input): of outputs that their inputs are no part of."""
    rows = [(output[rank], input) for output, input in flat]
    return [(row, input) for row, input in rows if row.data_ptr() != input.data_ptr()]
