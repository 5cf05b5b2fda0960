"""Groups by purpose agree with the pure grid, on real ranks."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time

import pytest
import torch

from megatron.core.transport import collectives, parallel_state
from megatron.core.transport.parallel_state import (
    destroy_process_group,
    init_process_group,
    make_parallel_state,
    single_process,
)
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.rank_grid import (
    PURPOSES,
    TP_PP_DP_ORDER,
    RankGrid,
    RankGridError,
    WorldPart,
    expert_grid,
)
from tests.harness.ranks import rank_outcomes, run_ranks, share_ranks


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
            "pp": (ps.pp_rank, ps.pp_size),
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
        assert got["pp"] == (0, 1)
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


@pytest.mark.grid
def test_every_purpose_talks_to_its_rank_list_and_to_nobody_else():
    layouts = {
        "tp2_dp2_pp2": {"tp": 2, "dp": 2, "pp": 2},
        "pp_before_dp": {"tp": 2, "dp": 2, "pp": 2, "order": TP_PP_DP_ORDER},
        "hybrid": {"dp": 4, "pp": 2, "instances": 2},
        "pp4": {"dp": 2, "pp": 4},
        "experts": {"tp": 2, "dp": 2, "pp": 2, "experts": expert_grid(8, ep=4, pp=2)},
        "experts_hybrid": {"tp": 2, "dp": 4, "experts": expert_grid(8, ep=2), "instances": 2},
    }

    def talk(arguments):
        def check(ctx):
            ps = ctx.make_ps(**arguments)
            heard = {}
            own = {name: group for name, group in ps.groups.items() if group.purpose == name}
            for name, group in own.items():
                mine = torch.zeros(8)
                mine[ctx.rank] = 1
                collectives.all_reduce(mine, group)
                heard[name] = tuple(mine.nonzero().flatten().tolist())
                assert (group.process_group is None) == (group.size == 1)
                assert group.ranks[group.rank] == ctx.rank
            handles = [id(g.process_group) for g in own.values() if g.process_group is not None]
            return heard, len(handles) - len(set(handles))

        return check

    got = share_ranks(8, {name: talk(arguments) for name, arguments in layouts.items()})
    for name, arguments in layouts.items():
        sizes = dict(arguments)
        instances, experts = sizes.pop("instances", 1), sizes.pop("experts", None)
        world = WorldPart(tuple(range(8)), RankGrid(8, **sizes), instances, experts)
        for rank, (heard, shared) in enumerate(got[name]):
            own = [purpose for purpose in PURPOSES if world.shared_purpose(purpose) is None]
            assert list(heard) == [purpose.name for purpose in own]
            for purpose in own:
                assert heard[purpose.name] == world.own_ranks(purpose, rank), (name, purpose.name)
            assert shared == 0  # each of these has a communicator of its own


def test_properties_name_their_purposes():
    ps = single_process()
    for purpose in PURPOSES:
        assert getattr(ps, f"{purpose.name}_group") is ps.groups[purpose.name]


def test_instances_must_divide_dp():
    def body(ctx):
        with pytest.raises(RankGridError, match="--num-distributed-optimizer-instances 3 does not divide"):
            ctx.make_ps(dp=2, instances=3)

    run_ranks(body, 2)


@pytest.mark.parametrize(("dies", "named"), [("rendezvous", "default"), ("dp_gather", "dp_gather")])
def test_a_peer_that_dies_while_groups_are_made_is_a_lost_peer(tmp_path, dies, named):
    def body(ctx):
        dist = torch.distributed
        dist.destroy_process_group()  # the harness's own
        make = dist.new_group

        def new_group(*arguments, group_desc, **options):
            if ctx.rank == 1 and group_desc == dies:
                time.sleep(0.5)  # the others are through with the group before
                os._exit(9)
            return make(*arguments, group_desc=group_desc, **options)

        dist.new_group = new_group
        timeout = datetime.timedelta(seconds=1 if dies == "rendezvous" else 3)  # nobody else comes at all
        if ctx.rank == 1 and dies == "rendezvous":
            os._exit(9)
        seen = []
        try:
            init_process_group(
                ctx.device,
                rank=ctx.rank,
                world_size=3,
                timeout=timeout,
                init_method=f"file://{tmp_path}/meet",
            )
            make_parallel_state(RankGrid(3, dp=3), ctx.device, timeout, lambda *call: seen.append(call[:2]))
        except PeerLostError as error:
            words = f"CAUGHT {error.purpose}|{error.status}|{seen[-1:]}|{error}"
            raise AssertionError(words) from None  # the harness does not wait for a rank that failed

    outcomes = rank_outcomes(body, 3, timeout=30)
    assert outcomes[1].died == "exited with status 9 without returning"
    for rank in (0, 2):
        error = outcomes[rank].error or ""
        assert f"CAUGHT {named}|6|" in error, error
        assert f"rank {rank}: lost a peer in " in error
        if named != "default":
            assert f"[('new_group', '{named}')]" in error  # what a watchdog would have been told last


def test_the_groups_of_one_rank_in_16384(monkeypatch):
    """The real calls in a world of torch's fake backend: a rank of a middle stage."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr("megatron.core.transport.parallel_state._backend", lambda purpose, device: "fake")

    def body(ctx):
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", rank=5000, world_size=16384, store=FakeStore())
        grid = RankGrid(16384, tp=8, pp=16, dp=128)
        ps = make_parallel_state(grid, ctx.device, num_distributed_optimizer_instances=4)
        sizes = {name: group.size for name, group in ps.groups.items()}
        torch.distributed.destroy_process_group()
        return sizes, ps.coordinates["pp"], ps.tp_group.ranks

    ((sizes, pp_rank, tp_ranks),) = run_ranks(body, 1)
    own = {one.name: sizes[one.name] for one in PURPOSES if not one.shared_with}
    assert own == {
        "world": 16384, "control": 16384, "dp": 128, "dp_reduce": 32, "dp_gather": 32, "dp_outer": 4,
        "tp": 8, "mp": 128, "pp": 16, "pp_forward": 16, "pp_backward": 16, "embedding": 1, "ep": 1,
    }  # fmt: skip
    assert (pp_rank, tp_ranks) == (4, tuple(range(5000, 5008)))


def test_gradients_and_parameters_talk_on_nccls_high_priority_streams(monkeypatch):
    """By the options that torch is given; tests/gpu shows the streams."""
    import types

    asked = {}

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream

    def new_group(ranks, timeout, backend, *, group_desc, pg_options=None):
        asked[group_desc] = (backend, pg_options)
        return object()

    monkeypatch.setattr(
        parallel_state.dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=Options), raising=False
    )
    monkeypatch.setattr(parallel_state.dist, "new_group", new_group)
    monkeypatch.setattr(parallel_state.dist, "barrier", lambda group: None)
    timeout = datetime.timedelta(seconds=9)
    for purpose in PURPOSES:
        for backend in ("gloo", "nccl"):
            parallel_state._make_communicator(purpose, [(0, 1)], (0, 1), backend, timeout)
            used, options = asked[purpose.name]
            assert used == backend
            wanted = backend == "nccl" and purpose.name.endswith(("dp_reduce", "dp_gather"))
            assert (options is not None) == wanted
            if options is not None:
                assert options.is_high_priority_stream
                assert options._timeout == timeout
