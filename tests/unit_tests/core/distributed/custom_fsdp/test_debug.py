"""--fsdp-debug: what is read or written while its memory is released is named; what runs otherwise runs the same."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.custom_fsdp import released_tensors
from megatron.core.module import ModelError
from tests.harness.ranks import run_ranks
from tests.harness.sharded_training import (
    WIDTH,
    Block,
    Net,
    assert_same_weights,
    sharded,
    token_loss,
    train_sharded,
    train_whole,
    vectors,
)


class Keeps(Block):
    """Keeps a view of a weight and one of a bias."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up.weight.t()
        self.tail = self.down.bias.detach()[3:]
        return super().forward(x)


class Borrows(nn.Module):
    """Its head uses what the first block has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keeps(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.blocks[0].kept


def net() -> nn.Module:
    return Net().double()


def kept_views_are_named(ctx) -> None:
    model = sharded(ctx, lambda: nn.Sequential(Keeps(), Block()).double(), fsdp_debug=True)
    model(vectors(0, WIDTH)).square().mean().backward()
    block = model[0]
    with pytest.raises(ModelError, match=r"--fsdp-debug: clone .* weight of '0.up.weight' \(unit '0'\)"):
        block.kept.clone()
    with pytest.raises(ModelError, match=r"add_ .* weight of '0.down.bias' \(unit '0'\)"):
        block.tail.add_(1.0)
    with pytest.raises(ModelError, match=r"weight of '0.norm.weight'"):
        model.engine.buffer.weight("0.norm.weight").sum()
    with pytest.raises(ModelError, match=r" t reads or writes the weight of '1.up.weight' \(unit '1'\)"):
        vectors(0, WIDTH) @ model.engine.buffer.weight("1.up.weight").t()
    with pytest.raises(ModelError, match=r"gradient of '1.up.weight'"):
        model.engine.buffer.main_grad("1.up.weight").abs()
    assert (block.kept.shape, block.kept.size(0), block.kept.stride()) == ((16, 32), 16, (1, 16))
    assert (
        torch.empty_like(block.kept).shape
        == torch.zeros_like(model.engine.buffer.weight("0.up.weight")).t().shape
    )


def a_weight_used_after_its_unit(ctx) -> None:
    model = sharded(ctx, lambda: Borrows().double(), fsdp_debug=True)
    with pytest.raises(ModelError, match=r"mm reads or writes the weight of 'blocks.0.up.weight'"):
        model(vectors(0, WIDTH))

    class UsedInBackward(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            other = model[0].up.weight.detach()
            y.register_hook(lambda grad: grad + other.sum())
            return y

    model = sharded(ctx, lambda: nn.Sequential(Block(), Block(), UsedInBackward()).double(), fsdp_debug=True)
    loss = model(vectors(0, WIDTH)).square().mean()
    with pytest.raises(ModelError, match=r"sum reads or writes the weight of '0.up.weight'"):
        loss.backward()


def gradients_at_rest_between_steps(ctx) -> None:
    """Sharded gradients have no memory from a step's beginning to their unit's first reduction."""
    model = sharded(ctx, net, data_parallel_sharding_strategy="optim_grads", fsdp_debug=True)
    buffer = model.engine.buffer
    model.engine.begin_step(1)
    grads = buffer.bucket_of("embed.weight").main_grads
    with pytest.raises(ModelError, match=r"sharded gradients of unit 'embed'"):
        grads.sum()
    assert buffer.weight("embed.weight").sum() != 0.0, "weights are whole: nothing to be found there"


def watched() -> int:
    """How many engines of this thread are watched."""
    return sum(
        len(mode.known) for mode in released_tensors._stack() if isinstance(mode, released_tensors._Watch)
    )


def training_is_the_same(ctx) -> None:
    for strategy in ("optim_grads", "optim_grads_params"):
        common = {"ga": 2, "data_parallel_sharding_strategy": strategy}
        plain = train_sharded(ctx, net, token_loss, **common)
        assert watched() == 0, "without the flag nothing is installed"
        found = train_sharded(ctx, net, token_loss, fsdp_debug=True, **common)
        assert watched() == 1
        assert (found.losses, found.traffic) == (plain.losses, plain.traffic)
        assert_same_weights(found.weights, plain.weights, 0.0)
        del found
        gc.collect()
        assert watched() == 0, "the engine is gone"
    assert_same_weights(plain.weights, train_whole(net, token_loss, ctx.world_size, ga=2).weights)


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


def it_lives_below_modes_that_come_and_go(ctx) -> None:
    with Counts() as outer:
        model = sharded(ctx, net, fsdp_debug=True)  # entered later, left later
    before = outer.ops
    torch.ones(2) + 1
    assert outer.ops == before, "the mode around it was left"
    with Counts() as inner, pytest.raises(ModelError, match=r"weight of 'embed.weight'"):
        model.engine.buffer.weight("embed.weight").sum()
    assert inner.ops > 0
    with Counts() as around:
        del model
        gc.collect()
        assert watched() == 0
        torch.ones(2)
    assert around.ops > 0, "the last one out took only its own"


def refusals_and_nothing_to_watch(ctx) -> None:
    with pytest.raises(ModelError, match=r"fsdp_debug: no effect with .*'optim'"):
        sharded(ctx, net, data_parallel_sharding_strategy="optim", fsdp_debug=True)
    assert watched() == 0, "nothing is ever released"


CHECKS = (
    kept_views_are_named,
    a_weight_used_after_its_unit,
    gradients_at_rest_between_steps,
    training_is_the_same,
    it_lives_below_modes_that_come_and_go,
    refusals_and_nothing_to_watch,
)


def test_debug_on_two_ranks():
    def run(ctx) -> None:
        for check in CHECKS:
            check(ctx)
            gc.collect()

    run_ranks(run, 2, timeout=100)


def test_a_world_of_one_releases_nothing():
    def run(ctx) -> int:
        sharded(ctx, net, fsdp_debug=True)
        return watched()

    assert run_ranks(run, 1) == [0]
