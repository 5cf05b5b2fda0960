"""Plain models trained sharded on every rank, and the same models trained whole on one rank over everybody's data."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.fully_shard import FullyShardedModule, fully_shard
from megatron.core.sharding_table import Sharding, ShardPlace

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
VOCAB = 40
WIDTH = 16

Loss = Callable[[nn.Module, int], Tensor]  # (model, number of the sample) -> mean loss


class Block(nn.Module):
    """A residual block with a norm and two layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head: units "embed", "blocks.0", ..., "norm+head"."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Ordered(nn.Module):
    """Blocks of vectors that run in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order = [2, 0, 3, 1]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Tied(Net):
    """Two blocks; the head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__(2)
        self.head.weight = self.embed.weight


def tokens(sample: int) -> Tensor:
    """[2, 6]"""
    return torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(sample))


def token_loss(model: nn.Module, sample: int) -> Tensor:
    batch = tokens(sample)
    logits = model(batch).flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide, batch.roll(1, 1).flatten())


def vectors(sample: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[4, width]"""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(sample), dtype=dtype)


def square_loss(width: int, dtype: torch.dtype = torch.float64) -> Loss:
    """Of models of [4, width]."""
    return lambda model, sample: model(vectors(sample, width, dtype)).square().mean()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same weights on every call."""
    torch.manual_seed(seed)
    return make()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclasses.dataclass
class Trained:
    """losses: of each step, this rank's share of the mean. weights: whole. traffic: calls and bytes of the last step,
    by collective. model: None for the reference."""

    losses: list[float]
    weights: dict[str, Tensor]
    traffic: dict[str, tuple[int, int]]
    model: FullyShardedModule | None = None


@functools.cache  # per process: many checks have the same reference
def train_whole(
    make: Callable[[], nn.Module],
    loss: Loss,
    ranks: int,
    *,
    steps: int = 2,
    ga: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    clip: float | None = None,
) -> Trained:
    """One process over the samples of all ranks and microbatches."""
    model = seeded(make)
    updates = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        updates.zero_grad()
        total = 0.0
        for sample in range(ga * ranks):
            one = loss(model, 1000 * step + sample) / (ga * ranks)
            one.backward()
            total += one.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
        losses.append(total)
    return Trained(losses, {name: p.detach().clone() for name, p in model.named_parameters()}, {})


def sharded(
    ctx: Any, make: Callable[[], nn.Module], units: Any = (Block,), ps: Any = None, **config: Any
) -> Any:
    """The seeded model under `fully_shard`, optim_grads_params unless said otherwise."""
    config = {"data_parallel_sharding_strategy": "optim_grads_params", **config}
    return fully_shard(
        seeded(make), ps or ctx.ps, DistributedDataParallelConfig(**config), fsdp_unit_modules=list(units)
    )


def train_sharded(
    ctx: Any,
    make: Callable[[], nn.Module],
    loss: Loss,
    *,
    units: Any = (Block,),
    ps: Any = None,
    steps: int = 2,
    ga: int = 1,
    no_sync: bool | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    clip: float | None = None,
    set_to_none: bool = True,
    **config: Any,
) -> Trained:
    """This rank's samples. no_sync: all microbatches but the last inside it; where None, only if the strategy needs
    it."""
    model = sharded(ctx, make, units, ps, **config)
    strategy = model.engine.config.data_parallel_sharding_strategy
    deferred = strategy in ("no_shard", "optim") if no_sync is None else no_sync
    updates = optimizer(model.parameters())
    losses: list[float] = []
    traffic: collections.Counter[tuple[str, str]] = collections.Counter()
    for step in range(steps):
        updates.zero_grad(set_to_none=set_to_none)
        total, traffic = 0.0, collections.Counter()
        for index in range(ga):
            with model.no_sync() if deferred and index < ga - 1 else contextlib.nullcontext():
                one = loss(model, 1000 * step + index * ctx.world_size + ctx.rank) / ga
                one.backward()
            total += one.item() / ctx.world_size
            if not deferred or index == ga - 1:  # what is counted begins afresh with the next forward
                for op, (calls, num_bytes) in moved_by(model.engine).items():
                    traffic[op, "calls"] += calls
                    traffic[op, "bytes"] += num_bytes
        if clip is not None:
            model.clip_grad_norm_(clip)
        updates.step()
        losses.append(total)
    moved = {op: (traffic[op, "calls"], traffic[op, "bytes"]) for op, _ in traffic}
    return Trained(losses, model.full_state_dict(), moved, model)


def moved_by(engine: Any) -> dict[str, tuple[int, int]]:
    """Calls and bytes of the engine's last step, by collective, of those that were called."""
    kinds = [field.name for field in dataclasses.fields(engine.traffic) if field.compare]
    told = {kind: getattr(engine.traffic, kind) for kind in kinds}
    return {kind: (moved.calls, moved.payload_bytes) for kind, moved in told.items() if moved.calls}


def unit_sizes(engine: Any) -> list[int]:
    """Elements of each unit's whole weights, padding included."""
    buckets = [engine.buffer.buckets_of_unit(unit.name) for unit in engine.units]
    return [sum(bucket.full_weights.numel() for bucket in one) for one in buckets]


def persistent_bytes(
    numel: int,
    sharding: Sharding,
    place: ShardPlace,
    *,
    weight_itemsize: int,
    main_itemsize: int,
    grad_itemsize: int,
    moment_itemsize: int = 4,
    num_moments: int = 2,
) -> dict[str, int]:
    """Bytes on a rank between steps, by category, for so many elements of all trained buckets, padding included.
    main_itemsize: 0 where the optimizer updates the model's weights themselves."""
    optimizer = numel // place.ways(sharding.optimizer)
    rounded = main_itemsize and 1 < place.ways(sharding.weights) == place.ways(sharding.optimizer)
    return {
        "weights": 0 if rounded else numel // place.ways(sharding.weights) * weight_itemsize,
        "main_weights": optimizer * main_itemsize,
        "main_grads": numel // place.ways(sharding.main_grads) * grad_itemsize,
        "moments": optimizer * moment_itemsize * num_moments,
    }


def calls(traffic: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Of each collective in `Trained.traffic`."""
    return {name: count for name, (count, _) in traffic.items()}


def assert_same_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10
) -> None:
    """The largest difference of any weight is within the tolerance; names in the same order. found: may have buffers
    and further names of tied weights besides."""
    assert [name for name in found if name in expected] == list(expected)
    for name, weight in expected.items():
        off = (found[name].double() - weight.double()).abs().max().item() if weight.numel() else 0.0
        assert off <= tolerance, f"{name}: off by {off:.3g}"


def assert_at_rest(model: FullyShardedModule) -> None:
    """After a step nothing transient is held."""
    assert model.engine.memory_tracker.transient_bytes == 0, model.engine.memory_tracker.lines()


def check_parity(
    ctx: Any, make: Callable[[], nn.Module], loss: Loss, *, tolerance: float = 1e-10, **how: Any
) -> Trained:
    """Sharded training ends with the weights of training whole; what it holds between steps is at rest."""
    common = {key: how[key] for key in ("steps", "ga", "optimizer", "clip") if key in how}
    expected = train_whole(make, loss, ctx.world_size, **common)
    found = train_sharded(ctx, make, loss, **how)
    assert_same_weights(found.weights, expected.weights, tolerance)
    assert found.model is not None
    assert_at_rest(found.model)
    return found
