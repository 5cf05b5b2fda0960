"""Number 3: a sharded parameter answers as the whole one. The loops of the world train as under FSDP2, which is the
oracle, or as in one process: clipping, groups by dims, optimizers, averages of weights, penalties, tied embeddings,
compiled modules. What needs whole tensors is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # here, so that forked ranks have it
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.distributed.sharded_module.sharded_tensor import ShardedTensor, local_part
from megatron.core.module import ModelError
from tests.harness.ranks import run_ranks, share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    Tied,
    adamw,
    assert_same_weights,
    check_parity,
    seeded,
    sharded,
    token_loss,
    train_whole,
    vectors,
)

FULL = "optim_grads_params"


def net() -> nn.Module:
    return Net(2).double()


def tied() -> nn.Module:
    return Tied().double()


# FSDP2 on the same module and data -----------------------------------------------------------------------


def by_dims(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def loop(ctx, model: nn.Module) -> dict[str, Any]:
    """A loop that knows nothing of sharding: what it has seen of its model."""
    optimizer = torch.optim.AdamW(by_dims(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
    groups = [
        [(tuple(p.shape), p.ndim, p.numel()) for p in group["params"]] for group in optimizer.param_groups
    ]
    losses, norms = [], []
    for step in range(3):
        loss = token_loss(model, 1000 * step + ctx.rank)
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # between forward and backward, as many do
        loss.backward()
        if step == 0:
            norms += [as_number(p.grad.norm()) for p in model.parameters()]
        norms.append(as_number(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    norms += [as_number(p.norm()) for p in model.parameters()]
    return {"groups": groups, "losses": losses, "norms": norms}


def as_number(figure: Tensor) -> float:
    whole = figure.full_tensor() if isinstance(figure, torch.distributed.tensor.DTensor) else figure
    return whole.item()


def fsdp2_is_the_oracle(
    ctx, make: Callable[[], nn.Module], mesh: DeviceMesh, strategies: Iterable[str]
) -> None:
    oracle = seeded(make)
    for block in oracle.blocks:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(oracle, mesh=mesh)
    expected = loop(ctx, oracle)
    weights = {name: p.full_tensor().detach() for name, p in oracle.named_parameters()}
    for strategy in strategies:
        model = seeded(make)
        config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
        if strategy == "fully sharded instances":
            config = DistributedDataParallelConfig(
                data_parallel_sharding_strategy=FULL, outer_dp_sharding_strategy="optim"
            )
        for block in model.blocks:
            fully_shard(block, mesh, config)
        fully_shard(model)
        found = loop(ctx, model)
        assert found["groups"] == expected["groups"], strategy
        assert all(len(group) > 0 for group in found["groups"])
        for figure in ("losses", "norms"):
            torch.testing.assert_close(found[figure], expected[figure], rtol=1e-9, atol=1e-12, msg=strategy)
        assert_same_weights(model.full_state_dict(), weights, 1e-11)


def trained_as_under_fsdp2(ctx) -> None:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    fsdp2_is_the_oracle(ctx, net, mesh, STRATEGIES if ctx.world_size == 2 else ("optim_grads", FULL))
    if ctx.world_size == 2:
        fsdp2_is_the_oracle(ctx, tied, mesh, (FULL,))


def trained_as_under_fsdp2_in_instances(ctx) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("instances", "ranks"))
    fsdp2_is_the_oracle(ctx, tied, mesh, ("optim_grads", FULL, "fully sharded instances"))


# Norms ----------------------------------------------------------------------------------------------------


def whole_with_gradients(ctx, make: Callable[[], nn.Module] = net) -> nn.Module:
    whole = seeded(make)
    (sum(token_loss(whole, rank) for rank in range(ctx.world_size)) / ctx.world_size).backward()
    return whole


def norms_are_those_of_the_whole(ctx) -> None:
    whole = whole_with_gradients(ctx)
    for strategy in STRATEGIES:
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        token_loss(model, ctx.rank).backward()
        for order in (2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf")):
            for foreach in (None, True, False):
                norm = functools.partial(nn.utils.get_total_norm, norm_type=order, foreach=foreach)
                found, expected = (norm([p.grad for p in one.parameters()]) for one in (model, whole))
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert parameter.shape == expected.shape
            assert parameter.numel() == expected.numel()
            for figure in (torch.norm, torch.sum, torch.mean, torch.std, torch.max):
                torch.testing.assert_close(figure(parameter), figure(expected), rtol=1e-12, atol=1e-15)
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)
        torch.testing.assert_close(before, nn.utils.get_total_norm([p.grad for p in whole.parameters()]))
        assert abs(model.clip_grad_norm_(1.0) - 0.05) < 1e-6
        if strategy == "no_shard":
            continue
        if ctx.rank == 0:  # one element of one rank
            next(own for p in model.parameters() if (own := local_part(p.grad)).numel())[0] = float("nan")
        for order in (2.0, float("inf")):
            with pytest.raises(RuntimeError, match="non-finite"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)


# Optimizers -----------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Elementwise code of somebody's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class Lamb(torch.optim.Optimizer):
    """Steps by norms of whole tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            trust = torch.where(p.norm() > 0, p.norm() / (p.grad.norm() + 1e-6), 1.0)
            p.sub_(p.grad * trust * 1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-2, centered=True, momentum=0.5),
    "rmsprop foreach": functools.partial(torch.optim.RMSprop, lr=1e-2, foreach=True),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "radam": functools.partial(torch.optim.RAdam, lr=1e-2),
    "adamax": functools.partial(torch.optim.Adamax, lr=1e-2),
    "adamax foreach": functools.partial(torch.optim.Adamax, lr=1e-2, foreach=True),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=1.0),
    "asgd": functools.partial(torch.optim.ASGD, lr=1e-2),
    "rprop": functools.partial(torch.optim.Rprop, lr=1e-3),
    "lion": Lion,
    "lamb": Lamb,
}


def elementwise_optimizers_train_as_one_process(ctx) -> None:
    for name, optimizer in OPTIMIZERS.items():
        check_parity(ctx, net, token_loss, optimizer=optimizer, clip=0.05, steps=2)
        assert name


def their_bits_are_those_of_plain_shards(ctx) -> None:
    """What an optimizer makes of 1-D tensors of a rank's parts, it makes of sharded parameters."""
    for name in ("sgd", "sgd foreach", "adamw", "adamw foreach", "adamw fused"):
        model = sharded(ctx, lambda: Net(2))
        plain = [nn.Parameter(local_part(p).clone()) for p in model.parameters()]
        ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain)
        for step in range(3):
            ours.zero_grad()
            token_loss(model, 1000 * step + ctx.rank).backward()
            for parameter, own in zip(model.parameters(), plain, strict=True):
                own.grad = local_part(parameter.grad).clone()
            ours.step()
            theirs.step()
            for parameter, own in zip(model.parameters(), plain, strict=True):
                assert torch.equal(local_part(parameter), own), name


def whole_tensors_are_refused_by_name(ctx) -> None:
    refused: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3),
        "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
        "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    }
    for name, make_optimizer in refused.items():
        model = sharded(ctx, net)
        optimizer = make_optimizer(model)

        def closure(model: nn.Module = model) -> Tensor:
            loss = token_loss(model, 0)
            loss.backward()
            return loss

        closure()
        told = rf"{name}.step\(\): .* of '.*whole tensor.*strategy='no_shard'.*AdamW"
        with pytest.raises(ModelError, match=told):
            optimizer.step(*[closure] * (name == "LBFGS"))
    model = sharded(ctx, net)
    token_loss(model, 0).backward()
    weight = model.head.weight
    for asked in (
        lambda p: p.t(),
        lambda p: p[0],
        lambda p: p @ p,
        lambda p: p.sum(0),
        lambda p: torch.cat([p, p]),
        lambda p: p.tolist(),
        lambda p: p.detach().numpy(),
        lambda p: numpy.asarray(p.grad),
    ):
        with pytest.raises(
            ModelError, match=r"of 'head.weight' \(40, 16\), of which this rank has.*full_tensor\(\)"
        ):
            asked(weight)


def whole_matrices_train_where_every_rank_has_them(ctx) -> None:
    """What the refusal says: strategy no_shard."""

    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for n, p in model.named_parameters() if p.ndim == 2], lr=1e-2)

    model, whole = sharded(ctx, net, data_parallel_sharding_strategy="no_shard"), whole_with_gradients(ctx)
    ours, theirs = muon(model), muon(whole)
    token_loss(model, ctx.rank).backward()
    ours.step()
    theirs.step()
    assert_same_weights(model.full_state_dict(), dict(whole.named_parameters()), 1e-8)


# Other code around a step ----------------------------------------------------------------------------------


def averages_of_weights(ctx) -> None:
    whole = seeded(net)
    for model in (sharded(ctx, net), whole):
        first, second = ([p.detach().clone() for p in model.parameters()] for _ in range(2))
        optimizer = adamw(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            ranks = range(ctx.world_size) if model is whole else [ctx.rank]
            (sum(token_loss(model, 1000 * step + rank) for rank in ranks) / len(ranks)).backward()
            optimizer.step()
            torch._foreach_lerp_(first, [p.detach() for p in model.parameters()], 0.1)
            for average, p in zip(second, model.parameters(), strict=True):
                average.data.mul_(0.9).add_(p.data, alpha=0.1)
        if model is whole:
            expected = first
        else:
            found = [[p.full_tensor() for p in averages] for averages in (first, second)]
    for averages in found:
        torch.testing.assert_close(averages, expected, rtol=1e-10, atol=1e-12)


def penalised(model: nn.Module, sample: int) -> Tensor:
    """What autograd adds to parameters itself, beside what units reduce."""
    return token_loss(model, sample) + sum(0.1 * p.norm() + 0.01 * p.abs().sum() for p in model.parameters())


def penalties_and_places_of_zero_grad(ctx) -> None:
    check_parity(ctx, net, penalised, steps=3)
    check_parity(ctx, net, penalised, steps=2, ga=2)
    check_parity(ctx, net, penalised, steps=2, ga=2, no_sync=True)
    for strategy in STRATEGIES:
        for to_none in (True, False):
            model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
            optimizer = adamw(model.parameters())
            for step in range(2):
                loss = token_loss(model, 1000 * step + ctx.rank)
                optimizer.zero_grad(set_to_none=to_none)
                loss.backward()
                optimizer.step()
            assert_same_weights(model.full_state_dict(), train_whole(net, token_loss, ctx.world_size).weights)


def torchs_own_scaler_skips_on_all_ranks(ctx) -> None:
    for optimizer in (OPTIMIZERS["sgd"], OPTIMIZERS["adamw fused"]):
        model = sharded(ctx, lambda: Net(2))
        updates, scaler = optimizer(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
        before = model.full_state_dict()
        scaler.scale(token_loss(model, ctx.rank)).backward()
        if ctx.rank == 1:
            next(own for p in model.parameters() if (own := local_part(p.grad)).numel())[0] = float("inf")
        scaler.step(updates)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert_same_weights(model.full_state_dict(), before, 0.0)


def values_are_drawn_and_read_as_whole_ones(ctx) -> None:
    model, whole = sharded(ctx, net), seeded(net)
    for one in (model, whole):
        torch.manual_seed(7)
        for parameter in one.parameters():
            nn.init.normal_(parameter) if parameter.ndim < 2 else nn.init.kaiming_uniform_(parameter)
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    assert_same_weights(model.full_state_dict(), dict(whole.named_parameters()), 0.0)
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter, ShardedTensor)
        assert torch.equal(parameter.full_tensor(), expected)
        parameter.data = expected.detach() * 2  # a whole value: each rank takes its part
    assert_same_weights(model.full_state_dict(), {n: p * 2 for n, p in whole.named_parameters()}, 0.0)


def moments_of_one_process_are_cut(ctx) -> None:
    whole = whole_with_gradients(ctx)
    theirs = adamw(whole.parameters())
    theirs.step()
    model = sharded(ctx, lambda: whole_copy(whole))
    ours = adamw(model.parameters())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in (1, 2):
        for one, optimizer in ((model, ours), (whole, theirs)):
            optimizer.zero_grad()
            ranks = [ctx.rank] if one is model else range(ctx.world_size)
            (sum(token_loss(one, 1000 * step + rank) for rank in ranks) / len(ranks)).backward()
            optimizer.step()
    assert_same_weights(model.full_state_dict(), dict(whole.named_parameters()))
    state = get_optimizer_state_dict(model, ours)
    set_optimizer_state_dict(model, ours, state)
    assert all(isinstance(kept["exp_avg"], ShardedTensor) for kept in ours.state.values())


def whole_copy(whole: nn.Module) -> nn.Module:
    model = net()
    model.load_state_dict(whole.state_dict())
    return model


# Compiled --------------------------------------------------------------------------------------------------


def compiled_before(make: Callable[[], nn.Module]) -> nn.Module:
    model = torch.compile(make(), backend="aot_eager")
    fully_shard(model, fsdp_unit_modules=[Block])
    return model


def compiled_after(make: Callable[[], nn.Module]) -> nn.Module:
    return torch.compile(fully_shard(make(), fsdp_unit_modules=[Block]), backend="aot_eager")


def blocks_compiled_in_place(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block)
    return fully_shard(model)


def compiled_models_train_alike(ctx, ways: tuple[Callable[..., nn.Module], ...]) -> None:
    expected = train_whole(net, token_loss, ctx.world_size)
    for compiled in ways:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = compiled(functools.partial(seeded, net))
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            loss = token_loss(model, 1000 * step + ctx.rank)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses) / ctx.world_size
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total.tolist(), expected.losses, rtol=1e-10, atol=0)
        assert torch._dynamo.utils.counters["stats"]["calls_captured"] >= 4, (
            "a block's operations are in a graph"
        )


def a_whole_step_is_compiled(ctx) -> None:
    """Forward, backward and update in one function."""
    model = sharded(ctx, lambda: nn.Sequential(Block(), Block()).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @functools.partial(torch.compile, backend="eager")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def loss_of(one: nn.Module, sample: int) -> Tensor:
        return one(vectors(sample, WIDTH)).square().mean()

    for index in range(2):
        step(vectors(1000 * index + ctx.rank, WIDTH))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    expected = train_whole(
        lambda: nn.Sequential(Block(), Block()).double(), loss_of, ctx.world_size, optimizer=sgd
    )
    assert_same_weights(model.full_state_dict(), expected.weights)


CHECKS = (
    trained_as_under_fsdp2,
    norms_are_those_of_the_whole,
    elementwise_optimizers_train_as_one_process,
    their_bits_are_those_of_plain_shards,
    whole_tensors_are_refused_by_name,
    whole_matrices_train_where_every_rank_has_them,
    averages_of_weights,
    penalties_and_places_of_zero_grad,
    torchs_own_scaler_skips_on_all_ranks,
    values_are_drawn_and_read_as_whole_ones,
    moments_of_one_process_are_cut,
)


@pytest.mark.grid
def test_sharded_parameters_answer_as_whole_ones():
    share_ranks(2, {check.__name__: check for check in CHECKS}, timeout=120.0)


@pytest.mark.grid
def test_on_four_ranks_and_in_instances():
    checks = (trained_as_under_fsdp2, trained_as_under_fsdp2_in_instances)
    share_ranks(4, {check.__name__: check for check in checks}, timeout=120.0)


@pytest.mark.grid
def test_compiled_models():
    run_ranks(compiled_models_train_alike, 2, (compiled_after, blocks_compiled_in_place), timeout=120.0)


@pytest.mark.full
def test_other_ways_to_compile():
    before = functools.partial(compiled_models_train_alike, ways=(compiled_before,))
    share_ranks(2, {"before": before, "a whole step": a_whole_step_is_compiled}, timeout=120.0)
