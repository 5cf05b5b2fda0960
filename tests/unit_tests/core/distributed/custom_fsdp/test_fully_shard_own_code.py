"""`fully_shard` in code that is not a plain training loop: gradients of inputs, updates by hand, exceptions; names of
parameters; what is made of a config, a mesh, a model of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.distributed.sharded_module.sharded_engine import FullyShardedDataParallel
from megatron.core.distributed.sharded_module.sharded_tensor import ShardedTensor, local_part
from megatron.core.distributed.sharded_module.step_driver import driver_of
from megatron.core.module import ModelError
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_same_weights,
    moved_by,
    seeded,
    sharded,
    token_loss,
    vectors,
)
from tests.harness.tiny_models import SEQ, VOCAB, tiny_model


def net() -> nn.Module:
    return Net().double()


def layers() -> nn.Module:
    """Of vectors, so that a gradient of the input exists."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()).double()


# Backwards ---------------------------------------------------------------------------------------------


def gradients_of_inputs_only(ctx) -> None:
    """torch.autograd.grad for an input, before, between and inside accumulation: .grad is what it would be without."""
    plain = seeded(layers)
    x = vectors(0, WIDTH)
    for strategy in STRATEGIES:
        model = sharded(ctx, layers, data_parallel_sharding_strategy=strategy)
        updates = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            updates.zero_grad()
            _same_input_gradient(model, plain, x)
            assert all(shard.grad is None for shard in model.parameters()), strategy
            with model.no_sync():
                _same_input_gradient(model, plain, x)
                model(vectors(step, WIDTH)).square().mean().backward()
                _same_input_gradient(model, plain, x)
            model(vectors(step + 7, WIDTH)).square().mean().backward()
            if "grads" in strategy:  # whole gradients that are reduced cannot be added to
                held = [shard.grad.clone() for shard in model.parameters()]
                _same_input_gradient(model, plain, x)
                assert all(
                    torch.equal(old, shard.grad) for old, shard in zip(held, model.parameters(), strict=True)
                )
            updates.step()
            plain.zero_grad()
            for sample in (step, step + 7):
                plain(vectors(sample, WIDTH)).square().mean().backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        assert_same_weights(model.full_state_dict(), dict(plain.named_parameters()))
        updates.zero_grad()
        model(x)  # a step begins: nothing of the last one is left
        plain = seeded(layers)


def _same_input_gradient(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(ours).square().sum(), ours)
    (expected,) = torch.autograd.grad(plain(theirs).square().sum(), theirs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def an_exception_inside_no_sync(ctx) -> None:
    """What it has added is dropped, and nothing is reduced for it."""

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    plain = seeded(layers)
    plain(vectors(1, WIDTH)).square().mean().backward()
    for strategy in STRATEGIES:
        model = sharded(ctx, layers, data_parallel_sharding_strategy=strategy)
        handle = model[1].register_forward_hook(lambda *a: a[-1].register_hook(fail) and None)
        with model.no_sync(), pytest.raises(RuntimeError, match="on purpose"):
            model(vectors(0, WIDTH)).square().mean().backward()
        handle.remove()
        model(vectors(1, WIDTH)).square().mean().backward()
        for name, shard in model.named_parameters():
            start, end = model.engine.buffer.part(name, model.engine.sharding.optimizer)
            expected = plain.get_parameter(name).grad.view(-1)[start:end]
            torch.testing.assert_close(local_part(shard.grad), expected, rtol=1e-12, atol=1e-12)
        assert moved_by(model.engine).get("reduce_scatter", (3, 0))[0] in (1, 3), strategy


# Updates -----------------------------------------------------------------------------------------------


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def by_new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad


def by_vector(model: nn.Module) -> None:
    """Of whole values, which every rank has: of sharded parameters nobody has a vector."""
    whole = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    if any(isinstance(p, ShardedTensor) for p in whole):
        with pytest.raises(ModelError, match=r"cat of '.*weight' .*needs the whole tensor.*full_state_dict"):
            torch.nn.utils.parameters_to_vector(model.parameters())
        whole = [p.full_tensor() for p in whole]
    flat = torch.cat([p.flatten() for p in whole])
    torch.nn.utils.vector_to_parameters(flat, model.parameters())


def by_assignment(model: nn.Module) -> None:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    state = {name: value - 0.1 * grads[name] for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def tiny() -> nn.Module:
    """Fewer elements than ranks: all of some ranks' shards are empty."""
    return nn.Sequential(nn.Linear(1, 1)).double()


def updates_that_autograd_does_not_count(ctx) -> None:
    for make, width in ((layers, WIDTH), (tiny, 1)):
        for update in (by_data, by_new_data, by_vector, by_assignment):
            plain = seeded(make)
            for step in range(3):
                plain.zero_grad()
                plain(vectors(step, width)).square().mean().backward()
                update(plain)
            for strategy in STRATEGIES:
                units = [Block] if make is layers else [nn.Linear]
                model = sharded(ctx, make, units, data_parallel_sharding_strategy=strategy)
                for step in range(3):
                    model.zero_grad()
                    model(vectors(step, width)).square().mean().backward()
                    update(model)
                with torch.no_grad():
                    torch.testing.assert_close(model(vectors(9, width)), plain(vectors(9, width)))
                assert_same_weights(model.full_state_dict(), dict(plain.named_parameters()), 1e-12)
                assert_at_rest(model)


def trained_or_frozen_later_is_refused(ctx) -> None:
    model = sharded(ctx, layers)
    for who in (model[1].up.weight, next(model.parameters())):
        who.requires_grad_(False)
        with pytest.raises(ModelError, match=r"requires_grad of \['(1.up|0).weight'\] was changed after"):
            model(vectors(0, WIDTH))
        with torch.no_grad():
            model(vectors(0, WIDTH))
        who.requires_grad_(True)
    model(vectors(0, WIDTH)).sum().backward()


def shards_are_looked_at_once_a_forward(ctx) -> None:
    model = sharded(ctx, net)
    looks, shards = [0], driver_of(model).shards
    look = shards.take_changes

    def counting() -> bool:
        looks[0] += 1
        return look()

    shards.take_changes = counting
    for step in range(2):
        token_loss(model, step).backward()
    assert looks[0] == 2
    block = model.blocks[0]
    block(block(vectors(0, WIDTH)))  # units by themselves: each may be the first after an update
    assert looks[0] == 4


# What is given -----------------------------------------------------------------------------------------


def configs_make_engines(ctx) -> None:
    def made(**fields):
        return fully_shard(seeded(net), ctx.ps, DistributedDataParallelConfig(**fields))

    for cut in ("optim_grads", "optim_grads_params"):  # said when it is built, not in the first forward
        with pytest.raises(ModelError, match="fsdp_memory_budget=5"):
            made(data_parallel_sharding_strategy=cut, fsdp_memory_budget=5)
        with pytest.raises(ModelError, match="fsdp_reshard_policy='budget'"):
            made(data_parallel_sharding_strategy=cut, fsdp_reshard_policy="budget")
    given = made(data_parallel_sharding_strategy="optim_grads_params", fsdp_unit_modules=("Block",))
    assert [unit.name for unit in given.engine.units if "blocks" in unit.name] == [
        f"blocks.{index}" for index in range(3)
    ]
    assert (
        fully_shard(seeded(net), ctx.ps).engine.config.data_parallel_sharding_strategy == "optim_grads_params"
    )


def the_engine_takes_a_mesh_and_our_models_by_themselves(ctx) -> None:
    """FullyShardedDataParallel(module, mesh, config), its steps called one by one."""
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    plain, model = seeded(net), seeded(net)
    engine = FullyShardedDataParallel(model, mesh, config, fsdp_unit_modules=[Block])
    engine.begin_step(1)
    token_loss(engine, ctx.rank).backward()
    engine.microbatch_done(0, 0)
    engine.finish()
    sum(token_loss(plain, rank) for rank in range(ctx.world_size)).backward()
    for name, parameter in plain.named_parameters():
        start, end = engine.buffer.part(name, engine.sharding.optimizer)
        torch.testing.assert_close(engine.buffer.main_grad_part(name), parameter.grad.view(-1)[start:end])

    ours = tiny_model()
    engine = FullyShardedDataParallel(ours, mesh, config)
    assert len(engine.units) >= 3, engine.units
    engine.begin_step(1)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQ).expand(2, -1)
    ours(tokens, position_ids=positions, labels=tokens.roll(-1, 1)).mean().backward()
    engine.microbatch_done(0, 0)
    engine.finish()
    assert all(bool(grads.any()) for grads in engine.buffer.grads_at_rest()), "the sinks are not connected"


# Names -------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Parameters named like what fully_shard adds."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("engine", "module", "no_sync", "_sync", "_shards"):
            self.register_parameter(name, nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)))
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("engine", "module", "no_sync", "_sync", "_shards"):
            x = x * self.get_parameter(name)
        return self.layer(x)


def parameters_named_like_attributes(ctx) -> None:
    plain = seeded(Named)
    plain(vectors(0, WIDTH)).square().mean().backward()
    for strategy in STRATEGIES:
        model = sharded(ctx, Named, (), data_parallel_sharding_strategy=strategy)
        assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
        model(vectors(0, WIDTH)).square().mean().backward()
        by_data(model)
        model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=True
        )
        expected = {name: p.detach() - 0.1 * p.grad for name, p in plain.named_parameters()}
        assert_same_weights(model.full_state_dict(), expected, 1e-12)


CHECKS_ON_TWO = (
    gradients_of_inputs_only,
    an_exception_inside_no_sync,
    updates_that_autograd_does_not_count,
    trained_or_frozen_later_is_refused,
    shards_are_looked_at_once_a_forward,
    configs_make_engines,
    the_engine_takes_a_mesh_and_our_models_by_themselves,
    parameters_named_like_attributes,
)


@pytest.mark.grid
def test_own_code_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})
