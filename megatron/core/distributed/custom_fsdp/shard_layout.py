"""Where each parameter lies in the flat buffers (pure: ints only).

All trained parameters of one dtype share one flat buffer, all frozen ones another. Experts' are apart from both: what
one rank in several holds is reduced over other ranks. So are those that two pipeline stages hold (tied embeddings),
which both stages have to cut alike. Seen from its start: buckets, in the order in which backward completes them; in a
bucket, parameters; at its end, padding. A bucket is what one unit of the model has, and what one collective moves.

    [ bucket 0: p9 p8 p7 .. pad | bucket 1: p6 p5 .. pad | ... ]

- Buckets are laid in backward order, the reverse of the order in which their units were registered first.
- In a bucket, parameters of one *group* (treated alike by the optimizer) lie together, so that the optimizer
  works on a few long slices. In a group, those whose size has the larger power of two come first: every
  parameter then starts on a multiple of its own alignment (up to 64 elements), without padding between them.
- A bucket is padded to a multiple of 128 * dp_size elements: it cuts into dp_size equal, aligned parts, and
  its padding is below 128 * dp_size elements whatever the shapes. (Keeping rows whole instead wastes up to 81
  %.)

How a bucket is cut (`sharding_table.ShardOver`): inner rank i has the i-th of inner_size equal parts, and of these
outer rank o the o-th of outer_size. A buffer *at rest* is the concatenation of its buckets' parts: part of a bucket
begins there at `bucket.start / ways`.

Placement "tensor_atomic" lays every parameter wholly into one of the dp_size parts instead, so that an optimizer can
work on matrices: the largest first, each into the part that is emptiest; all parts of a bucket are as long as the
longest needs. What that wastes has no bound that is independent of the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from megatron.core.sharding_table import ShardOver, ShardPlace

ALIGNMENT = 128  # elements; 256 bytes of bf16
MAX_PARAM_ALIGNMENT = 64  # elements; a cache line of 16-bit values

Placement = Literal["flat", "tensor_atomic"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter. group: any name; equal for parameters treated alike. unit: what of
    the model is gathered and reduced with it. trained: has a gradient. expert: an expert's. shared: another pipeline
    stage holds it too."""

    name: str
    numel: int
    dtype: str
    group: str = ""
    unit: str = ""
    trained: bool = True
    expert: bool = False
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a parameter lies: elements [start, start + numel) of its flat buffer."""

    name: str
    group: str
    bucket: int
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclasses.dataclass(frozen=True)
class BufferSpan:
    """Consecutive parameters of one group in one bucket, or what a rank holds of them: elements [start, end)."""

    group: str
    bucket: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Elements [start, end) of the flat buffer; padding is behind the last parameter, and before it only where
    parameters are not split between ranks. names: its parameters, in backward order."""

    index: int
    start: int
    end: int
    names: tuple[str, ...]
    unit: str = ""

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The layout of one flat buffer over `dp_size` ranks. slots: by their place."""

    dtype: str
    dp_size: int
    numel: int
    buckets: tuple[Bucket, ...]
    slots: tuple[Slot, ...]
    trained: bool = True
    shared: bool = False
    expert: bool = False

    @functools.cached_property
    def by_name(self) -> Mapping[str, Slot]:
        return MappingProxyType({slot.name: slot for slot in self.slots})

    @functools.cached_property
    def spans(self) -> tuple[BufferSpan, ...]:
        """The buffer without its padding, cut where the group changes, from start to end."""
        spans: list[BufferSpan] = []
        for slot in self.slots:
            last = spans[-1] if spans else None
            if last and (last.group, last.bucket, last.end) == (slot.group, slot.bucket, slot.start):
                spans[-1] = dataclasses.replace(last, end=slot.end)
            else:
                spans.append(BufferSpan(slot.group, slot.bucket, slot.start, slot.end))
        return tuple(spans)

    def numel_at_rest(self, place: ShardPlace, cut: ShardOver) -> int:
        """Elements of the buffer at rest on one rank."""
        return self.numel // self._ways(place, cut)

    def shard(self, bucket: int, place: ShardPlace, cut: ShardOver) -> tuple[int, int]:
        """Elements [start, end) of the whole flat buffer that are this rank's part of a bucket."""
        size = self.buckets[bucket].numel // self._ways(place, cut)
        start = self.buckets[bucket].start + place.index(cut) * size
        return start, start + size

    def rest_start(self, bucket: int, place: ShardPlace, cut: ShardOver) -> int:
        """Where that part begins in the buffer at rest."""
        return self.buckets[bucket].start // self._ways(place, cut)

    def bucket_at_rest(self, bucket: Bucket, place: ShardPlace, cut: ShardOver) -> slice:
        """Where this rank's part of a bucket is in the buffer at rest."""
        start = self.rest_start(bucket.index, place, cut)
        return slice(start, start + bucket.numel // self._ways(place, cut))

    def inner_part(self, bucket: Bucket, place: ShardPlace, cut: ShardOver, finer: ShardOver) -> slice:
        """Where this rank's part by the finer cut is in its part of a bucket."""
        outside, _ = self.shard(bucket.index, place, cut)
        start, end = self.shard(bucket.index, place, finer)
        return slice(start - outside, end - outside)

    def part_of(self, name: str, place: ShardPlace, cut: ShardOver) -> tuple[int, int]:
        """Elements [start, end) *of the parameter* that lie in this rank's part; may be empty."""
        slot = self.by_name[name]
        start, end = self.shard(slot.bucket, place, cut)
        low = min(max(start - slot.start, 0), slot.numel)
        return low, max(low, min(end - slot.start, slot.numel))

    def spans_at_rest(self, place: ShardPlace, cut: ShardOver) -> tuple[BufferSpan, ...]:
        """What this rank holds of `spans`, as elements of the buffer at rest. Without padding."""
        spans: list[BufferSpan] = []
        for span in self.spans:
            start, end = self.shard(span.bucket, place, cut)
            shift = self.rest_start(span.bucket, place, cut) - start
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                spans.append(BufferSpan(span.group, span.bucket, low + shift, high + shift))
        return tuple(spans)

    def _ways(self, place: ShardPlace, cut: ShardOver) -> int:
        assert place.dp_size == self.dp_size, f"{place} of a layout over {self.dp_size} ranks"
        return place.ways(cut)


def bucket_size_of(
    total_numel: int, dp_size: int, bucket_size: int | None = None, num_buckets: int | None = None
) -> int:
    """Elements at which a bucket closes: --ddp-num-buckets before --ddp-bucket-size before the default, which is long
    enough to keep the links of many ranks busy."""
    for flag, value in (("--ddp-num-buckets", num_buckets), ("--ddp-bucket-size", bucket_size)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value}: must be at least 1")
    if num_buckets is not None:
        return max(1, math.ceil(total_numel / num_buckets))
    return max(40_000_000, 1_000_000 * dp_size) if bucket_size is None else bucket_size


def plan_layouts(
    specs: Sequence[ParamSpec],
    dp_size: int,
    *,
    placement: Placement = "flat",
    expert_dp_size: int | None = None,
) -> tuple[FlatLayout, ...]:
    """One layout a (dtype, trained, expert, shared), for parameters given in the order they were registered in.
    expert_dp_size: ranks that hold the same experts; None: as of the rest."""
    assert dp_size >= 1, f"dp_size {dp_size}"
    assert len({spec.name for spec in specs}) == len(specs), "two parameters have one name"
    first = {unit: place for place, unit in enumerate(dict.fromkeys(spec.unit for spec in specs))}
    # What lies in one flat buffer, in backward order.
    kinds: dict[tuple[str, bool, bool, bool], list[ParamSpec]] = {}
    for spec in reversed(specs):
        kinds.setdefault((spec.dtype, spec.trained, spec.expert, spec.shared), []).append(spec)
    layouts = []
    for (dtype, trained, expert, shared), backward in kinds.items():
        num_ranks = dp_size if expert_dp_size is None or not expert else expert_dp_size
        buckets: list[Bucket] = []
        slots: list[Slot] = []
        start = 0
        backward.sort(key=lambda spec: -first[spec.unit])
        for unit, of_unit in itertools.groupby(backward, key=lambda spec: spec.unit):
            members, index = list(of_unit), len(buckets)
            placed, part = (_in_a_row if placement == "flat" else _atomic)(members, num_ranks)
            slots += [Slot(spec.name, spec.group, index, start + at, spec.numel) for at, spec in placed]
            names = tuple(spec.name for spec in members)
            buckets.append(Bucket(index, start, start + part * num_ranks, names, unit))
            start = buckets[-1].end
        kind = trained, shared, expert
        layouts.append(FlatLayout(dtype, num_ranks, start, tuple(buckets), tuple(slots), *kind))
    return tuple(layouts)


def _in_a_row(specs: Sequence[ParamSpec], dp_size: int) -> tuple[list[tuple[int, ParamSpec]], int]:
    """Each parameter's place in its bucket, and the length of a rank's part: one behind the other."""
    placed, end = [], 0
    for spec in _in_bucket_order(specs):
        placed.append((end, spec))
        end += spec.numel
    return placed, math.ceil(end / (ALIGNMENT * dp_size)) * ALIGNMENT


def _atomic(specs: Sequence[ParamSpec], dp_size: int) -> tuple[list[tuple[int, ParamSpec]], int]:
    """The same without splitting a parameter between ranks: the largest first, each to the rank that has least."""
    bins = [(0, rank) for rank in range(dp_size)]
    held: list[list[ParamSpec]] = [[] for _ in range(dp_size)]
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        size, rank = bins[0]
        heapq.heapreplace(bins, (size + spec.numel, rank))
        held[rank].append(spec)
    part = math.ceil(max(size for size, _ in bins) / ALIGNMENT) * ALIGNMENT
    placed = []
    for rank, members in enumerate(held):
        placed += [(rank * part + at, spec) for at, spec in _in_a_row(members, 1)[0]]
    return placed, part


def _in_bucket_order(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Group by group (by first appearance), larger power of two first, else backward order (stable)."""
    groups = list(dict.fromkeys(spec.group for spec in specs))

    def alignment(numel: int) -> int:
        """The largest power of two that divides numel, up to MAX_PARAM_ALIGNMENT."""
        return math.gcd(numel, MAX_PARAM_ALIGNMENT) if numel else MAX_PARAM_ALIGNMENT

    return sorted(specs, key=lambda spec: (groups.index(spec.group), -alignment(spec.numel)))
