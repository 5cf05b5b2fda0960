"""Groups by purpose agree with the pure grid, on real ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core import collectives
from megatron.core.parallel_state import PURPOSES, destroy_process_group, init_process_group, single_process
from megatron.core.rank_grid import RankGrid
from tests.harness.ranks import run_ranks


def test_groups_and_coordinates_follow_the_grid():
    def body(ctx):
        ps = ctx.make_ps(tp=2, dp=2)
        mine = torch.zeros(4)
        mine[ctx.rank] = 1
        collectives.all_reduce(mine, ps.dp_group)
        world = torch.tensor([float(ctx.rank)])
        collectives.all_reduce(world, ps.world_group, "max")
        shared = ps.group("dp").process_group is ps.group("dp_reduce").process_group
        return {
            "dp": (ps.dp_rank, ps.dp_size, ps.dp_group.ranks, ps.dp_group.rank),
            "tp": (ps.tp_rank, ps.tp_size),
            "pp": (ps.pp_rank, ps.pp_size, ps.cp_rank, ps.cp_size),
            "talked_to": mine.nonzero().flatten().tolist(),
            "world": world.item(),
            "ends": (ps.is_first_rank, ps.is_last_rank),
            "shared_communicator": shared,
        }

    grid = RankGrid(4, tp=2, dp=2)
    for rank, got in enumerate(run_ranks(body, 4)):
        peers = grid.group("dp", rank)
        coordinates = grid.coordinates(rank)
        assert got["dp"] == (coordinates["dp"], 2, peers, peers.index(rank))
        assert got["tp"] == (coordinates["tp"], 2)
        assert got["pp"] == (0, 1, 0, 1)
        assert got["talked_to"] == sorted(peers)
        assert got["world"] == 3
        assert got["ends"] == (rank == 0, rank == 3)
        assert not got["shared_communicator"]


def test_axis_of_one_has_no_communicator():
    def body(ctx):
        ps = ctx.make_ps(tp=2)
        return ps.dp_group.process_group is None, ps.dp_group.ranks, ps.world_group.size

    assert run_ranks(body, 2) == [(True, (0,), 2), (True, (1,), 2)]


def test_single_process_needs_no_process_group_and_is_frozen():
    ps = single_process()
    assert (ps.rank, ps.world_size, ps.dp_size, ps.tp_rank, ps.is_last_rank) == (0, 1, 1, 0, True)
    assert set(ps.groups) == {purpose.name for purpose in PURPOSES}
    assert not torch.distributed.is_initialized()
    destroy_process_group(ps)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ps.rank = 1
    with pytest.raises(TypeError):
        ps.groups["dp"] = None
    with pytest.raises(AssertionError, match="no group 'nope'"):
        ps.group("nope")


def test_grid_and_world_must_agree():
    def body(ctx):
        from megatron.core.parallel_state import make_parallel_state

        with pytest.raises(AssertionError, match="world of 2 ranks, grid for 4"):
            make_parallel_state(RankGrid(4, dp=4), ctx.device)

    run_ranks(body, 2)


def test_init_and_destroy_through_a_file(tmp_path):
    def body(ctx):
        torch.distributed.destroy_process_group()  # the harness's own
        init_process_group(
            ctx.device, rank=ctx.rank, world_size=2, init_method=f"file://{tmp_path}/meet", backend="gloo"
        )
        total = torch.tensor([float(ctx.rank + 1)])
        collectives.all_reduce(total, ctx.ps.world_group)
        destroy_process_group(ctx.ps)
        return total.item(), torch.distributed.is_initialized()

    assert run_ranks(body, 2) == [(3.0, False), (3.0, False)]
