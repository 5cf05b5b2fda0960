"""The rank lists of every purpose against their definition over coordinates, and at 16,384 ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transport.rank_grid import (
    AXES,
    DEFAULT_ORDER,
    PURPOSES,
    TP_PP_DP_ORDER,
    MeshError,
    RankGrid,
    RankGridError,
    WorldPart,
    dense_grid,
    parts_from_places,
)

BY_NAME = {purpose.name: purpose for purpose in PURPOSES if not purpose.shared_with}
ORDERS = (DEFAULT_ORDER, TP_PP_DP_ORDER)


def rank_lists(purpose, grid, instances=1):
    return tuple(WorldPart(tuple(range(grid.world_size)), grid, instances).rank_lists(purpose))


def own_ranks(purpose, grid, rank, instances=1):
    return WorldPart(tuple(range(grid.world_size)), grid, instances).own_ranks(purpose, rank)


def talk(name, a, b, grid, instances):
    """Do ranks at coordinates a and b share a group? By the words of the table, one purpose at a time."""

    def same_but(*axes):
        return all(a[axis] == b[axis] for axis in AXES if axis not in axes)

    size, place, other = grid.dp * grid.cp, a["dp"] * grid.cp + a["cp"], b["dp"] * grid.cp + b["cp"]
    share = size // instances
    ends = {0, grid.pp - 1}
    return {
        "world": True,
        "control": True,
        "dp": same_but("dp"),
        "dp_reduce": same_but("dp", "cp") and place // share == other // share,
        "dp_gather": same_but("dp", "cp") and place // share == other // share,
        "dp_outer": same_but("dp", "cp") and place % share == other % share,
        "tp": same_but("tp"),
        "mp": same_but("tp", "pp"),
        "pp": same_but("pp"),
        "pp_forward": same_but("pp"),
        "pp_backward": same_but("pp"),
        "ep": same_but("ep"),
        "embedding": a == b or (same_but("pp") and {a["pp"], b["pp"]} <= ends),
    }[name]


@st.composite
def grids(draw):
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("tp", "cp", "pp")}
    dp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    world = dp * sizes["tp"] * sizes["cp"] * sizes["pp"]
    grid = dense_grid(world, **sizes, order=draw(st.sampled_from(ORDERS)))
    return grid, draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))


@pytest.mark.grid
@settings(max_examples=25, derandomize=True, deadline=None)
@given(grids())
def test_every_purpose_partitions_the_ranks_into_those_that_the_table_says(drawn):
    grid, instances = drawn
    coordinates = [grid.coordinates(rank) for rank in range(grid.world_size)]
    for purpose in BY_NAME.values():
        lists = rank_lists(purpose, grid, instances)
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(grid.world_size))
        for ranks in lists:
            assert list(ranks) == sorted(ranks)
            for rank in ranks[:2]:
                friends = [
                    other
                    for other in range(grid.world_size)
                    if talk(purpose.name, coordinates[rank], coordinates[other], grid, instances)
                ]
                assert friends == list(ranks), purpose.name
                assert own_ranks(purpose, grid, rank, instances) == ranks


@settings(max_examples=25, derandomize=True, deadline=None)
@given(grids())
def test_inner_times_outer_is_dp_in_its_order(drawn):
    grid, instances = drawn
    for rank in range(grid.world_size):
        outer = own_ranks(BY_NAME["dp_outer"], grid, rank, instances)
        inner = [own_ranks(BY_NAME["dp_reduce"], grid, other, instances) for other in outer]
        assert len(outer) == instances
        assert tuple(r for ranks in inner for r in ranks) == grid.group("dp-cp", rank)


def test_the_published_orders_by_hand():
    default = dense_grid(8, tp=2, pp=2)
    swapped = dense_grid(8, tp=2, pp=2, order=TP_PP_DP_ORDER)
    assert rank_lists(BY_NAME["mp"], default) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert rank_lists(BY_NAME["mp"], swapped) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert own_ranks(BY_NAME["dp_reduce"], dense_grid(8), 5, 2) == (4, 5, 6, 7)
    assert own_ranks(BY_NAME["dp_outer"], dense_grid(8), 5, 2) == (1, 5)
    four = dense_grid(8, tp=2, pp=4)
    assert rank_lists(BY_NAME["embedding"], four) == ((0, 6), (2,), (4,), (1, 7), (3,), (5,))


def test_all_groups_of_16384_ranks():
    for order in ORDERS:
        grid = dense_grid(16384, tp=8, pp=16, order=order)
        lists = {purpose.name: rank_lists(purpose, grid, 4) for purpose in PURPOSES}
        for name, found in lists.items():
            seen = [rank for ranks in found for rank in ranks]
            assert len(seen) == 16384 == len(set(seen)), name
        assert {name: len(found) for name, found in lists.items() if name.startswith("dp")} == {
            "dp": 128, "dp_reduce": 512, "dp_gather": 512, "dp_outer": 4096,
        }  # fmt: skip
        assert len(lists["embedding"]) == 1024 + 14 * 1024
        for rank in (0, 5000, 16383):
            for purpose in PURPOSES:
                assert own_ranks(purpose, grid, rank, 4) in set(lists[purpose.name])


@pytest.mark.parametrize("instances", [0, 4, -2])
def test_instances_that_do_not_divide_dp_are_refused(instances):
    grid = RankGrid(12, tp=2, dp=6)
    words = f"--num-distributed-optimizer-instances {instances} .* size 6; choose one of 1, 2, 3, 6"
    for find in (rank_lists, lambda *arguments: own_ranks(*arguments[:2], 0, arguments[2])):
        with pytest.raises(RankGridError, match=words):
            find(BY_NAME["tp"], grid, instances)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.permutations(range(12)),
    st.lists(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (4, 4)]), max_size=3),
)
def test_meshes_are_put_together_from_what_their_ranks_tell(order, shapes):
    """Any ranks in any order in meshes of any sizes; those left over are in none."""
    told, meshes, start = [(-1, 0, 0, 0)] * 12, {}, 0
    for size, outer in shapes:
        ranks = tuple(order[start : start + size])
        start += size
        meshes[ranks] = outer
        for place, rank in enumerate(ranks):
            told[rank] = (ranks[0], place, size, outer)
    parts = parts_from_places(told)
    assert {part.ranks: part.instances for part in parts} == meshes
    for part in parts:
        outer, size = part.instances, len(part.ranks)
        rows = [part.ranks[i : i + size // outer] for i in range(0, size, size // outer)]
        assert part.rank_lists(BY_NAME["dp_gather"]) == rows
        assert set(part.rank_lists(BY_NAME["dp_outer"])) == set(zip(*rows, strict=True))
        for row in rows:
            for place, rank in enumerate(row):
                assert part.own_ranks(BY_NAME["dp_reduce"], rank) == row
                assert part.own_ranks(BY_NAME["dp_outer"], rank) == tuple(other[place] for other in rows)
                assert part.own_ranks(BY_NAME["world"], rank) == part.ranks
                assert part.own_ranks(BY_NAME["tp"], rank) == (rank,)


def test_meshes_that_overlap_or_lack_a_rank_are_refused():
    whole = (0, 0, 2, 1), (0, 1, 2, 1)
    assert parts_from_places(whole) == [WorldPart((0, 1), RankGrid(2, dp=2))]
    lacking = ((0, 0, 2, 1), (-1, 0, 0, 0))
    overlapping = ((0, 0, 2, 1), (1, 0, 2, 1), (1, 1, 2, 1))
    twice = ((0, 0, 2, 1), (0, 0, 2, 1))
    for told in (lacking, overlapping, twice):
        with pytest.raises(
            MeshError, match=r"the mesh of 2 ranks from rank 0 is that of ranks \[[01]\] only"
        ):
            parts_from_places(told)
