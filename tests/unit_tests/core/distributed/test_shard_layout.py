"""Properties of the flat layout, for any shapes and up to thousands of ranks."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.shard_layout import (
    ALIGNMENT,
    ParamSpec,
    bucket_size_of,
    layout_of_buckets,
    plan_layouts,
)

specs_lists = st.lists(
    st.tuples(
        st.integers(0, 5000) | st.sampled_from([1, 128, 512 * 512, 768 * 3 + 1]),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from(["decay", "no_decay"]),
    ),
    min_size=1,
    max_size=30,
).map(lambda rows: [ParamSpec(f"p{i}", *row) for i, row in enumerate(rows)])
sizes = st.none() | st.integers(1, 10_000)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    specs_lists, st.sampled_from([1, 2, 3, 4, 7, 8, 64, 96, 1024, 4096]), sizes, st.none() | st.integers(1, 9)
)
def test_layout_properties(specs, dp_size, bucket_size, num_buckets):
    layouts = plan_layouts(specs, dp_size, bucket_size=bucket_size, num_buckets=num_buckets)
    assert sorted(slot.name for layout in layouts for slot in layout.slots) == sorted(s.name for s in specs)
    limit = bucket_size_of(sum(s.numel for s in specs), dp_size, bucket_size, num_buckets)
    for layout in layouts:
        by_name = {s.name: s for s in specs}
        assert all(by_name[slot.name].dtype == layout.dtype for slot in layout.slots)
        # Slots and padding tile the buffer without gap or overlap, bucket after bucket.
        position = 0
        for bucket in layout.buckets:
            assert bucket.start == position
            for slot in (s for s in layout.slots if s.bucket == bucket.index):
                assert slot.start == position
                assert slot.numel == by_name[slot.name].numel
                position = slot.end
            assert bucket.used_end == position
            position = bucket.end
            # Cuts evenly, wastes little, and holds no more than it needs to reach the size asked for.
            assert bucket.numel % (ALIGNMENT * dp_size) == 0
            assert bucket.end - bucket.used_end < ALIGNMENT * dp_size
            *others, _last = bucket.names
            assert sum(by_name[name].numel for name in others) < limit
        assert layout.numel == position
        # Buckets follow backward order: later registered first.
        order = [name for bucket in layout.buckets for name in bucket.names]
        assert order == sorted(order, key=lambda name: -int(name[1:]))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(specs_lists, st.sampled_from([1, 2, 3, 8, 64]), sizes)
def test_shards_partition_every_bucket_and_every_parameter(specs, dp_size, bucket_size):
    for layout in plan_layouts(specs, dp_size, bucket_size=bucket_size):
        for bucket in layout.buckets:
            cuts = [layout.shard(bucket.index, rank) for rank in range(dp_size)]
            assert cuts[0][0] == bucket.start
            assert cuts[-1][1] == bucket.end
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
            assert len({end - start for start, end in cuts}) == 1
        for slot in layout.slots:
            covered = (
                [i for rank in range(dp_size) for i in range(*layout.part_in_shard(slot.name, rank))]
                if slot.numel <= 5000
                else None
            )
            if covered is not None:
                assert covered == list(range(slot.numel))
            for rank in range(dp_size):  # parameter-relative and buffer-relative views agree
                low, high = layout.part_in_shard(slot.name, rank)
                start, end = layout.shard(slot.bucket, rank)
                if high > low:
                    assert start <= slot.start + low
                    assert slot.start + high <= end


@settings(derandomize=True, max_examples=60, deadline=None)
@given(specs_lists, st.sampled_from([1, 4]), sizes)
def test_spans_are_long_and_cover_the_used_part(specs, dp_size, bucket_size):
    for layout in plan_layouts(specs, dp_size, bucket_size=bucket_size):
        group_of = {s.name: s.group for s in specs}
        for bucket in layout.buckets:
            spans = [span for span in layout.spans if span.bucket == bucket.index]
            assert len(spans) <= len({group_of[name] for name in bucket.names})
            assert sum(span.end - span.start for span in spans) == bucket.used_end - bucket.start
        for slot in layout.slots:
            (home,) = [
                s
                for s in layout.spans
                if s.start <= slot.start
                and slot.end <= s.end
                and s.bucket == slot.bucket
                and s.group == slot.group
            ]
            assert home.group == group_of[slot.name]


def test_parameters_of_usual_shapes_are_aligned_without_padding_between():
    specs = [ParamSpec(f"p{i}", n, "float32") for i, n in enumerate([512 * 512, 3, 512, 96, 5, 64, 1])]
    (layout,) = plan_layouts(specs, 2)
    for slot in layout.slots:
        assert slot.start % math.gcd(slot.numel, 64) == 0
    assert layout.buckets[0].used_end == sum(s.numel for s in specs)


def test_bucket_sizes_from_flags():
    assert bucket_size_of(10**9, 1) == 40_000_000
    assert bucket_size_of(10**9, 64) == 64_000_000
    assert bucket_size_of(10**9, 64, 1000) == 1000
    assert bucket_size_of(1001, 64, 1000, 4) == 251
    with pytest.raises(ValueError, match="--ddp-bucket-size 0"):
        bucket_size_of(1, 1, 0)
    with pytest.raises(ValueError, match="--ddp-num-buckets 0"):
        bucket_size_of(1, 1, None, 0)


def test_chosen_buckets_are_kept():
    a, b, c = (ParamSpec(name, 100, "float32") for name in "abc")
    layout = layout_of_buckets("float32", 2, [[c, b], [a]])
    assert [bucket.names for bucket in layout.buckets] == [("c", "b"), ("a",)]
    assert [(bucket.start, bucket.end) for bucket in layout.buckets] == [(0, 256), (256, 512)]


def test_is_pure():
    check = "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    code = f"import sys, megatron.core.distributed.shard_layout; {check}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
