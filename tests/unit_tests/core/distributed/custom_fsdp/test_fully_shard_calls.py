"""`fully_shard` however a model is called: parts of it, units several times, several forwards, inside checkpoints."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_same_weights,
    check_parity,
    sharded,
    square_loss,
    token_loss,
    train_sharded,
    train_whole,
    vectors,
)


def net() -> nn.Module:
    return Net().double()


# Forwards -----------------------------------------------------------------------------------------------


class Rootless(nn.Module):
    """A forward without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(4, WIDTH))
        self.block = Block()

    def forward(self) -> torch.Tensor:
        return self.block(self.start)


def a_root_without_inputs_and_with_a_parameter_of_its_own(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(
            ctx,
            lambda: Rootless().double(),
            lambda model, sample: (model() * vectors(sample, WIDTH)).square().mean(),
            data_parallel_sharding_strategy=strategy,
        )


class WithPrefix(nn.Module):
    """Two ways to call it: the whole, or its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def forward_and_backward_of_a_submodule(ctx) -> None:
    def half_loss(model, sample):
        return model.first(vectors(sample, WIDTH)).square().mean()

    def mixed_loss(model, sample):
        return half_loss(model, sample) if sample >= 1000 else square_loss(WIDTH)(model, sample)

    for strategy in STRATEGIES:
        for loss in (half_loss, mixed_loss):
            check_parity(
                ctx,
                lambda: WithPrefix().double(),
                loss,
                data_parallel_sharding_strategy=strategy,
                optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            )


class Repeated(nn.Module):
    """One block several times, another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Block()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.other(self.again(self.again(x))))


def a_unit_several_times_in_a_forward(ctx) -> None:
    for strategy in STRATEGIES:
        found = check_parity(
            ctx,
            lambda: Repeated().double(),
            square_loss(WIDTH),
            ga=2,
            data_parallel_sharding_strategy=strategy,
        )
    # forward: again, other, again; backward: again follows itself, other, again
    assert found.traffic["all_gather"][0] <= 2 * 5, found.traffic


def two_forwards_and_one_backward(ctx) -> None:
    def loss(model, sample):
        return (token_loss(model, sample) + token_loss(model, sample + 500)) / 2

    for strategy in STRATEGIES:
        check_parity(ctx, net, loss, data_parallel_sharding_strategy=strategy)


def two_forwards_and_two_backwards(ctx) -> None:
    """Forwards ahead of their backwards, as in 1F1B; the first backward inside no_sync, or not."""
    samples = 4 * ctx.world_size
    expected = train_whole(net, token_loss, ctx.world_size, ga=4)
    assert samples == 8
    for strategy in STRATEGIES:
        for deferred in (True, False):
            if strategy in ("no_shard", "optim") and not deferred:
                continue
            model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
            updates = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                updates.zero_grad()
                waiting = []
                for index in range(4):
                    waiting.append(token_loss(model, 1000 * step + index * ctx.world_size + ctx.rank) / 4)
                    if len(waiting) == 2:
                        _backward(model, waiting.pop(0), deferred)
                _backward(model, waiting.pop(0), False)
                updates.step()
            assert_same_weights(model.full_state_dict(), expected.weights)
            assert_at_rest(model)


def _backward(model, loss, deferred: bool) -> None:
    if deferred:
        with model.no_sync():
            loss.backward()
    else:
        loss.backward()


class Shifted(Block):
    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + shift


def an_input_made_in_inference_mode(ctx) -> None:
    with torch.inference_mode():
        shift = torch.ones(WIDTH, dtype=torch.float64)
    model = sharded(ctx, lambda: Shifted().double(), units=[Shifted])
    model(vectors(0, WIDTH), shift=shift).sum().backward()
    assert_at_rest(model)


# Recomputation ------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Checkpoints around units, around pairs of them, or around what is inside of them."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(_Inside(reentrant) if where == "inside" else Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 40)
        self.where, self.reentrant = where, reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.where == "pairs":
            for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant) if self.where == "around" else block(x)
        return self.head(x)


class _Inside(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(
            lambda y: self.down(self.up(self.norm(y)).tanh()), x, use_reentrant=self.reentrant
        )


def activation_checkpointing(ctx) -> None:
    plain = train_sharded(ctx, lambda: Recomputed("none", False).double(), token_loss).traffic
    for where in ("around", "inside"):
        for reentrant in (False, True):
            for strategy in STRATEGIES:
                found = check_parity(
                    ctx,
                    lambda w=where, r=reentrant: Recomputed(w, r).double(),
                    token_loss,
                    data_parallel_sharding_strategy=strategy,
                )
            assert found.traffic == plain, (where, reentrant, found.traffic, plain)  # nothing moves twice


def checkpoints_around_several_units(ctx) -> None:
    for reentrant in (False, True):
        for strategy in ("optim_grads", "optim_grads_params"):
            for microbatches in (1, 2):
                check_parity(
                    ctx,
                    lambda r=reentrant: Recomputed("pairs", r).double(),
                    token_loss,
                    ga=microbatches,
                    data_parallel_sharding_strategy=strategy,
                )


def the_whole_model_in_a_checkpoint(ctx) -> None:
    def loss(model, sample, reentrant):
        x = vectors(sample, WIDTH).requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    for reentrant in (False, True):
        for strategy in STRATEGIES:
            check_parity(
                ctx,
                lambda: nn.Sequential(Block(), Block(), Block()).double(),
                functools.partial(loss, reentrant=reentrant),
                data_parallel_sharding_strategy=strategy,
            )


CHECKS_ON_TWO = (
    a_root_without_inputs_and_with_a_parameter_of_its_own,
    forward_and_backward_of_a_submodule,
    a_unit_several_times_in_a_forward,
    two_forwards_and_one_backward,
    two_forwards_and_two_backwards,
    activation_checkpointing,
    checkpoints_around_several_units,
    the_whole_model_in_a_checkpoint,
    an_input_made_in_inference_mode,
)


@pytest.mark.grid
def test_calls_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})
