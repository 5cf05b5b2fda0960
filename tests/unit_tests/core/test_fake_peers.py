"""A rank that is there, among peers that are not: what it hears, and that all memory has finite numbers."""

import dataclasses

import pytest
import torch

from megatron.core.device import Device
from megatron.core.transport import collectives, host_data
from megatron.core.transport.fake import FakePeers
from megatron.core.transport.imagined import ImaginedWorld
from megatron.core.transport.parallel_state import imagined_state
from megatron.core.transport.point_to_point import send_receive
from megatron.core.transport.rank_grid import RankGrid, WorldPart

GRID = RankGrid(16, tp=2, dp=4, pp=2)
WORLD = WorldPart(tuple(range(16)), GRID)


def unknown(*shape):
    return torch.full(shape, torch.nan)


@pytest.fixture
def ps():
    """Rank 11: tp 1, dp 1, pp 1."""
    world = ImaginedWorld(WORLD, Device("cpu", imagined=True), rank=11)

    def body(one):
        told = host_data.all_gather_json([one.rank], one.mp_group)
        shape = torch.tensor([0, 2, 3, 4]) if one.pp_rank == 0 else torch.empty(4, dtype=torch.int64)
        ends = ([(shape, 1)], []) if one.pp_rank == 0 else ([], [(shape, 0)])
        for pending in (*(both := send_receive(*ends, one.pp_forward_group))[0], *both[1]):
            pending.wait()
        return told

    assert world.run(body)[11] == [[2], [3], [10], [11]]
    world.keep_one_a_stage()
    return imagined_state(WORLD, 11, Device("cpu"), FakePeers(world, Device("cpu")))


def test_it_speaks_for_all_and_hears_the_truth_of_its_copy_of_the_model(ps):
    assert ps.is_fake
    assert ps.is_first_rank
    assert ps.is_last_rank
    assert host_data.all_gather_json([ps.rank, "mine"], ps.mp_group) == [[2], [3], [10], [11, "mine"]]
    assert host_data.all_gather_json(ps.rank, ps.control_group) == [11] * 16
    assert ImaginedWorld(WORLD, Device("cpu", imagined=True)).state(1).is_fake is False


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_collectives_leave_finite_numbers(ps, backend):
    group = dataclasses.replace(ps.dp_group, backend=backend)
    assert (group.size, group.rank) == (4, 1)
    gathered, part = unknown(4, 3), torch.tensor([1.0, 2.0, 3.0])
    collectives.all_gather(gathered.view(-1), part, group)
    assert torch.equal(gathered, part.expand(4, 3))
    whole = torch.arange(12.0)
    assert group.traffic.moved("all_gather").payload_bytes == 48
    shard = unknown(3)
    collectives.reduce_scatter(shard, whole, group)
    assert torch.equal(shard, whole[3:6])
    kept = torch.ones(3, dtype=torch.float64)
    collectives.reduce_scatter_units([(kept, whole)], group, accumulate=True).wait()
    assert kept.isfinite().all()
    collectives.all_reduce(whole, group)
    assert torch.equal(whole, torch.arange(12.0))
    rows = unknown(7, 5)
    collectives.all_to_all(rows, torch.ones(2, 5), [0, 3, 4, 0], [1, 1, 0, 0], group)
    assert len(set(rows.flatten().tolist())) == 35
    assert rows.isfinite().all()
    collectives.barrier(group)


def test_messages_have_the_shapes_of_the_imagined_and_numbers(ps):
    for group in (ps.pp_forward_group, ps.pp_backward_group):
        shape, hidden = torch.zeros(4, dtype=torch.int64), unknown(300, 300)
        if group is ps.pp_backward_group:  # what rank 3 hears of what it has handed on
            group = dataclasses.replace(group, ranks=(11, 3), rank=1)
        _, arrivals = send_receive([], [(shape, 0), (hidden, 0)], group)
        for one in arrivals:
            one.wait()
        assert shape.tolist() == [0, 2, 3, 4]
        assert hidden.isfinite().all()
        assert hidden.std() < 0.1
        assert not torch.equal(hidden[0], hidden[1])


def test_of_a_step_a_later_stage_says_what_it_has_heard_and_an_earlier_one_nothing(ps):
    control = ps.control_group
    figures, heard, nothing = torch.tensor([3.0, 4.0]), unknown(2), unknown(2)
    send_receive([(figures, 12)], [], control)
    send_receive([], [(heard, 12), (nothing, 3)], control)
    assert heard.tolist() == [3.0, 4.0]
    assert nothing.tolist() == [0.0, 0.0]
