"""`fully_shard`: whole weights out and in, across strategies; our own models; a mesh, a device and dtypes given."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.distributed.sharded_module.sharded_tensor import local_part
from megatron.core.module import ModelError
from tests.harness.ranks import run_ranks, share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    Net,
    adamw,
    assert_at_rest,
    assert_same_weights,
    seeded,
    sharded,
    token_loss,
    train_sharded,
    train_whole,
)
from tests.harness.tiny_models import SEQ, VOCAB, tiny_model


def net() -> nn.Module:
    return Net().double()


def bf16_net() -> nn.Module:
    return Net().bfloat16()


def whole_weights_across_strategies(ctx) -> None:
    """Any strategy's weights load into any other, bit for bit, and train on the same."""
    sources = {s: train_sharded(ctx, net, token_loss, data_parallel_sharding_strategy=s) for s in STRATEGIES}
    for source in sources.values():
        for target in STRATEGIES:
            model = sharded(ctx, lambda: seeded(net, 3), data_parallel_sharding_strategy=target)
            model.load_full_state_dict(source.weights)
            found = model.full_state_dict()
            assert all(torch.equal(found[name], weight) for name, weight in source.weights.items()), target
            assert_at_rest(model)
            updates = torch.optim.SGD(model.parameters(), lr=0.1)
            token_loss(model, ctx.rank).backward()
            updates.step()
            plain = seeded(net)
            plain.load_state_dict(source.weights)
            steps = torch.optim.SGD(plain.parameters(), lr=0.1)
            sum(token_loss(plain, rank) / ctx.world_size for rank in range(ctx.world_size)).backward()
            steps.step()
            assert_same_weights(model.full_state_dict(), dict(plain.named_parameters()))


def whole_weights_are_read_in_the_middle_of_a_step(ctx) -> None:
    expected = train_whole(net, token_loss, ctx.world_size, steps=1)
    for strategy in STRATEGIES:
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        updates = adamw(model.parameters())
        loss = token_loss(model, ctx.rank)
        before = model.full_state_dict()
        loss.backward()
        assert_same_weights(before, dict(seeded(net).named_parameters()), 0.0)
        updates.step()
        assert_same_weights(model.full_state_dict(), expected.weights)


def sixteen_bit_weights_round_trip(ctx) -> None:
    for strategy in STRATEGIES:
        source = train_sharded(ctx, bf16_net, token_loss, data_parallel_sharding_strategy=strategy)
        model = sharded(ctx, lambda: seeded(bf16_net, 3), data_parallel_sharding_strategy=strategy)
        model.load_full_state_dict(source.weights)
        for name, weight in model.full_state_dict().items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, source.weights[name])
        for name, shard in model.named_parameters():
            whole = source.weights[name].float().view(-1)
            assert shard.dtype == torch.float32  # main weights
            own = local_part(shard)
            assert own.numel() == 0 or any(
                torch.equal(own, whole[start : start + own.numel()])
                for start in {0, whole.numel() - own.numel()}
            )


def shards_and_optimizer_resume(ctx) -> None:
    """state_dict of shards and of torch's optimizer, on as many ranks: training goes on bit for bit."""
    for strategy in STRATEGIES:
        for make in (net, bf16_net):
            model = sharded(ctx, make, data_parallel_sharding_strategy=strategy)
            updates = adamw(model.parameters())
            _steps(ctx, model, updates, range(2))
            saved = {n: t.clone() for n, t in model.state_dict().items()}, copy.deepcopy(updates.state_dict())
            again = sharded(ctx, lambda m=make: seeded(m, 5), data_parallel_sharding_strategy=strategy)
            resumed = adamw(again.parameters())
            again.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            _steps(ctx, again, resumed, range(2, 4))
            _steps(ctx, model, updates, range(2, 4))
            assert_same_weights(again.full_state_dict(), model.full_state_dict(), 0.0)


def _steps(ctx, model, updates, steps) -> None:
    for step in steps:
        updates.zero_grad()
        token_loss(model, 1000 * step + ctx.rank).backward()
        updates.step()


def weights_changed_by_hand(ctx) -> None:
    """An in-place change of the shards is a change of the model."""
    for strategy in STRATEGIES:
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        with torch.no_grad():
            for shard in model.parameters():
                shard.mul_(0.5)
        halved = {name: p.detach() * 0.5 for name, p in seeded(net).named_parameters()}
        assert_same_weights(model.full_state_dict(), halved, 0.0)


CHECKS_ON_TWO = (
    whole_weights_across_strategies,
    whole_weights_are_read_in_the_middle_of_a_step,
    sixteen_bit_weights_round_trip,
    shards_and_optimizer_resume,
    weights_changed_by_hand,
)


@pytest.mark.grid
def test_state_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})


# Our own models ----------------------------------------------------------------------------------------


def gpt_loss(model: nn.Module, sample: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sample)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=generator)
    positions = torch.arange(SEQ).expand(2, -1)
    return model(tokens, position_ids=positions, labels=tokens.roll(-1, 1)).mean()


def our_models_through_their_sink(ctx) -> None:
    for flags in ({}, {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"}):
        whole = tiny_model(**flags)
        whole.context.grads.bind_new(
            {
                key: whole.param_meta[name].local_shape
                for name, p in whole.named_parameters()
                for key in _keys(whole, name)
            },
            torch.float64,
            torch.device("cpu"),
        )
        for rank in range(ctx.world_size):
            (gpt_loss(whole, rank) / ctx.world_size).backward()
        expected = {}
        for name, parameter in whole.named_parameters():
            grad = sum(whole.context.grads.main_grads[key] for key in _keys(whole, name))
            if parameter.grad is not None:
                grad = grad + parameter.grad
            expected[name] = parameter.detach() - 0.1 * grad
        for strategy in STRATEGIES:
            model = sharded(
                ctx, lambda f=flags: tiny_model(**f), units=(), data_parallel_sharding_strategy=strategy
            )
            names = [unit.name for unit in model.engine.units]
            assert len(names) >= 3, names  # as the model declares them
            updates = torch.optim.SGD(model.parameters(), lr=0.1)
            gpt_loss(model, ctx.rank).backward()
            updates.step()
            assert_same_weights(model.full_state_dict(), expected)
            assert_at_rest(model)


def _keys(model: nn.Module, name: str) -> tuple[str, ...]:
    return model.param_meta[name].grad_keys


def test_our_models_on_two_ranks():
    share_ranks(2, {"gpt": our_models_through_their_sink})


def test_a_world_of_one_without_process_group():
    model = fully_shard(seeded(net))
    updates = adamw(model.parameters())
    for step in range(2):
        updates.zero_grad()
        token_loss(model, 1000 * step).backward()
        updates.step()
    assert_same_weights(model.full_state_dict(), train_whole(net, token_loss, 1).weights, 0.0)


def test_a_mesh_that_does_not_fit_is_refused():
    from torch.distributed.device_mesh import init_device_mesh

    def body(ctx):
        with pytest.raises(ValueError, match="a mesh of 3 dims"):
            fully_shard(seeded(net), init_device_mesh("cpu", (1, 1, 2)))
        with pytest.raises(ModelError, match="an instance of one rank has nothing to shard"):
            sharded(ctx, net, ps=ctx.make_ps(dp=2, instances=2), outer_dp_sharding_strategy="optim")

    run_ranks(body, 2)
