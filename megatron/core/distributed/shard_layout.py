"""Where each parameter lies in the flat buffers (pure: ints only).

All parameters of one dtype share one flat buffer. Seen from its start: buckets, in the order in which
backward completes them; in a bucket, parameters; at its end, padding. A bucket is what one collective moves.

    [ bucket 0: p9 p8 p7 .. pad | bucket 1: p6 p5 .. pad | ... ]

- Parameters are laid in backward order (the reverse of the order they were registered in) and never split
  between buckets; a bucket closes as soon as it has reached the bucket size.
- In a bucket, parameters of one *group* (treated alike by the optimizer) lie together, so that the optimizer
  works on a few long slices. In a group, those whose size has the larger power of two come first: every
  parameter then starts on a multiple of its own alignment (up to 64 elements), without padding between them.
- A bucket is padded to a multiple of 128 * dp_size elements: it cuts into dp_size equal, aligned shards, and
  its padding is below 128 * dp_size elements whatever the shapes. (Keeping rows whole instead wastes up to 81
  %.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

ALIGNMENT = 128  # elements; 256 bytes of bf16
MAX_PARAM_ALIGNMENT = 64  # elements; a cache line of 16-bit values


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter. group: any name; equal for parameters treated alike."""

    name: str
    numel: int
    dtype: str
    group: str = ""


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
class Span:
    """Consecutive parameters of one group in one bucket: elements [start, end)."""

    group: str
    bucket: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Elements [start, end) of the flat buffer, of which those from `used_end` on are padding."""

    index: int
    start: int
    used_end: int
    end: int
    names: tuple[str, ...]

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The layout of one dtype's flat buffer over `dp_size` ranks."""

    dtype: str
    dp_size: int
    numel: int
    buckets: tuple[Bucket, ...]
    slots: tuple[Slot, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Slot]:
        return MappingProxyType({slot.name: slot for slot in self.slots})

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """The buffer without its padding, cut where the group changes, from start to end."""
        spans: list[Span] = []
        for slot in self.slots:
            last = spans[-1] if spans else None
            if last and (last.group, last.bucket, last.end) == (slot.group, slot.bucket, slot.start):
                spans[-1] = dataclasses.replace(last, end=slot.end)
            else:
                spans.append(Span(slot.group, slot.bucket, slot.start, slot.end))
        return tuple(spans)

    def shard(self, bucket: int, dp_rank: int) -> tuple[int, int]:
        """Elements [start, end) of the buffer that are rank `dp_rank`'s equal share of a bucket."""
        assert 0 <= dp_rank < self.dp_size, f"dp_rank {dp_rank} of {self.dp_size}"
        size = self.buckets[bucket].numel // self.dp_size
        start = self.buckets[bucket].start + dp_rank * size
        return start, start + size

    def part_in_shard(self, name: str, dp_rank: int) -> tuple[int, int]:
        """Elements [start, end) *of the parameter* that lie in rank `dp_rank`'s share; may be empty."""
        slot = self.by_name[name]
        start, end = self.shard(slot.bucket, dp_rank)
        low = min(max(start - slot.start, 0), slot.numel)
        return low, max(low, min(end - slot.start, slot.numel))


def default_bucket_size(dp_size: int) -> int:
    """Elements of a bucket where the flags say nothing: long enough to keep the links of many ranks busy."""
    return max(40_000_000, 1_000_000 * dp_size)


def bucket_size_of(
    total_numel: int, dp_size: int, bucket_size: int | None = None, num_buckets: int | None = None
) -> int:
    """Elements at which a bucket closes: --ddp-num-buckets before --ddp-bucket-size before the default."""
    if num_buckets is not None:
        if num_buckets < 1:
            raise ValueError(f"--ddp-num-buckets {num_buckets}: must be at least 1")
        return max(1, math.ceil(total_numel / num_buckets))
    if bucket_size is not None:
        if bucket_size < 1:
            raise ValueError(f"--ddp-bucket-size {bucket_size}: must be at least 1")
        return bucket_size
    return default_bucket_size(dp_size)


def plan_layouts(
    specs: Sequence[ParamSpec],
    dp_size: int,
    *,
    bucket_size: int | None = None,
    num_buckets: int | None = None,
) -> tuple[FlatLayout, ...]:
    """One layout a dtype, for parameters given in the order they were registered in."""
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names), "two parameters have one name"
    limit = bucket_size_of(sum(spec.numel for spec in specs), dp_size, bucket_size, num_buckets)
    dtypes = dict.fromkeys(spec.dtype for spec in reversed(specs))
    return tuple(
        layout_of_buckets(
            dtype, dp_size, _cut([spec for spec in reversed(specs) if spec.dtype == dtype], limit)
        )
        for dtype in dtypes
    )


def layout_of_buckets(dtype: str, dp_size: int, buckets: Iterable[Sequence[ParamSpec]]) -> FlatLayout:
    """The layout for buckets that are already chosen (by size, or one a unit), each in backward order."""
    assert dp_size >= 1, f"dp_size {dp_size}"
    unit = ALIGNMENT * dp_size
    made: list[Bucket] = []
    slots: list[Slot] = []
    start = 0
    for index, members in enumerate(buckets):
        used_end = start
        for spec in _in_bucket_order(members):
            slots.append(Slot(spec.name, spec.group, index, used_end, spec.numel))
            used_end += spec.numel
        end = start + math.ceil((used_end - start) / unit) * unit
        made.append(Bucket(index, start, used_end, end, tuple(spec.name for spec in members)))
        start = end
    return FlatLayout(dtype, dp_size, start, tuple(made), tuple(slots))


def _cut(specs: Sequence[ParamSpec], limit: int) -> list[list[ParamSpec]]:
    """Close a bucket when it has reached `limit` elements."""
    buckets: list[list[ParamSpec]] = []
    size = limit
    for spec in specs:
        if size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.numel
    return buckets


def _in_bucket_order(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Group by group (by first appearance), larger power of two first, else backward order (stable)."""
    groups = list(dict.fromkeys(spec.group for spec in specs))
    return sorted(specs, key=lambda spec: (groups.index(spec.group), -_param_alignment(spec.numel)))


def _param_alignment(numel: int) -> int:
    """The largest power of two that divides numel, up to MAX_PARAM_ALIGNMENT."""
    return math.gcd(numel, MAX_PARAM_ALIGNMENT) if numel else MAX_PARAM_ALIGNMENT
