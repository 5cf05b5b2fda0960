"""Coordinates and groups against a naive enumeration."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transport.rank_grid import AXES, RankGrid, RankGridError, dense_grid, expert_grid

SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})
ORDERS = st.permutations(AXES).map("-".join)


def naive_coordinates(sizes, order):
    """Every rank's coordinates by counting: the first axis of the order turns fastest."""
    axes = order.split("-")
    turning = itertools.product(*(range(sizes[axis]) for axis in reversed(axes)))
    return [dict(zip(reversed(axes), position, strict=True)) for position in turning]


def naive_groups(coordinates, wanted):
    found = {}
    for rank, position in enumerate(coordinates):
        key = tuple(position[axis] for axis in AXES if axis not in wanted)
        found.setdefault(key, []).append(rank)
    return {tuple(group) for group in found.values()}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(SIZES, ORDERS)
def test_coordinates_and_groups_equal_counting(sizes, order):
    world = 1
    for size in sizes.values():
        world *= size
    grid = RankGrid(world, **sizes, order=order)
    expected = naive_coordinates(sizes, order)
    assert [grid.coordinates(rank) for rank in range(world)] == expected
    assert all(grid.rank(grid.coordinates(rank)) == rank for rank in range(world))
    for axes in ("tp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-ep-dp-pp"):
        groups = grid.groups(axes)
        assert set(groups) == naive_groups(expected, axes.split("-"))
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(list(group) == sorted(group) for group in groups)
        assert all(grid.group(axes, rank) == group for group in groups[:2] for rank in group)


def test_the_published_orders():
    default = dense_grid(8, tp=2, pp=2)
    assert default.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert default.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert default.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    swapped = dense_grid(8, tp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert swapped.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert swapped.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_experts_have_a_grid_of_their_own_over_the_same_ranks():
    dense, experts = dense_grid(16, tp=4, pp=2), expert_grid(16, etp=1, ep=8, pp=2)
    assert (dense.dp, experts.dp) == (2, 1)
    assert experts.groups("ep") == (tuple(range(8)), tuple(range(8, 16)))
    assert dense.groups("pp") == experts.groups("pp")


def test_16384_ranks_have_every_rank_in_one_group_of_each_axis():
    grid = dense_grid(16384, tp=8, cp=2, pp=16)
    for axes in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp"):
        groups = grid.groups(axes)
        assert len(groups) * len(groups[0]) == 16384
        assert sum(map(sum, groups)) == sum(range(16384))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dense_grid(6, tp=4), "6 ranks cannot be divided into tensor 4 x pipeline 1 x context 1 = 4"),
        (lambda: expert_grid(6, ep=4), "expert 4"),
        (lambda: RankGrid(8, tp=2), "= 2 ranks, not 8"),
        (lambda: RankGrid(2, tp=2, order="tp-tp"), "at most once"),
        (lambda: RankGrid(2, tp=2, order="tp-xp"), "at most once"),
        (lambda: RankGrid(2, dp=2, order="tp-pp"), "lacks axis dp of size 2"),
        (lambda: RankGrid(0, tp=0), "at least 1"),
        (lambda: dense_grid(4, tp=0), "cannot be divided"),
    ],
)
def test_sizes_that_make_no_grid_are_refused(make, words):
    with pytest.raises(RankGridError, match=words):
        make()
