"""Belady's choice of gaps against brute force, and the laws of how often a unit is gathered."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.held.row_uses import Gap, RowUses
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.passes.belady import keep_gaps
from megatron.core.pipeline_parallel.plan.request import Request
from tests.harness.unit_stages import W_BYTES, layers

UNITS = 16  # a rank


@st.composite
def problems(draw, sizes):
    moments = draw(st.integers(1, 8))
    spans = st.tuples(st.integers(0, moments), st.integers(0, moments)).map(sorted)
    found = draw(st.lists(st.tuples(spans, sizes), max_size=9))
    gaps = [Gap(start, end, size, number, 0, True) for number, ((start, end), size) in enumerate(found)]
    capacity = draw(st.lists(st.integers(-1, 6), min_size=moments, max_size=moments))
    return gaps, capacity


def fits(gaps, capacity):
    held = [sum(gap.size for gap in gaps if gap.start <= at < gap.end) for at in range(len(capacity))]
    return all(have <= max(room, 0) for have, room in zip(held, capacity, strict=True))


def most_saved(gaps, capacity):
    subsets = itertools.chain.from_iterable(
        itertools.combinations(gaps, count) for count in range(len(gaps) + 1)
    )
    return max(sum(gap.size for gap in kept) for kept in subsets if fits(kept, capacity))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(st.just(1)))
def test_units_of_one_size_are_kept_as_well_as_can_be(problem):
    gaps, capacity = problem
    kept = keep_gaps(gaps, capacity)
    assert fits(kept, capacity)
    assert len(kept) == most_saved(gaps, capacity)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(st.integers(1, 4)))
def test_units_of_several_sizes_fit_and_leave_no_room_for_another(problem):
    gaps, capacity = problem
    kept = keep_gaps(gaps, capacity)
    assert fits(kept, capacity)
    assert not any(fits([*kept, gap], capacity) for gap in gaps if gap not in kept)


def gathers(plan, share):
    """A unit and step on average, where this share of a rank's weights is kept besides those in use."""
    mean = 0.0
    stages = [layers(stage, UNITS // plan.placement.num_chunks) for stage in range(plan.placement.num_stages)]
    for rank, row in enumerate(plan.rows):
        uses = RowUses(row, RankUnits(rank, plan.placement, stages))
        weights, _ = uses.gaps
        kept = keep_gaps(weights, [share * UNITS * W_BYTES] * uses.num_moments)
        mean += (sum(map(len, uses.reads)) - len(kept)) / UNITS / len(plan.rows)
    return mean


def check_law(plan, groups, share, *, below=0.12):
    """1 + (2 groups - 1)(1 - share): what is in use counts for a unit more or less of what is kept."""
    found = gathers(plan, share)
    least, most = (1 + (2 * groups - 1) * (1 - one) for one in (share + 1 / UNITS, share))
    assert (1 - below) * least <= found <= 1.12 * most, (plan.schedule, share, found, least, most)


def check_linear_and_v(sizes):
    for p, m in sizes:
        for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4):
            for name in ("1f1b", "zb-h1", "zb-1p"):
                check_law(build_plan(name, Request(p, m)), m, share, below=0.02)
            for name in ("zbv", "v-half", "v-min", "dualpipe-v"):
                if name == "dualpipe-v" and m < 2 * p:
                    continue
                # Beginning and end of a V go through one chunk many times: with few microbatches fewer gathers do.
                few = m < 8 * p
                check_law(build_plan(name, Request(p, m)), m, share, below=0.55 if few else 0.12)


def check_grouped(sizes):
    for p, m in sizes:
        for chunks, share in itertools.product((4, 8), (1 / 4, 1 / 2, 3 / 4)):
            if share < 2 / chunks:
                continue
            for name, group in (
                ("interleaved", p),
                ("interleaved", 2 * p),
                ("gis", math.ceil(p / 2)),
                ("gis", p),
            ):
                if m % group == 0:
                    check_law(build_plan(name, Request(p, m, chunks, group)), m / group, share)


def test_gather_laws():
    check_linear_and_v([(2, 8), (2, 16), (4, 8)])
    check_grouped([(2, 8), (4, 16)])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_gather_laws_of_large_pipelines(p):
    check_linear_and_v([(p, m) for m in (p, 2 * p, 4 * p, 8 * p)])
    check_grouped([(p, m) for m in (2 * p, 4 * p, 8 * p)])
