"""States out of torch's meshes and meshes out of states, on real ranks."""

from __future__ import annotations

import datetime

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.transport import collectives
from megatron.core.transport.mesh import data_parallel_state, device_mesh, parallel_state_of_mesh
from megatron.core.transport.rank_grid import PURPOSES, MeshError
from tests.harness.ranks import run_ranks, share_ranks


def test_torch_meshes_are_views_of_our_groups():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    def mesh_of_all_axes(ctx):
        ps = ctx.make_ps(tp=2, dp=2, pp=2)
        mesh = device_mesh(ps, "pp", "dp", "tp")
        assert mesh.mesh.flatten().tolist() == list(range(8))  # the default order, slowest first
        assert mesh.get_coordinate() == (ps.pp_rank, ps.dp_rank, ps.tp_rank)
        assert all(mesh.get_group(axis) is ps.group(axis).process_group for axis in ("pp", "dp", "tp"))
        turned = device_mesh(ps, "tp", "pp")
        assert sorted(turned.mesh.flatten().tolist()) == list(ps.mp_group.ranks)
        assert turned.get_coordinate() == (ps.tp_rank, ps.pp_rank)
        with pytest.raises(AssertionError, match="not independent"):
            device_mesh(ps, "tp", "mp")

    def tensors_and_modules(ctx):
        ps = ctx.make_ps(tp=2, dp=4)
        whole = torch.arange(12.0).view(6, 2)
        part = distribute_tensor(whole, device_mesh(ps, "dp", "tp")["tp"], [Shard(0)])
        assert torch.equal(part.to_local(), whole.chunk(2)[ps.tp_rank])
        assert torch.equal(part.full_tensor(), whole)
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 8)
        fully_shard(linear, mesh=device_mesh(ps, "dp"))
        linear(torch.full((1, 4), float(ps.dp_rank))).sum().backward()
        assert linear.weight.to_local().shape == (2, 4)
        return linear.weight.grad.full_tensor().unique().tolist()

    def hybrid(ctx):
        ps = ctx.make_ps(dp=8, instances=2)
        mesh = device_mesh(ps, "dp_outer", "dp_gather")
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(AssertionError, match=r"\['tp'\] have one rank"):
            device_mesh(ps, "dp", "tp")

    checks = (mesh_of_all_axes, tensors_and_modules, hybrid)
    got = share_ranks(8, {check.__name__: check for check in checks})
    assert got["tensors_and_modules"] == [[1.5]] * 8  # mean of 0, 1, 2, 3: torch summed over our dp


def test_a_mesh_does_not_make_communicators():
    def body(ctx):
        ps = ctx.make_ps(tp=2, dp=2)
        before = torch.distributed.get_pg_count()
        device_mesh(ps, "dp", "tp")
        device_mesh(ps, "tp")
        return torch.distributed.get_pg_count() - before

    assert run_ranks(body, 4) == [0] * 4


def heard_over(ps, purposes):
    """Which ranks of torch's world one hears of over each purpose."""
    heard = {}
    for purpose in purposes:
        group = ps.group(purpose)
        mine = torch.zeros(torch.distributed.get_world_size())
        mine[torch.distributed.get_rank()] = 1
        collectives.all_reduce(mine, group)
        heard[purpose] = mine.nonzero().flatten().tolist()
        assert sorted(group.ranks) == heard[purpose]
        gathered = torch.empty(group.size, dtype=torch.int64)
        collectives.all_gather(gathered, torch.tensor([torch.distributed.get_rank()]), group)
        assert gathered.tolist() == list(group.ranks)  # in the communicator's own order
    return heard


DP_PURPOSES = ("world", "control", "dp", "dp_reduce", "dp_gather", "dp_outer")


def test_a_mesh_becomes_a_state():
    def told(ps):
        own = {name: group for name, group in ps.groups.items() if group.purpose == name}
        others = {name for name, group in own.items() if group.size == 1}
        handles = [group.process_group for group in own.values() if group.process_group is not None]
        assert len({id(handle) for handle in handles}) == len(handles)
        return (ps.rank, ps.world_size, ps.dp_rank, ps.dp_size), heard_over(ps, DP_PURPOSES), others

    def whole_world(ctx):
        return told(parallel_state_of_mesh(init_device_mesh("cpu", (4,))))

    def two_halves(ctx):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["dp"]
        ps = parallel_state_of_mesh(mesh, timeout=datetime.timedelta(seconds=20))
        total = torch.tensor([1.0 + ctx.rank])
        collectives.sum_gradients(total.repeat(2), ps.dp_reduce_group).wait()
        view = device_mesh(ps, "dp")
        assert view.mesh.tolist() == mesh.mesh.tolist()
        assert ps.dp_group.timeout == datetime.timedelta(seconds=20)
        return told(ps)

    def columns(ctx):
        return told(
            parallel_state_of_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
        )

    def hybrid(ctx):
        ps = parallel_state_of_mesh(init_device_mesh("cpu", (2, 2)))
        assert device_mesh(ps, "dp_outer", "dp_gather").mesh.tolist() == [[0, 1], [2, 3]]
        return told(ps)

    def hybrid_in_an_order_of_its_own(ctx):
        return told(parallel_state_of_mesh(DeviceMesh("cpu", [[2, 0], [3, 1]])))

    def one_and_three(ctx):
        """Meshes of different sizes; one rank is alone in its own."""
        DeviceMesh("cpu", [0])
        meshes = (
            DeviceMesh("cpu", [0], _init_backend=False),
            DeviceMesh("cpu", [1, 2, 3], _init_backend=False),
        )
        return told(parallel_state_of_mesh(meshes[ctx.rank > 0]))

    def default_group(ctx):
        return told(data_parallel_state())

    checks = (
        whole_world,
        two_halves,
        columns,
        hybrid,
        hybrid_in_an_order_of_its_own,
        one_and_three,
        default_group,
    )
    got = share_ranks(4, {check.__name__: check for check in checks})
    everyone = [0, 1, 2, 3]
    singles = {purpose.name for purpose in PURPOSES if not purpose.shared_with} - set(DP_PURPOSES)
    for rank in everyone:
        for name in ("whole_world", "default_group"):
            place, heard, alone = got[name][rank]
            assert place == (rank, 4, rank, 4)
            assert heard == {**dict.fromkeys(DP_PURPOSES, everyone), "dp_outer": [rank]}
            assert alone == singles | {"dp_outer"}
        for name, mine in (
            ("two_halves", [rank // 2 * 2, rank // 2 * 2 + 1]),
            ("columns", [rank % 2, rank % 2 + 2]),
        ):
            place, heard, alone = got[name][rank]
            assert place == (mine.index(rank), 2, mine.index(rank), 2)
            assert heard == {**dict.fromkeys(DP_PURPOSES, mine), "dp_outer": [rank]}
            assert alone == singles | {"dp_outer"}
        for name, order in (("hybrid", [0, 1, 2, 3]), ("hybrid_in_an_order_of_its_own", [2, 0, 3, 1])):
            place, heard, alone = got[name][rank]
            at = order.index(rank)
            inner, outer = sorted(order[at // 2 * 2 :][:2]), sorted(order[at % 2 :: 2])
            assert place == (at, 4, at, 4)
            assert heard == {
                **dict.fromkeys(DP_PURPOSES, everyone),
                "dp_reduce": inner,
                "dp_gather": inner,
                "dp_outer": outer,
            }
            assert alone == singles
        mine = [0] if rank == 0 else [1, 2, 3]
        assert got["one_and_three"][rank][:2] == (
            (mine.index(rank), len(mine), mine.index(rank), len(mine)),
            {**dict.fromkeys(DP_PURPOSES, mine), "dp_outer": [rank]},
        )


def test_meshes_that_make_no_state_are_refused_on_the_ranks_that_gave_them():
    def body(ctx):
        with pytest.raises(MeshError, match=r"a mesh of 3 dims \(1, 2, 2\).*mesh\['dp'\]"):
            parallel_state_of_mesh(DeviceMesh("cpu", [[[0, 1], [2, 3]]]))
        partial = DeviceMesh("cpu", [0, 1])
        if ctx.rank < 2:
            assert parallel_state_of_mesh(partial).dp_group.ranks == (0, 1)
        else:
            with pytest.raises(MeshError, match=rf"rank {ctx.rank} is not in the mesh \[0, 1\]"):
                parallel_state_of_mesh(partial)
        overlapping = DeviceMesh("cpu", [0, 1, 2] if ctx.rank < 2 else [1, 2, 3], _init_backend=False)
        with pytest.raises(MeshError, match=r"mesh of 3 ranks from rank [01] is that of ranks"):
            parallel_state_of_mesh(overlapping)
        with pytest.raises(ValueError, match="device 'meta' is not supported"):
            parallel_state_of_mesh(DeviceMesh("meta", [0, 1, 2, 3], _init_backend=False))

    run_ranks(body, 4)


def test_data_parallel_state_without_a_process_group_is_one_process():
    ps = data_parallel_state()
    assert (ps.world_size, ps.dp_size, ps.dp_group.process_group) == (1, 1, None)
