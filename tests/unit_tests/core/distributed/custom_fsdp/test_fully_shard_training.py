"""`fully_shard` over plain models: the same weights as one process, whatever shapes, strategy, optimizer and ranks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.sharded_module.sharded_tensor import local_part
from megatron.core.transport import collectives
from tests.harness.ranks import run_ranks, share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    Net,
    assert_at_rest,
    assert_same_weights,
    check_parity,
    seeded,
    sharded,
    square_loss,
    token_loss,
    train_sharded,
    train_whole,
)

POLICIES = ("memory", "step")


def net() -> nn.Module:
    return Net().double()


def uneven(inside: int, outside: int) -> nn.Module:
    """Weights [outside, inside] that no number of ranks divides."""
    return nn.Sequential(nn.Linear(inside, outside), nn.ReLU(), nn.Linear(outside, 5)).double()


def few() -> nn.Module:
    """7 parameters, all within one rank's part."""
    return nn.Sequential(
        nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1)
    ).double()


# On two, three and four ranks ---------------------------------------------------------------------------


def parity_of_one_group_with_uneven_shapes(ctx) -> None:
    for inside, outside in ((16, 15), (7, 15), (16, 17)):
        make = functools.partial(uneven, inside, outside)
        for strategy in STRATEGIES:
            check_parity(
                ctx,
                make,
                square_loss(inside),
                units=[nn.Sequential],
                data_parallel_sharding_strategy=strategy,
            )


def parity_with_fewer_elements_than_ranks(ctx) -> None:
    for strategy in STRATEGIES:
        for optimizer in (
            functools.partial(torch.optim.AdamW, lr=1e-2),
            functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        ):
            found = check_parity(
                ctx,
                few,
                square_loss(3),
                units=[nn.Linear],
                data_parallel_sharding_strategy=strategy,
                optimizer=optimizer,
                clip=0.01,
            )
        names = [name for name, _ in found.model.named_parameters()]
        assert names == ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"], names  # on every rank
    held = sum(parameter.to_local().numel() for parameter in found.model.parameters())
    assert held == (7 if ctx.rank == 0 else 0), held  # zero3: padding is everybody else's


def parity_of_every_strategy(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(ctx, net, token_loss, data_parallel_sharding_strategy=strategy, clip=0.05)


def _share(world_size: int) -> None:
    checks = (
        parity_of_one_group_with_uneven_shapes,
        parity_with_fewer_elements_than_ranks,
        parity_of_every_strategy,
    )
    share_ranks(world_size, {check.__name__: check for check in checks})


def test_parity_on_two_ranks():
    _share(2)


@pytest.mark.grid
def test_parity_on_three_ranks():
    _share(3)


@pytest.mark.grid
def test_parity_on_four_ranks():
    _share(4)


# On two ranks -------------------------------------------------------------------------------------------


def policies_and_microbatches(ctx) -> None:
    for strategy, policies in (("optim_grads", ("memory", "step")), ("optim_grads_params", POLICIES)):
        for policy in policies:
            check_parity(
                ctx,
                net,
                token_loss,
                ga=3,
                data_parallel_sharding_strategy=strategy,
                fsdp_reshard_policy=policy,
            )


def overlapped_gathers_and_reductions(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(
            ctx,
            net,
            token_loss,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            overlap_param_gather=strategy != "no_shard",
        )


def agrees_with_torch_fsdp2(ctx) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    ours = train_sharded(ctx, net, token_loss)
    theirs = seeded(net)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    updates = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(2):
        updates.zero_grad()
        token_loss(theirs, 1000 * step + ctx.rank).backward()
        updates.step()
    assert_same_weights(
        ours.weights, {name: p.full_tensor().detach() for name, p in theirs.named_parameters()}
    )


def parameters_keep_identity_and_storage(ctx) -> None:
    model = seeded(net)
    before = {name: (p, p.untyped_storage()._cdata) for name, p in model.named_parameters()}
    found = train_sharded(ctx, lambda: model, token_loss, steps=1)
    assert found.model is model
    wrapped = {name: p.untyped_storage()._cdata for name, (p, _) in before.items()}
    inside: dict[str, nn.Parameter] = {}
    model.register_forward_pre_hook(lambda *_: inside.update(model.named_parameters()))
    updates = torch.optim.SGD(found.model.parameters(), lr=0.1)
    for step in range(2):
        token_loss(found.model, step).backward()
        updates.step()
        updates.zero_grad()
    for name, (parameter, _) in before.items():
        assert parameter is inside[name], name
        assert parameter.untyped_storage()._cdata == wrapped[name], name
        assert parameter.untyped_storage().nbytes() == 0, name  # sharded: without memory
        assert parameter.grad is None, name


def optimizers_other_than_adam(ctx) -> None:
    for optimizer in (
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        functools.partial(torch.optim.Adagrad, lr=0.05),
    ):
        for strategy in STRATEGIES:
            check_parity(ctx, net, token_loss, optimizer=optimizer, data_parallel_sharding_strategy=strategy)


def adams_step_starts_as_a_plain_one(ctx) -> None:
    found = sharded(ctx, net)
    updates = torch.optim.AdamW(found.parameters(), lr=1e-2)
    for step in range(1, 3):
        updates.zero_grad()
        token_loss(found, step).backward()
        updates.step()
        assert {float(state["step"]) for state in updates.state.values()} == {float(step)}


def gradients_set_to_zero_instead_of_none(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(ctx, net, token_loss, set_to_none=False, data_parallel_sharding_strategy=strategy)
        check_parity(ctx, net, token_loss, ga=2, set_to_none=False, data_parallel_sharding_strategy=strategy)


def clipping_as_torch_does(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(ctx, net, token_loss, clip=0.01, data_parallel_sharding_strategy=strategy)
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        token_loss(model, ctx.rank).backward()
        whole = seeded(net)
        sum(token_loss(whole, rank) / ctx.world_size for rank in range(ctx.world_size)).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
        assert abs(model.clip_grad_norm_(0.5) - expected) < 1e-12
        again = model.clip_grad_norm_(1e9)
        assert abs(again - min(expected, 0.5)) < 1e-6, again


def every_rank_knows_of_an_infinite_gradient(ctx) -> None:
    """Loss scaling: only one rank's shard overflows, and all must skip the step."""
    for strategy in STRATEGIES:
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        scale = 1024.0
        (token_loss(model, ctx.rank) * scale).backward()
        if ctx.rank == 0:
            next(own for p in model.parameters() if (own := local_part(p.grad)).numel())[0] = float("inf")
        norm = model.clip_grad_norm_(float("inf"))
        assert strategy == "no_shard" or norm == float("inf"), (strategy, norm)
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        updates = torch.optim.SGD(model.parameters(), lr=0.1)
        (token_loss(model, ctx.rank) * scale).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        updates.step()
        expected = train_whole(
            net, token_loss, ctx.world_size, steps=1, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
        )
        assert_same_weights(model.full_state_dict(), expected.weights)


def evaluation_between_steps(ctx) -> None:
    expected = train_whole(net, token_loss, ctx.world_size, steps=4)
    whole = seeded(net)
    for strategy in STRATEGIES:
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        updates = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            with torch.no_grad() if step % 2 else torch.inference_mode():
                model.eval()
                assert not model.training
                seen = token_loss(model, 77).item()
                assert_at_rest(model)
            whole.load_state_dict(model.full_state_dict())
            assert abs(token_loss(whole, 77).item() - seen) < 1e-12, (strategy, step)
            model.train()
            updates.zero_grad()
            loss = token_loss(model, 1000 * step + ctx.rank)
            with torch.no_grad():
                token_loss(model, 78)  # between a forward and its backward
            loss.backward()
            updates.step()
        assert_same_weights(model.full_state_dict(), expected.weights)
        assert_at_rest(model)


def all_start_with_the_weights_of_rank_0(ctx) -> None:
    for strategy in STRATEGIES:
        own = train_sharded(
            ctx,
            lambda: (torch.manual_seed(ctx.rank), Net().double())[1],
            token_loss,
            data_parallel_sharding_strategy=strategy,
        )
        expected = train_whole(net, token_loss, ctx.world_size)
        assert_same_weights(own.weights, expected.weights)


CHECKS_ON_TWO = (
    policies_and_microbatches,
    overlapped_gathers_and_reductions,
    agrees_with_torch_fsdp2,
    parameters_keep_identity_and_storage,
    optimizers_other_than_adam,
    adams_step_starts_as_a_plain_one,
    gradients_set_to_zero_instead_of_none,
    clipping_as_torch_does,
    every_rank_knows_of_an_infinite_gradient,
    evaluation_between_steps,
    all_start_with_the_weights_of_rank_0,
)


@pytest.mark.grid
def test_training_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})


# One rank, and instances --------------------------------------------------------------------------------


def test_a_world_of_one_is_the_plain_model_and_communicates_nothing(monkeypatch):
    def body(ctx):
        def no_collective(*args, **kwargs):
            raise AssertionError("a collective in a world of one")

        for op in (
            "all_reduce",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "broadcast",
            "all_gather",
        ):
            monkeypatch.setattr(dist, op, no_collective)
        monkeypatch.setattr(collectives.Call, "launch", no_collective)
        for strategy in STRATEGIES:
            for microbatches in (1, 2):
                found = check_parity(
                    ctx,
                    net,
                    token_loss,
                    ga=microbatches,
                    tolerance=0.0,
                    data_parallel_sharding_strategy=strategy,
                )
                assert found.traffic == {}, found.traffic

    run_ranks(body, 1)


@pytest.mark.grid
def test_instances_agree_with_one_process():
    def body(ctx):
        hybrid = ctx.make_ps(dp=4, instances=2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for strategy in ("optim", "optim_grads", "optim_grads_params"):
            for microbatches, no_sync in ((1, True), (2, True), (2, False)):
                if strategy == "optim" and not no_sync:
                    continue
                found = check_parity(
                    ctx,
                    net,
                    token_loss,
                    ps=hybrid,
                    ga=microbatches,
                    no_sync=no_sync,
                    clip=0.05,
                    data_parallel_sharding_strategy=strategy,
                )
                outer = 5 * (
                    1 if no_sync else microbatches
                )  # by unit; with no_sync on the last microbatch only
                assert found.traffic["outer_all_reduce"][0] == outer, found.traffic
        for ps in (hybrid, mesh):
            for microbatches, no_sync in ((1, True), (2, True), (2, False)):
                found = check_parity(
                    ctx,
                    net,
                    token_loss,
                    ps=ps,
                    ga=microbatches,
                    no_sync=no_sync,
                    clip=0.05,
                    outer_dp_sharding_strategy="optim",
                )
                outer = 5 * (1 if no_sync else microbatches)
                assert found.traffic["outer_reduce_scatter"][0] == outer, found.traffic
                assert found.traffic["outer_all_gather"][0] == outer, found.traffic
            check_parity(
                ctx, few, square_loss(3), ps=ps, units=[nn.Linear], outer_dp_sharding_strategy="optim"
            )
        check_parity(ctx, net, token_loss, ps=mesh)

    run_ranks(body, 4)
