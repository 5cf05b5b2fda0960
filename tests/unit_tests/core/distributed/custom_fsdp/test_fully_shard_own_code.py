"""`fully_shard` in code that is not a plain training loop: gradients of inputs, updates by hand, exceptions, loss
scaling; what a config may say; names of parameters and of weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.custom_fsdp.fully_shard import fully_shard
from megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from megatron.core.distributed.custom_fsdp.reshard_plan import ReshardPlanError
from megatron.core.distributed.custom_fsdp.sharded_grad_scaler import sharded_grad_scaler
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.module import ModelError
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_same_weights,
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
        handle = model.module[1].register_forward_hook(lambda *a: a[-1].register_hook(fail) and None)
        with model.no_sync(), pytest.raises(RuntimeError, match="on purpose"):
            model(vectors(0, WIDTH)).square().mean().backward()
        handle.remove()
        model(vectors(1, WIDTH)).square().mean().backward()
        for registered, shard in model.named_parameters():
            name = registered.replace("/", ".")
            start, end = model.engine.buffer.part(name, model.engine.sharding.optimizer)
            expected = plain.get_parameter(name).grad.view(-1)[start:end]
            torch.testing.assert_close(shard.grad, expected, rtol=1e-12, atol=1e-12)
        assert model.engine.traffic.as_dict().get("reduce_scatter", (3, 0))[0] in (1, 3), strategy


# Updates -----------------------------------------------------------------------------------------------


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def by_new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad


def by_vector(model: nn.Module) -> None:
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    grads = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
    torch.nn.utils.vector_to_parameters((flat - 0.1 * grads).detach(), model.parameters())


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


def data_of_another_shape_is_refused(ctx) -> None:
    model = sharded(ctx, layers)
    first = next(model.parameters())
    first.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"the shard of '0.weight' has shape \(3,\) now"):
        model(vectors(0, WIDTH))


def trained_or_frozen_later_is_refused(ctx) -> None:
    model = sharded(ctx, layers)
    for who in (model.module[1].up.weight, next(model.parameters())):
        who.requires_grad_(False)
        with pytest.raises(ModelError, match=r"requires_grad of \['(1.up|0).weight'\] was changed after"):
            model(vectors(0, WIDTH))
        with torch.no_grad():
            model(vectors(0, WIDTH))
        who.requires_grad_(True)
    model(vectors(0, WIDTH)).sum().backward()


def shards_are_looked_at_once_a_forward(ctx) -> None:
    model = sharded(ctx, net)
    looks, shards = [0], model._shards
    look = shards.take_changes

    def counting() -> bool:
        looks[0] += 1
        return look()

    shards.take_changes = counting
    for step in range(2):
        token_loss(model, step).backward()
    assert looks[0] == 2
    block = model.module.blocks[0]
    block(block(vectors(0, WIDTH)))  # units by themselves: each may be the first after an update
    assert looks[0] == 4


# Loss scaling ------------------------------------------------------------------------------------------


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
                next(shard for shard in model.parameters() if shard.numel()).grad[0] = float("inf")
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


# What is given -----------------------------------------------------------------------------------------


def configs(ctx) -> None:
    def made(**fields):
        return fully_shard(seeded(net), ctx.ps, DistributedDataParallelConfig(**fields))

    for field, value in {
        "fsdp_double_buffer": True,
        "fsdp_reshard_policy": "step",
        "fsdp_memory_budget": 5,
        "suggested_communication_unit_size": 9,
        "fsdp_debug": True,
        "megatron_fsdp_grad_comm_dtype": "bf16",
    }.items():
        for strategy in ("no_shard", "optim"):
            with pytest.raises(ModelError, match=rf"{field}: no effect with .*'{strategy}'"):
                made(data_parallel_sharding_strategy=strategy, **{field: value})
    with pytest.raises(ModelError, match=r"use_distributed_optimizer: .*'no_shard'"):
        made(use_distributed_optimizer=True)
    with pytest.raises(
        ModelError, match=r"num_distributed_optimizer_instances=2: the ranks given have 1 inst"
    ):
        made(data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2)
    for outer in ({"outer_dp_sharding_strategy": "optim"}, {"enable_full_sharding_in_hsdp": True}):
        with pytest.raises(ModelError, match=r"outer_dp_sharding_strategy='optim' with .*'optim_grads'"):
            made(data_parallel_sharding_strategy="optim_grads", **outer)
    for cut in ("optim_grads", "optim_grads_params"):  # said when it is built, not in the first forward
        with pytest.raises(ReshardPlanError, match="--fsdp-memory-budget 5"):
            made(data_parallel_sharding_strategy=cut, fsdp_memory_budget=5)
        with pytest.raises(ReshardPlanError):
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
    """Parameters named like attributes of the wrapper."""

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
        assert "engine/" in dict(model.named_parameters())
        model(vectors(0, WIDTH)).square().mean().backward()
        by_data(model)
        model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=True
        )
        expected = {name: p.detach() - 0.1 * p.grad for name, p in plain.named_parameters()}
        assert_same_weights(model.full_state_dict(), expected, 1e-12)


class TiedWithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("transient", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def whole_state_is_that_of_the_plain_module(ctx) -> None:
    """Into a plain module, strictly, and from a plain module's own state_dict()."""
    other = seeded(TiedWithBuffers, 5)
    other(torch.arange(VOCAB))  # running statistics that are not the initial ones
    for strategy in STRATEGIES:
        model = sharded(ctx, TiedWithBuffers, [("embed", "head")], data_parallel_sharding_strategy=strategy)
        model(torch.arange(VOCAB)).square().mean().backward()
        by_data(model)
        state = model.full_state_dict()
        plain = seeded(TiedWithBuffers, 1)
        plain.load_state_dict(state)
        assert list(state) == list(plain.state_dict())
        assert torch.equal(plain.norm.running_mean, model.module.norm.running_mean)
        model.load_full_state_dict(other.state_dict())
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
        assert torch.equal(model.module.norm.running_var, other.norm.running_var)
        one_name = {name: value for name, value in state.items() if name != "head.weight"}
        model.load_full_state_dict(one_name)
        assert torch.equal(model.full_state_dict()["head.weight"], state["embed.weight"])
        with pytest.raises(ModelError, match=r"'embed.weight' and 'head.weight' are one weight here"):
            model.load_full_state_dict({**state, "head.weight": state["embed.weight"] + 1})
        with pytest.raises(ModelError, match=r"of another shape: \['norm.running_mean'\]"):
            model.load_full_state_dict({n: v for n, v in state.items() if n != "norm.running_mean"})
        with pytest.raises(ModelError, match=r"of another shape: \['norm.running_var'\]"):
            model.load_full_state_dict({**state, "norm.running_var": torch.zeros(3)})
        with pytest.raises(ModelError, match=r"of another shape: \['more'\]"):
            model.load_full_state_dict({**state, "more": torch.zeros(3)})


CHECKS_ON_TWO = (
    gradients_of_inputs_only,
    an_exception_inside_no_sync,
    updates_that_autograd_does_not_count,
    data_of_another_shape_is_refused,
    trained_or_frozen_later_is_refused,
    shards_are_looked_at_once_a_forward,
    an_overflow_in_one_shard_is_one_for_all,
    scaling_changes_nothing_else,
    configs,
    the_engine_takes_a_mesh_and_our_models_by_themselves,
    parameters_named_like_attributes,
    whole_state_is_that_of_the_plain_module,
)


def test_own_code_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})
