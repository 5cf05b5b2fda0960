"""Properties of the flat layout, for any shapes and up to thousands of ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp.shard_layout import (
    ALIGNMENT,
    FlatLayout,
    ParamSpec,
    bucket_size_of,
    plan_layouts,
)
from megatron.core.sharding_table import ShardOver, ShardPlace
from tests.harness.units_of_size import units_of_size

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


def in_units(specs: list[ParamSpec], size: int | None) -> list[ParamSpec]:
    """In units of at least so many elements, as far as there are any; None: one."""
    units = units_of_size({spec.name: spec.numel for spec in specs}, size or sum(s.numel for s in specs) + 1)
    return [dataclasses.replace(spec, unit=units[spec.name]) for spec in specs]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(specs_lists, st.sampled_from([1, 2, 3, 4, 7, 8, 64, 96, 1024, 4096]), sizes)
def test_layout_properties(specs, dp_size, size):
    specs = in_units(specs, size)
    layouts = plan_layouts(specs, dp_size)
    assert sorted(slot.name for layout in layouts for slot in layout.slots) == sorted(s.name for s in specs)
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
            padding, position = bucket.end - position, bucket.end
            # Cuts evenly, wastes little, and holds what one unit has.
            assert bucket.numel % (ALIGNMENT * dp_size) == 0
            assert 0 <= padding < ALIGNMENT * dp_size
            assert {by_name[name].unit for name in bucket.names} == {bucket.unit}
        assert layout.numel == position
        # Buckets follow backward order: later registered first.
        order = [name for bucket in layout.buckets for name in bucket.names]
        assert order == sorted(order, key=lambda name: -int(name[1:]))


def places(inner: int, outer: int) -> list[ShardPlace]:
    """All ranks, inner by inner and of each its outer ones: the order in which FULL parts lie."""
    return [ShardPlace(i, inner, o, outer) for i in range(inner) for o in range(outer)]


def part_at_rest(layout: FlatLayout, name: str, place: ShardPlace, cut: ShardOver) -> tuple[int, int]:
    """Elements [start, end) of the buffer at rest that are this rank's part of a parameter."""
    slot, (low, high) = layout.by_name[name], layout.part_of(name, place, cut)
    start = layout.rest_start(slot.bucket, place, cut)
    if low < high:
        start += slot.start + low - layout.shard(slot.bucket, place, cut)[0]
    return start, start + high - low


def holders(cut: ShardOver, inner: int, outer: int) -> list[ShardPlace]:
    """One rank for each part, in order."""
    of_index = {place.index(cut): place for place in reversed(places(inner, outer))}
    return [of_index[index] for index in sorted(of_index)]


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    specs_lists,
    st.sampled_from([(1, 1), (2, 1), (3, 1), (8, 1), (2, 2), (4, 3), (1, 2)]),
    sizes,
    st.sampled_from(["flat", "tensor_atomic"]),
    st.sampled_from(list(ShardOver)),
)
def test_parts_partition_every_bucket_and_every_parameter(specs, ranks, size, placement, cut):
    inner, outer = ranks
    for layout in plan_layouts(in_units(specs, size), inner * outer, placement=placement):
        ranks_of = holders(cut, inner, outer)
        assert len(ranks_of) == ranks_of[0].ways(cut)
        for bucket in layout.buckets:
            cuts = [layout.shard(bucket.index, place, cut) for place in ranks_of]
            assert cuts[0][0] == bucket.start
            assert cuts[-1][1] == bucket.end
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
            assert len({end - start for start, end in cuts}) == 1
            assert all(start % ALIGNMENT == 0 for start, _ in cuts)
        for slot in layout.slots:
            parts = [layout.part_of(slot.name, place, cut) for place in ranks_of]
            held = [part for part in parts if part[0] < part[1]]
            assert [0, *(end for _, end in held)] == [*(start for start, _ in held), slot.numel]
            for place, (low, high) in zip(ranks_of, parts, strict=True):
                start, end = layout.shard(slot.bucket, place, cut)
                if high > low:  # parameter-relative and buffer-relative views agree
                    assert start <= slot.start + low
                    assert slot.start + high <= end
                rest = part_at_rest(layout, slot.name, place, cut)
                assert rest[1] - rest[0] == high - low
        for place in ranks_of:  # a buffer at rest is its buckets' parts, one behind the other
            position = 0
            for bucket in layout.buckets:
                assert layout.rest_start(bucket.index, place, cut) == position
                start, end = layout.shard(bucket.index, place, cut)
                position += end - start
            assert position == layout.numel_at_rest(place, cut)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    specs_lists,
    st.sampled_from([(1, 1), (4, 1), (2, 2), (2, 3)]),
    sizes,
    st.sampled_from(["flat", "tensor_atomic"]),
    st.sampled_from(list(ShardOver)),
)
def test_spans_at_rest_are_the_parts_of_parameters_group_by_group(specs, ranks, size, placement, cut):
    """Every element of the buffer at rest has the group of the parameter it belongs to, or none."""
    for layout in plan_layouts(in_units(specs, size), math.prod(ranks), placement=placement):
        for place in places(*ranks):
            owner: dict[tuple[int, int], str] = {}
            for slot in layout.slots:
                start, end = part_at_rest(layout, slot.name, place, cut)
                if start < end:
                    owner[start, end] = slot.group
            spans = layout.spans_at_rest(place, cut)
            assert sum(s.end - s.start for s in spans) == sum(end - start for start, end in owner)
            assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
            for (start, end), group in owner.items():
                assert sum(s.start <= start and end <= s.end and s.group == group for s in spans) == 1
            if placement == "flat":
                assert all((a.group, a.bucket) != (b.group, b.bucket) for a, b in itertools.pairwise(spans))


def test_outer_parts_lie_inside_inner_ones_and_a_whole_buffer_is_at_rest_as_it_is():
    (layout,) = plan_layouts([ParamSpec("a", 5000, "float32"), ParamSpec("b", 100, "float32")], 6)
    for place in places(2, 3):
        inner = layout.shard(0, place, ShardOver.INNER)
        full = layout.shard(0, place, ShardOver.FULL)
        assert inner[0] <= full[0]
        assert full[1] <= inner[1]
        assert layout.spans_at_rest(place, ShardOver.NONE) == layout.spans
        assert part_at_rest(layout, "a", place, ShardOver.NONE) == (
            layout.by_name["a"].start,
            layout.by_name["a"].end,
        )
    with pytest.raises(AssertionError, match="of a layout over 6 ranks"):
        layout.shard(0, ShardPlace(0, 2), ShardOver.INNER)


unit_specs = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from(["decay", "no_decay"]),
        st.sampled_from(["embedding", "l0", "l1", "head"]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
).map(lambda rows: [ParamSpec(f"p{i}", *row) for i, row in enumerate(rows)])


@settings(derandomize=True, max_examples=120, deadline=None)
@given(unit_specs, st.sampled_from([1, 2, 6]))
def test_units_are_never_split_and_follow_backward_order(specs, dp_size):
    first = list(dict.fromkeys(spec.unit for spec in specs))
    by_name = {spec.name: spec for spec in specs}
    layouts = plan_layouts(specs, dp_size)
    kinds = {(spec.dtype, spec.trained, spec.expert) for spec in specs}
    assert len(layouts) == len(kinds)
    assert sorted(slot.name for layout in layouts for slot in layout.slots) == sorted(by_name)
    for layout in layouts:
        in_order = [bucket.unit for bucket in layout.buckets]
        assert in_order == sorted(set(in_order), key=lambda unit: -first.index(unit))  # each once
        for bucket in layout.buckets:
            members = [by_name[name] for name in bucket.names]
            kinds &= {(m.dtype, m.trained, m.expert) for m in members}
            assert {(m.dtype, m.trained) for m in members} == {(layout.dtype, layout.trained)}
            assert {m.unit for m in members} == {bucket.unit}
            assert 0 <= bucket.numel - sum(m.numel for m in members) < ALIGNMENT * dp_size


@settings(derandomize=True, max_examples=100, deadline=None)
@given(specs_lists, st.sampled_from([1, 2, 3, 8, 64]), sizes)
def test_tensor_atomic_placement_keeps_every_parameter_on_one_rank(specs, dp_size, size):
    for layout in plan_layouts(in_units(specs, size), dp_size, placement="tensor_atomic"):
        for bucket in layout.buckets:
            slots = [slot for slot in layout.slots if slot.bucket == bucket.index]
            assert sorted(slot.name for slot in slots) == sorted(bucket.names)
            assert [slot.start for slot in slots] == sorted(slot.start for slot in slots)
            assert all(a.end <= b.start for a, b in itertools.pairwise(slots))
            assert bucket.numel % (ALIGNMENT * dp_size) == 0
            loads = [0] * dp_size
            for slot in slots:
                held = [
                    place.index(ShardOver.INNER)
                    for place in places(dp_size, 1)
                    if layout.part_of(slot.name, place, ShardOver.INNER) == (0, slot.numel)
                ]
                assert slot.numel == 0 or len(held) == 1
                loads[held[0]] += slot.numel
            # Largest first is never worse than 4/3 of the best, which has at least the mean and the largest.
            best = max(sum(loads) / dp_size, max(slot.numel for slot in slots))
            part = bucket.numel // dp_size
            assert part - ALIGNMENT < max(loads) <= part
            if len(slots) <= dp_size:
                assert max(loads) == max(slot.numel for slot in slots)
            assert max(loads) <= 2 * best
            assert sum(loads) == sum(slot.numel for slot in slots) <= bucket.numel


def test_tensor_atomic_parts_are_balanced():
    specs = [ParamSpec(f"p{i}", numel, "float32") for i, numel in enumerate([700, 500, 400, 300, 128])]
    (layout,) = plan_layouts(specs, 2, placement="tensor_atomic")
    (bucket,) = layout.buckets
    held = [layout.part_of(f"p{i}", ShardPlace(0, 2), ShardOver.INNER)[1] > 0 for i in range(5)]
    assert held == [True, False, False, True, False]  # 700 + 300 here, 500 + 400 + 128 there
    assert bucket.numel == 2 * 1152  # 1028 of the fuller rank, rounded up


@settings(derandomize=True, max_examples=60, deadline=None)
@given(specs_lists, st.sampled_from([1, 4]), sizes)
def test_spans_are_long_and_cover_the_used_part(specs, dp_size, size):
    for layout in plan_layouts(in_units(specs, size), dp_size):
        group_of = {s.name: s.group for s in specs}
        for bucket in layout.buckets:
            spans = [span for span in layout.spans if span.bucket == bucket.index]
            assert len(spans) <= len({group_of[name] for name in bucket.names})
            assert sum(span.end - span.start for span in spans) == sum(
                s.numel for s in specs if s.name in bucket.names
            )
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
    assert max(slot.end for slot in layout.slots) == sum(s.numel for s in specs)


def test_bucket_sizes_from_flags():
    assert bucket_size_of(10**9, 1) == 40_000_000
    assert bucket_size_of(10**9, 64) == 64_000_000
    assert bucket_size_of(10**9, 64, 1000) == 1000
    assert bucket_size_of(1001, 64, 1000, 4) == 251
    with pytest.raises(ValueError, match="--ddp-bucket-size 0"):
        bucket_size_of(1, 1, 0)
    with pytest.raises(ValueError, match="--ddp-num-buckets 0"):
        bucket_size_of(1, 1, None, 0)


def test_experts_lie_in_buffers_of_their_own():
    """One bucket holds nothing that is reduced over other ranks than the rest of it."""
    rows = [
        ("w0", "layer0", False),
        ("expert0", "layer0", True),
        ("w1", "layer1", False),
        ("expert1", "layer1", True),
    ]
    specs = [ParamSpec(name, 100, "float32", unit=unit, expert=expert) for name, unit, expert in rows]
    experts, rest = plan_layouts(specs, 2)
    assert [slot.name for slot in experts.slots] == ["expert1", "expert0"]
    assert [slot.name for slot in rest.slots] == ["w1", "w0"]
    assert [bucket.unit for bucket in experts.buckets] == ["layer1", "layer0"]
    plain = plan_layouts([ParamSpec(name, 100, "float32", unit=unit) for name, unit, _ in rows], 2)
    assert len(plain) == 1


def test_chosen_buckets_are_kept():
    a, b, c = (ParamSpec(name, 100, "float32") for name in "abc")
    (layout,) = plan_layouts(in_units([a, b, c], 200), 2)
    assert [bucket.names for bucket in layout.buckets] == [("c", "b"), ("a",)]
    assert [(bucket.start, bucket.end) for bucket in layout.buckets] == [(0, 256), (256, 512)]


def test_is_pure():
    check = "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    code = f"import sys, megatron.core.distributed.custom_fsdp.shard_layout; {check}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
