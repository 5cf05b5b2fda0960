"""`fully_shard`: units inside others, around others, partly frozen; reentrant checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.fully_shard import FullyShardedModule, fully_shard
from megatron.core.module import ModelError
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import Block, seeded, vectors

WIDTH = 16


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)


class Outer(nn.Module):
    """A frozen layer, a unit of its own, a trained layer."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(not frozen)
        self.inner, self.last = Inner(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))


class Around(nn.Module):
    """What the model owns itself, partly frozen, is used before and behind its units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64), requires_grad=False)
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x) @ self.frozen)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.out


def chain(*, frozen: bool) -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return nn.Sequential(first, Outer(frozen=frozen), Outer(frozen=frozen))


def wrap(ctx, model: nn.Module, *units, **config) -> FullyShardedModule:
    made = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params", **config)
    return fully_shard(model, ctx.ps, made, fsdp_unit_modules=units)


def check_gradients(ctx, model: nn.Module, *units, **config) -> FullyShardedModule:
    """Three steps have the gradients of the model that is not sharded."""
    reference = copy.deepcopy(model)
    wrapped = wrap(ctx, model, *units, **config)
    for sample in range(3):
        wrapped.zero_grad()
        wrapped(vectors(sample, WIDTH)).square().mean().backward()
        reference.zero_grad()
        reference(vectors(sample, WIDTH)).square().mean().backward()
        buffer = wrapped.engine.buffer
        for name in buffer.names:
            low, high = buffer.part(name, wrapped.engine.sharding.optimizer)
            whole = reference.get_parameter(name).grad.flatten()[low:high]
            torch.testing.assert_close(buffer.main_grad_part(name), whole, rtol=0, atol=1e-12)
    tracker = wrapped.engine.memory_tracker
    assert (tracker.live("gathered"), tracker.live("grads")) == (0, 0)
    return wrapped


def weights_stay_while_backward_reads_them(ctx) -> None:
    """All trained gradients are there long before backward is through."""
    for frozen in (False, True):
        check_gradients(ctx, seeded(lambda frozen=frozen: chain(frozen=frozen)), Outer, Inner)
    check_gradients(ctx, seeded(Around), Inner)


class Checkpointed(nn.Module):
    """A block several times, recomputed in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks] * 3:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def a_module_used_several_times_under_reentrant_checkpointing_is_told(ctx) -> None:
    check_gradients(ctx, seeded(lambda: Checkpointed(reentrant=False).double()), Block)
    wrapped = wrap(ctx, Checkpointed(reentrant=True).double(), Block)
    with pytest.raises(
        ModelError, match=r"'blocks.0.*arrived after its unit 'blocks.0' .*use_reentrant=False"
    ):
        wrapped(vectors(0, WIDTH)).sum().backward()


CHECKS = (
    weights_stay_while_backward_reads_them,
    a_module_used_several_times_under_reentrant_checkpointing_is_told,
)


def test_nested_units():
    share_ranks(2, {check.__name__: check for check in CHECKS}, timeout=60)
