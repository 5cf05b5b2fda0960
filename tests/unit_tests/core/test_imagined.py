"""A world that is not there: what its ranks tell each other, what its collectives do, how it ends."""

import pytest
import torch

from megatron.core.device import Device, elements_at_a_time, imagining, kind_of
from megatron.core.transport import collectives, host_data
from megatron.core.transport.imagined import ImaginedWorld, WorldEndedError
from megatron.core.transport.rank_grid import RankGrid, RankGridError, WorldPart, expert_grid

CPU, CUDA = Device("cpu", imagined=True), Device("cuda", imagined=True)
GRID = RankGrid(16, tp=2, dp=4, pp=2)
WORLD = WorldPart(tuple(range(16)), GRID)


def test_all_ranks_of_one_copy_of_the_model_run_and_hear_each_other():
    world = ImaginedWorld(WORLD, CPU, rank=3)
    assert world.ranks == (2, 3, 10, 11)

    def body(ps):
        assert ps.dp_rank == 1
        return host_data.all_gather_json(ps.rank, ps.mp_group), host_data.all_gather_json(
            ps.rank, ps.tp_group
        )

    assert world.run(body) == {
        2: ([2, 3, 10, 11], [2, 3]),
        3: ([2, 3, 10, 11], [2, 3]),
        10: ([2, 3, 10, 11], [10, 11]),
        11: ([2, 3, 10, 11], [10, 11]),
    }


def test_a_copy_of_a_model_with_experts_takes_the_ranks_that_have_other_experts_too():
    experts = expert_grid(16, etp=1, ep=4, pp=2)
    world = ImaginedWorld(WorldPart(tuple(range(16)), GRID, experts=experts), CPU, rank=3)
    assert world.ranks == (0, 1, 2, 3, 8, 9, 10, 11)

    def body(ps):
        return host_data.all_gather_json([ps.tp_rank, ps.ep_rank, ps.pp_rank], ps.world_group)

    for places in world.run(body).values():
        assert places == [[rank % 2, rank % 4, rank // 8] for rank in range(16)]


def test_ranks_of_other_copies_say_what_theirs_say():
    def body(ps):
        places = host_data.all_gather_json([ps.tp_rank, ps.pp_rank], ps.world_group)
        return places, host_data.all_gather_json(ps.rank, ps.world_group)[6]

    for places, by_six in ImaginedWorld(WORLD, CPU, rank=3).run(body).values():
        assert places == [[rank % 2, rank // 8] for rank in range(16)]
        assert by_six == 2


@pytest.mark.parametrize(("device", "temporary_bytes"), [(CPU, 7 * 8 * 4), (CUDA, 8 * 4)])
def test_collectives_take_memory_and_are_counted_and_move_nothing(device, temporary_bytes):
    def body(ps):
        group, where = ps.dp_group, device.torch_device
        full, shard = torch.empty(64, device=where), torch.empty(8, device=where)
        gathered = collectives.all_gather(full, shard, group, async_op=True)
        reduced = collectives.reduce_scatter_units([(shard, full)], group, accumulate=True)
        assert gathered.is_completed()
        taken = gathered.temporary_bytes, reduced.temporary_bytes
        gathered.wait()
        reduced.wait()
        collectives.all_reduce(full, group)
        collectives.broadcast(full, group)
        collectives.barrier(group)
        kinds = "all_gather", "reduce_scatter", "all_reduce", "broadcast"
        return taken, [group.traffic.moved(kind).payload_bytes for kind in kinds]

    seen = ImaginedWorld(WorldPart(tuple(range(8)), RankGrid(8, dp=8)), device).run(body)
    assert seen == {0: ((0, temporary_bytes), [256] * 4)}


def test_the_first_error_is_raised_and_nobody_waits_for_who_has_left():
    def fails(ps):
        if ps.rank == 10:
            raise ValueError("mine")
        return host_data.all_gather_json(0, ps.mp_group)

    with pytest.raises(ValueError, match="mine"):
        ImaginedWorld(WORLD, CPU, rank=2).run(fails)

    def leaves(ps):
        return None if ps.rank == 10 else host_data.all_gather_json(0, ps.mp_group)

    with pytest.raises(WorldEndedError, match=r"mp: rank \d+ waits for ranks \[10[],]"):
        ImaginedWorld(WORLD, CPU, rank=2).run(leaves)


def test_instances_must_divide():
    with pytest.raises(RankGridError, match="--num-distributed-optimizer-instances 3"):
        ImaginedWorld(WorldPart(tuple(range(16)), GRID, 3), CPU).run(lambda ps: None)


def test_a_tensor_without_memory_is_of_the_kind_that_it_stands_for():
    tensor = torch.empty(4, device="meta")
    kinds = []
    for device in (CPU, CUDA):
        with imagining(device):
            kinds.append((kind_of(tensor.device), elements_at_a_time(tensor, 8)))
    assert kinds == [("cpu", 8), ("cuda", 128)]
    assert kind_of(torch.device("cuda")) == "cuda"
    assert kind_of(tensor.device) == "cpu"
