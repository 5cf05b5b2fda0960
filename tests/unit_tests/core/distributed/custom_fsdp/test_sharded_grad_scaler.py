"""Loss scaling of shards: one decision on all ranks, and what the scale leaves alone."""

from __future__ import annotations

import itertools

import torch

from megatron.core.distributed.sharded_module.fully_shard import sharded_grad_scaler
from megatron.core.distributed.sharded_module.sharded_tensor import local_part
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import Net, assert_same_weights, sharded, token_loss


def an_overflow_in_one_shard_is_one_for_all(ctx) -> None:
    optimizers = (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),  # unscales by itself
    )
    for make_optimizer, strategy in itertools.product(optimizers, ("optim", "optim_grads_params")):
        model = sharded(ctx, Net, data_parallel_sharding_strategy=strategy)
        updates = make_optimizer(model.parameters())
        scaler = sharded_grad_scaler(model, init_scale=4.0, growth_interval=1)
        assert isinstance(scaler, torch.amp.GradScaler)
        before = model.full_state_dict()
        for overflows in (True, False):
            updates.zero_grad()
            scaler.scale(token_loss(model, ctx.rank)).backward()
            if overflows and ctx.rank == 1:
                next(shard for shard in model.parameters() if local_part(shard).numel()).grad.to_local()[
                    0
                ] = float("inf")
            scaler.step(updates)
            scaler.update()
            same = all(torch.equal(before[name], value) for name, value in model.full_state_dict().items())
            assert same == overflows, (strategy, overflows)
            assert scaler.get_scale() == (2.0 if overflows else 4.0), (strategy, overflows)


def scaling_changes_nothing_else(ctx) -> None:
    """By powers of two, unscaled before the clipping."""
    plain, scaled = sharded(ctx, Net), sharded(ctx, Net)
    scaler = sharded_grad_scaler(scaled, init_scale=1024.0)
    for model in (plain, scaled):
        updates = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            updates.zero_grad()
            loss = token_loss(model, step + ctx.rank)
            if model is scaled:
                scaler.scale(loss).backward()
                scaler.unscale_(updates)
                model.clip_grad_norm_(0.5)
                scaler.step(updates)
                scaler.update()
            else:
                loss.backward()
                model.clip_grad_norm_(0.5)
                updates.step()
    assert_same_weights(scaled.full_state_dict(), plain.full_state_dict(), 0.0)


def ranks_without_gradients_are_told_too(ctx) -> None:
    """The optimizer of one rank has an empty shard only: GradScaler by itself finds nothing to look at there."""
    model = sharded(ctx, lambda: torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False)), ())
    (shard,) = model.parameters()
    assert shard.to_local().numel() == (ctx.rank == 0)
    updates = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = sharded_grad_scaler(model, init_scale=4.0)
    for overflows in (True, False):
        updates.zero_grad()
        x = torch.full((1, 1), float("inf") if overflows and ctx.rank == 1 else 1.0)
        scaler.scale(model(x).sum()).backward()
        before = shard.to_local().clone()
        scaler.step(updates)
        scaler.update()
        assert scaler.get_scale() == 2.0, "halved once, on every rank"
        assert torch.equal(shard.to_local(), before) == (overflows or ctx.rank > 0)


def the_device_is_the_models_unless_given(ctx) -> None:
    model = sharded(ctx, Net)
    assert sharded_grad_scaler(model)._device == "cpu"
    assert not sharded_grad_scaler(model, enabled=False).is_enabled()


CHECKS = (
    an_overflow_in_one_shard_is_one_for_all,
    scaling_changes_nothing_else,
    ranks_without_gradients_are_told_too,
    the_device_is_the_models_unless_given,
)


def test_scaling_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS})
