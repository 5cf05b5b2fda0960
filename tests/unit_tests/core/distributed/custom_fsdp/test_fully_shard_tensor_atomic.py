"""`fully_shard` over buffers whose parameters are not cut: what an optimizer of whole matrices (Muon) will stand on."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import data_parallel
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.sharded_module.sharded_tensor import local_part
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    Net,
    assert_same_weights,
    check_parity,
    seeded,
    sharded,
    token_loss,
    train_whole,
)


def net() -> nn.Module:
    return Net().double()


def not_cut():
    """Engines made inside lay their buffers so."""
    placed = functools.partial(FlatBuffer, placement="tensor_atomic")
    return mock.patch.object(data_parallel, "FlatBuffer", placed)


def trains_as_one_process_and_cuts_no_parameter(ctx) -> None:
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        with not_cut():
            found = check_parity(ctx, net, token_loss, data_parallel_sharding_strategy=strategy)
        shapes = {name: p.shape for name, p in seeded(net).named_parameters()}
        for shard, name in zip(found.model.parameters(), found.model.engine.buffer.names, strict=True):
            assert shard.to_local().numel() in (0, shapes[name].numel()), (name, shard)
        held = torch.tensor([shard.to_local().numel() for shard in found.model.parameters()])
        torch.distributed.all_reduce(held)
        assert held.tolist() == [shape.numel() for shape in shapes.values()], "each on one rank"


def an_optimizer_of_whole_matrices_is_that_of_one_process(ctx) -> None:
    """Each gradient is replaced by its orthogonal factor, which no cut matrix has."""

    def orthogonal(model: nn.Module, shapes: dict[str, torch.Size]) -> None:
        for name, parameter in model.named_parameters():
            shape = shapes[name.replace("/", ".")]
            own, grad = local_part(parameter), local_part(parameter.grad)
            if own.numel() and len(shape) == 2:
                left, _, right = torch.linalg.svd(grad.view(shape), full_matrices=False)
                own.sub_((left @ right).flatten(), alpha=0.05)

    with not_cut():
        model = sharded(ctx, net)
    alone = seeded(net)
    shapes = {name: p.shape for name, p in alone.named_parameters()}
    for step in range(3):
        model.zero_grad()
        token_loss(model, 10 * step + ctx.rank).backward()
        orthogonal(model, shapes)
        alone.zero_grad()
        for rank in range(ctx.world_size):
            (token_loss(alone, 10 * step + rank) / ctx.world_size).backward()
        orthogonal(alone, shapes)
    assert_same_weights(model.full_state_dict(), dict(alone.named_parameters()), 1e-8)


def weights_round_trip_into_the_other_placement(ctx) -> None:
    trained = train_whole(net, token_loss, ctx.world_size).weights
    with not_cut():
        model = sharded(ctx, net)
    model.load_full_state_dict(trained)
    held: dict[str, Tensor] = model.full_state_dict()
    assert_same_weights(held, trained, 0.0)
    flat = sharded(ctx, net)
    flat.load_full_state_dict(held)
    assert_same_weights(flat.full_state_dict(), trained, 0.0)
    for name, whole in trained.items():
        start, end = model.engine.buffer.part(name, model.engine.sharding.optimizer)
        part = model.engine.buffer.main_weight_part(name)
        assert torch.equal(part, whole.flatten()[start:end])


CHECKS = (
    trains_as_one_process_and_cuts_no_parameter,
    an_optimizer_of_whole_matrices_is_that_of_one_process,
    weights_round_trip_into_the_other_placement,
)


def test_tensor_atomic_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS})


@pytest.mark.grid
def test_tensor_atomic_on_four_ranks():
    share_ranks(4, {check.__name__: check for check in CHECKS})
