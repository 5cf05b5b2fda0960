"""Coordinates and groups against a naive enumeration."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transport.rank_grid import (
    AXES,
    PURPOSES,
    RankGrid,
    RankGridError,
    WorldPart,
    dense_grid,
    expert_grid,
)

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


FOLDED = [  # tp, pp, ep, etp, order, ep_etp of rank 5, expert_dp_reduce of rank 5, in a world of 16 ranks
    (1, 1, 2, 1, "tp-cp-ep-dp-pp", (4, 5), (1, 3, 5, 7, 9, 11, 13, 15)),
    (1, 1, 8, 1, "tp-cp-ep-dp-pp", (0, 1, 2, 3, 4, 5, 6, 7), (5, 13)),
    (1, 1, 4, 2, "tp-cp-ep-dp-pp", (0, 1, 2, 3, 4, 5, 6, 7), (5, 13)),
    (2, 1, 2, 1, "tp-cp-ep-dp-pp", (4, 5), (1, 3, 5, 7, 9, 11, 13, 15)),
    (2, 1, 4, 2, "tp-cp-ep-dp-pp", (0, 1, 2, 3, 4, 5, 6, 7), (5, 13)),
    (4, 1, 2, 1, "tp-cp-ep-dp-pp", (4, 5), (1, 3, 5, 7, 9, 11, 13, 15)),
    (4, 1, 1, 1, "tp-cp-ep-dp-pp", (5,), tuple(range(16))),
    (2, 2, 4, 1, "tp-cp-ep-dp-pp", (4, 5, 6, 7), (1, 5)),
    (2, 2, 8, 1, "tp-cp-ep-dp-pp", (0, 1, 2, 3, 4, 5, 6, 7), (5,)),
    (4, 2, 4, 1, "tp-cp-ep-pp-dp", (4, 5, 6, 7), (5, 13)),
    (4, 2, 2, 2, "tp-cp-ep-pp-dp", (4, 5, 6, 7), (5, 13)),
    (1, 4, 4, 1, "tp-cp-ep-dp-pp", (4, 5, 6, 7), (5,)),
]


@pytest.mark.parametrize(("tp", "pp", "ep", "etp", "order", "sent_to", "same_experts"), FOLDED)
def test_experts_are_folded_over_the_ranks_of_a_stage_as_megatron_numbers_them(
    tp, pp, ep, etp, order, sent_to, same_experts
):
    dense = dense_grid(16, tp=tp, pp=pp, order=order)
    part = WorldPart(tuple(range(16)), dense, 1, expert_grid(16, etp=etp, ep=ep, pp=pp, order=order))
    groups = {one.name: part.own_ranks(one, 5) for one in PURPOSES}
    assert (groups["ep_etp"], groups["expert_dp_reduce"]) == (sent_to, same_experts)
    assert len(groups["stage"]) == 16 // pp
    assert set(sent_to) | set(same_experts) <= set(groups["stage"])


def _folded_worlds(world):
    """(tp, cp, pp, ep, etp) that divide a world."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for tp, cp, pp, ep, etp in itertools.product(sizes, repeat=5):
        if world % (tp * cp * pp) == 0 and world % (ep * etp * pp) == 0:
            yield tp, cp, pp, ep, etp


def _check_folded(world, tp, cp, pp, ep, etp, ranks):
    part = WorldPart(
        tuple(range(world)),
        dense_grid(world, tp=tp, cp=cp, pp=pp),
        1,
        expert_grid(world, ep=ep, etp=etp, pp=pp),
    )
    dense, experts = part.grid, part.experts
    assert world // pp == dense.size("tp-cp-dp") == experts.size("tp-ep-dp")
    for purpose in PURPOSES:
        for rank in ranks:
            own = part.own_ranks(purpose, rank)
            assert rank in own
            assert all(part.own_ranks(purpose, other) == own for other in (own[0], own[-1]))
            if purpose.name in ("ep", "etp", "ep_etp", "expert_dp_reduce", "dp_reduce", "tp", "stage"):
                assert len({dense.coordinates(other)["pp"] for other in own}) == 1


@pytest.mark.parametrize("world", [8, 16, 24, 64])
def test_foldings_of_a_world_have_stages_alike(world):
    settings = list(_folded_worlds(world))
    for setting in settings[:: 1 + len(settings) // 60]:
        _check_folded(world, *setting, ranks=(0, world // 2 - 1, world - 1))


@pytest.mark.full
@pytest.mark.parametrize("world", [8, 16, 24, 64])
def test_every_folding_of_a_world_has_stages_alike(world):
    for setting in _folded_worlds(world):
        _check_folded(world, *setting, ranks=(0, world // 2 - 1, world - 1))


def test_foldings_of_16384_ranks():
    for setting in ((8, 1, 16, 64, 1), (8, 2, 8, 8, 8), (1, 1, 16, 128, 1), (4, 1, 4, 2, 2)):
        _check_folded(16384, *setting, ranks=(0, 5000, 16383))


def test_groups_of_a_purpose_divide_the_world():
    dense, experts = dense_grid(24, tp=2, pp=2), expert_grid(24, ep=3, etp=2, pp=2)
    part = WorldPart(tuple(range(24)), dense, 2, experts)
    for purpose in PURPOSES:
        lists = part.rank_lists(purpose)
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(24))
        assert all(part.own_ranks(purpose, rank) == ranks for ranks in lists for rank in ranks)


def test_grids_that_do_not_fit_each_other_are_refused():
    order = "tp-cp-ep-pp-dp"
    part = WorldPart(
        tuple(range(16)),
        dense_grid(16, tp=2, pp=2, order=order),
        1,
        expert_grid(16, ep=4, pp=2, order=order),
    )
    ep = next(one for one in PURPOSES if one.name == "ep")
    with pytest.raises(
        RankGridError, match="--use-tp-pp-dp-mapping with expert tensor 1 x expert 4 = 4 ranks"
    ):
        part.own_ranks(ep, 0)
    part = WorldPart(tuple(range(16)), dense_grid(16), 4, expert_grid(16, ep=8))
    with pytest.raises(
        RankGridError, match="number of ranks that hold the same experts, 2; choose one of 1, 2"
    ):
        part.own_ranks(ep, 0)


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
