"""Sums of gradients over the ranks that share a parameter, besides those over data parallel ranks.

Two kinds, both rare, both found in `ParamMeta` and fixed when the engine is built:

- partial regions (norms under sequence parallel, replicated key and value rows): each of the tensor parallel ranks
  that hold a region has the gradient of its own tokens or heads. They are packed, those of all parameters, and travel
  in as few collectives as a buffer of bounded size allows. That is after the sum over data parallel ranks, and of what
  this rank's optimizer holds a gradient of: tensor parallel ranks at one data parallel place hold the same parts.
- shared parameters (tied embeddings): the first and the last pipeline stage each have the gradient of their own use.
  Their buckets are their own and cut alike on both stages. Whole gradients are added before they go to data parallel
  ranks: a sum of two has one order, so it is, bit for bit, what one process gets from adding the uses.
  Of sharded gradients the parts are added, afterwards: fewer bytes, and other bits than one process.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.param_meta import region_parts
from megatron.core.transport import collectives, host_data
from megatron.core.transport.parallel_state import Group, ParallelState

MAX_PACKED = 16 * 2**20  # elements of the packed buffer: 64 MiB in fp32, large enough for any link


@dataclasses.dataclass
class _Pack:
    """What travels in one collective: `numel` elements of the packed buffer. items: pieces of gradients at rest, views,
    and where in the packed buffer this rank's block's elements of each begin."""

    items: list[tuple[Tensor, int]] = dataclasses.field(default_factory=list)
    numel: int = 0


class ModelParallelSums:
    """Both kinds, at the end of a step. tracker: is told of what they take beside gradients. Communicates over
    embedding and tp."""

    def __init__(self, buffer: FlatBuffer, ps: ParallelState, tracker: MemoryTracker) -> None:
        self._partial = PartialSums(buffer, ps.tp_group, tracker=tracker)
        self._shared = SharedSums(buffer, ps.embedding_group, tracker=tracker)

    def before_data_parallel(self) -> None:
        """What is added before sums over data parallel ranks. Raises PeerLostError."""
        if self._shared.whole:
            self._shared.add()

    def after_data_parallel(self) -> None:
        """What is added once these are complete. Raises PeerLostError."""
        if not self._shared.whole:
            self._shared.add()
        self._partial.add()

    def most_bytes(self) -> dict[str, int]:
        """That are taken at once, by the tracker's categories."""
        return dict(self._shared.most_bytes() | self._partial.most_bytes())


class PartialSums:
    """Adds the parts of gradients that several tensor parallel ranks hold.

    Ranks that hold another rectangle must not be added: a region of c copies has one slot for each block of c ranks,
    a rank fills its own block's and leaves the others zero. max_packed: the packed buffer has at most so many elements
    (and what rounds them up to the group's size); larger regions are cut. tracker: is told of the buffer.
    Communicates over tp.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        group: Group,
        *,
        max_packed: int = MAX_PACKED,
        tracker: MemoryTracker | None = None,
    ) -> None:
        assert max_packed >= group.size, f"{max_packed} elements for {group.size} slots"
        self._group, self._max_packed = group, max_packed
        self._tracker = MemoryTracker() if tracker is None else tracker
        self._packs: dict[torch.dtype, list[_Pack]] = {}
        plan = []
        for name in buffer.names:
            start, end = buffer.part(name, buffer.sharding.optimizer)
            grad, meta = buffer.main_grad_part(name), buffer.param_meta[name]
            for region in (one for one in meta.parts if one.partial):
                for _, held in region_parts(region, meta.local_shape, grad, start, end):
                    self._add_held(name, held, region.copies)
                    plan.append([str(grad.dtype), name, list(held.shape), region.copies])
        _assert_agreed([max_packed, plan], group, "partial regions")

    def _add_held(self, name: str, held: Tensor, copies: int) -> None:
        """What this rank holds of a partial region: a place for each block of ranks that has the same."""
        size = self._group.size
        assert size % copies == 0, f"{name}: {copies} copies of a region over {size} tensor parallel ranks"
        packs = self._packs.setdefault(held.dtype, [])
        slots = size // copies
        for piece in _cut(held, self._max_packed // slots):
            if not packs or packs[-1].numel + slots * piece.numel() > self._max_packed:
                packs.append(_Pack())
            pack = packs[-1]
            pack.items.append((piece, pack.numel + self._group.rank // copies * piece.numel()))
            pack.numel += slots * piece.numel()

    def _numels(self, packs: list[_Pack]) -> list[int]:
        """Elements that travel, in multiples of the group's size."""
        return [math.ceil(pack.numel / self._group.size) * self._group.size for pack in packs]

    def most_bytes(self) -> Counter[str]:
        """Of the packed buffer, and of what sums of it take, at once."""
        most = Counter[str]()
        for dtype, packs in self._packs.items():
            for numel in self._numels(packs):
                flat = torch.empty(numel, dtype=dtype, device="meta")
                most |= Counter(packed=flat.nbytes, exchange=_sum_bytes(flat, self._group))
        return most

    def add(self) -> None:
        """Every partial region holds the sum over its copies. Raises PeerLostError."""
        for dtype, packs in self._packs.items():
            numels = self._numels(packs)
            with self._tracker.holding("packed", max(numels) * dtype.itemsize):
                packed = torch.empty(max(numels), dtype=dtype, device=packs[0].items[0][0].device)
                for pack, numel in zip(packs, numels, strict=True):
                    flat = packed[:numel].zero_()
                    parts = [
                        flat[start : start + grad.numel()].view(grad.shape) for grad, start in pack.items
                    ]
                    for part, (grad, _) in zip(parts, pack.items, strict=True):
                        part.copy_(grad)
                    _sum(flat, self._group, self._tracker)
                    for part, (grad, _) in zip(parts, pack.items, strict=True):
                        grad.copy_(part)
                del packed, flat, parts


class SharedSums:
    """Adds the gradients of parameters that the first and the last stage share: whole ones, where they are unsharded
    (`whole`), else what the optimizer updates. tracker: is told of what exchanges take. Communicates over embedding."""

    def __init__(self, buffer: FlatBuffer, group: Group, *, tracker: MemoryTracker | None = None) -> None:
        self._tracker = MemoryTracker() if tracker is None else tracker
        self._group = group
        buckets = [bucket for bucket in buffer.buckets if buffer.arenas[bucket.arena].layout.shared]
        # Places in their stages' lists differ, names do not.
        buckets.sort(key=lambda bucket: bucket.bucket.names)
        names = [name for bucket in buckets for name in bucket.bucket.names]
        assert group.size > 1 or not names, (
            f"{names} are shared with another stage, and group {group.purpose!r} has one rank"
        )
        self.whole = not buffer.is_cut(buckets, "main_grads")
        grads = [bucket.full_grads if self.whole else bucket.optimizer_grads for bucket in buckets]
        self._grads = [grad for grad in grads if grad is not None]
        _assert_agreed([names, [grad.numel() for grad in self._grads]], group, "shared parameters")

    def most_bytes(self) -> Counter[str]:
        """Of what a sum takes beside the gradient."""
        shapes = [torch.empty(grad.shape, dtype=grad.dtype, device="meta") for grad in self._grads]
        return Counter(exchange=max((_sum_bytes(flat, self._group) for flat in shapes), default=0))

    def add(self) -> None:
        """Every shared parameter's gradient holds the sum over its uses. Raises PeerLostError."""
        for grad in self._grads:
            _sum(grad, self._group, self._tracker)


def _sum_bytes(flat: Tensor, group: Group) -> int:
    """What a sum of such a tensor takes beside it."""
    return collectives.temporary_bytes(flat.view(-1), group, accumulate=False)


def _sum(flat: Tensor, group: Group, tracker: MemoryTracker) -> None:
    """flat <- its sum over the group."""
    pending = collectives.sum_gradients(flat, group)
    with tracker.holding("exchange", pending.temporary_bytes):
        pending.wait()


def _cut(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Views of at most `most` elements, in order: by rows, and rows that are too long by theirs."""
    if tensor.numel() <= most:
        yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    for rows in tensor.split(max(1, most // (tensor.numel() // tensor.shape[dim])), dim):
        yield from _cut(rows, most)


def _assert_agreed(plan: list[Any], group: Group, what: str) -> None:
    """A collective whose ranks mean different things mixes up gradients without a word: look once, at the start."""
    for rank, other in zip(group.ranks, host_data.all_gather_json(plan, group), strict=True):
        assert other == plan, f"{what}: {plan} here, {other} on rank {rank}"
