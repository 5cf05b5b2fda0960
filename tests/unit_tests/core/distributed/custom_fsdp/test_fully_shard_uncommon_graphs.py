"""`fully_shard`: modules whose forward never runs, blocks used twice under reentrant checkpoints, double backward."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.sharded_module.sharded_tensor import local_part
from megatron.core.module import ModelError
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
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
    vectors,
)

SGD = functools.partial(torch.optim.SGD, lr=0.1)
CUT = ("optim_grads", "optim_grads_params")


# Modules that are not called ---------------------------------------------------------------------------


class Attends(nn.Module):
    """`out_proj` of nn.MultiheadAttention is a module of its own, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x)).unsqueeze(0)
        x = self.attention(x, x, x, need_weights=False)[0].squeeze(0)
        return self.head(self.blocks[1](x))


class Reads(nn.Module):
    """Reads a list of parameters, and weights and biases of modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(2))
        self.block = Block()
        self.table = nn.ParameterDict({"shift": torch.rand(WIDTH)})
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scales[0]
        x = self.block(x) * self.scales[1] + self.table["shift"]
        return self.last(torch.tanh(x @ self.plain.weight.t() + self.plain.bias))


def modules_that_are_not_called(ctx) -> None:
    for make in (Attends, Reads):
        for strategy in CUT:
            for units in ([Block], [Block, nn.Linear]):
                for microbatches in (1, 2):
                    check_parity(
                        ctx,
                        _double(make),
                        square_loss(WIDTH),
                        units=units,
                        steps=3,
                        ga=microbatches,
                        data_parallel_sharding_strategy=strategy,
                    )


@functools.cache
def _double(make):
    return lambda: make().double()


def gathered_where_they_are_read(ctx) -> None:
    model = sharded(ctx, _double(Attends))
    unit = next(unit for unit in model.engine.units if "attention.out_proj.weight" in unit.names)
    for step in range(2):
        square_loss(WIDTH)(model, step).backward()
        assert_at_rest(model)
        model.zero_grad()
    assert model.engine.driver._forward.read == {unit.index: None}
    # of units that are called nothing is listened to any more
    kinds = {
        name: getattr(module._parameters, "on_read", None) is None for name, module in model.named_modules()
    }
    found = [kinds[name] for name in ("head", "blocks.0.up", "attention.out_proj")]
    assert found == [True, True, False], kinds


def several_forwards_and_evaluations_of_modules_that_are_not_called(ctx) -> None:
    plain = _double(Attends)
    reference, model = seeded(plain), sharded(ctx, plain)
    for sample in range(2):
        x = vectors(sample, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-12)
        assert_at_rest(model)
        first, second = (model(vectors(10 + n, WIDTH)).square().mean() for n in range(2))
        with torch.no_grad():
            model(x)
        with model.no_sync():
            first.backward()
        second.backward()
        for n in range(2):
            reference(vectors(10 + n, WIDTH)).square().mean().backward()
        _assert_same_grads(model, reference)
        model.zero_grad()
        reference.zero_grad()
        assert_at_rest(model)


def _assert_same_grads(model, reference: nn.Module) -> None:
    """.grad of this rank's shards: the mean over ranks that all have the reference's data."""
    buffer = model.engine.buffer
    for (_, shard), name in zip(model.named_parameters(), buffer.names, strict=True):
        low, high = buffer.part(name, model.engine.sharding.optimizer)
        whole = reference.get_parameter(name).grad
        expected = torch.zeros(high - low).double() if whole is None else whole.flatten()[low:high]
        torch.testing.assert_close(
            local_part(shard.grad), expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


def policies_and_debug_with_modules_that_are_not_called(ctx) -> None:
    for how in ({"fsdp_debug": True}, {"fsdp_reshard_policy": "step"}):
        for make in (Attends, Reads):
            check_parity(ctx, _double(make), square_loss(WIDTH), steps=3, **how)


class Looks(Net):
    """Asks for the type of a weight before its unit runs, as much code does."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.head.weight.dtype == torch.float64
        return super().forward(tokens)


def a_look_at_a_weight_costs_something_in_the_first_forward_only(ctx) -> None:
    looks = check_parity(ctx, _double(Looks), token_loss, steps=3)
    plain = train_sharded(ctx, _double(Net), token_loss, steps=3)
    assert looks.traffic == plain.traffic
    assert looks.model.engine.memory_tracker.peak("gathered") >= plain.model.engine.memory_tracker.peak(
        "gathered"
    )


def containers_as_units_are_refused(ctx) -> None:
    for units, which in (
        ([nn.ModuleList], r"'blocks' is a ModuleList, which has no forward.*'blocks.0.norm.weight'"),
        (["ModuleList"], r"'blocks' is a ModuleList"),
        ([("embed", "blocks")], r"'blocks' is a ModuleList"),
    ):
        with pytest.raises(ModelError, match=which):
            sharded(ctx, _double(Attends), units=units)
    with pytest.raises(ModelError, match=r"'scales' is a ParameterList, .*\('scales.0'\)"):
        sharded(ctx, _double(Reads), units=[nn.ParameterList])
    sharded(ctx, _double(Attends), units=[nn.ModuleList, Block])  # all that it has is in units inside it


# Reentrant checkpoints of what is used twice -----------------------------------------------------------


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
        self.reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def blocks_used_twice_under_reentrant_checkpoints(ctx) -> None:
    """Gradients come once a use: sums are right where reductions wait for the backward's end, else it is refused."""
    for strategy in ("no_shard", "optim"):
        for microbatches in (1, 2):
            check_parity(
                ctx,
                _double(UsedTwice),
                square_loss(WIDTH),
                ga=microbatches,
                data_parallel_sharding_strategy=strategy,
            )
    for strategy in STRATEGIES:
        model = sharded(
            ctx,
            _double(UsedTwice),
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            ddp_bucket_size=1,
        )
        updates = SGD(model.parameters())
        with pytest.raises(
            ModelError, match=r"a gradient for parameter 'block\..* arrived after .*use_reentrant=False"
        ):
            square_loss(WIDTH)(model, 7).backward()
        model.zero_grad()
        model.reentrant = False
        for step in range(2):
            updates.zero_grad()
            square_loss(WIDTH)(model, 1000 * step + ctx.rank).backward()
            updates.step()
        expected = train_whole(_double(UsedTwice), square_loss(WIDTH), ctx.world_size, optimizer=SGD)
        assert_same_weights(model.full_state_dict(), expected.weights)


# Double backward ---------------------------------------------------------------------------------------


class Critic(nn.Module):
    """A unit of its own is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(block(x))
        return self.head(x)


def penalty_loss(model: nn.Module, sample: int) -> Tensor:
    """A gradient penalty: of the norm of an input's gradient, beside the loss of another input."""
    x = vectors(sample, WIDTH).requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss: Tensor = (
        model(vectors(sample + 500, WIDTH)).square().mean() + (grad.norm(dim=1) - 1).square().mean()
    )
    return loss


def penalty_only_loss(model: nn.Module, sample: int) -> Tensor:
    x = vectors(sample, WIDTH).requires_grad_(True) * 1.0
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss: Tensor = grad.square().sum()
    return loss


def double_backward_where_weights_are_whole(ctx) -> None:
    for strategy in ("no_shard", "optim", "optim_grads"):
        for loss in (penalty_loss, penalty_only_loss):
            for microbatches in (1, 2):
                check_parity(
                    ctx,
                    _double(Critic),
                    loss,
                    ga=microbatches,
                    optimizer=SGD,  # the head's bias has no gradient in a penalty: a plain Adam skips it
                    data_parallel_sharding_strategy=strategy,
                    overlap_grad_reduce=strategy == "optim",
                )


def a_penalty_behind_another_backward(ctx) -> None:
    """The graph of a gradient outlives a backward that reduces."""
    for strategy in ("optim_grads",):
        reference, model = (
            seeded(_double(Critic)),
            sharded(ctx, _double(Critic), data_parallel_sharding_strategy=strategy),
        )
        for step in range(2):
            for one in (reference, model):
                one.zero_grad()
                x = vectors(step, WIDTH).requires_grad_(True)
                (grad,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
                one(vectors(5 + step, WIDTH)).square().mean().backward()
                grad.square().sum().backward()
            _assert_same_grads(model, reference)


def double_backward_that_cannot_be_is_refused(ctx) -> None:
    model = sharded(ctx, _double(Critic))
    for loss in (penalty_loss, penalty_only_loss):
        with pytest.raises(
            ModelError, match=r"unit 'head': create_graph=True .*optim_grads_params.*use optim_grads, optim"
        ):
            loss(model, 0)
    for strategy in STRATEGIES:
        model = sharded(ctx, _double(Critic), data_parallel_sharding_strategy=strategy)
        with pytest.raises(ModelError, match=r"create_graph=True"):
            square_loss(WIDTH)(model, 3).backward(create_graph=True)
        if strategy != "optim_grads_params":
            with pytest.raises(
                ModelError, match=r"a gradient of parameter 'head.* comes with create_graph=True"
            ):
                square_loss(WIDTH)(model, 3).backward(create_graph=True)
        reference = seeded(_double(Critic))
        for one in (reference, model):
            square_loss(WIDTH)(one, 4).backward()
        _assert_same_grads(model, reference)


CHECKS_ON_TWO = (
    modules_that_are_not_called,
    gathered_where_they_are_read,
    several_forwards_and_evaluations_of_modules_that_are_not_called,
    policies_and_debug_with_modules_that_are_not_called,
    a_look_at_a_weight_costs_something_in_the_first_forward_only,
    containers_as_units_are_refused,
    blocks_used_twice_under_reentrant_checkpoints,
    double_backward_where_weights_are_whole,
    a_penalty_behind_another_backward,
    double_backward_that_cannot_be_is_refused,
)


@pytest.mark.grid
def test_uncommon_graphs_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})
