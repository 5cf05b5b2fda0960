"""`fully_shard` of 16-bit models: what each gradient is rounded to, on its way and where it is kept."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.bucket_memory import (
    grad_comm_dtype,
    main_grad_dtype,
    main_weight_dtype,
)
from tests.harness.ranks import run_ranks, share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Net,
    adamw,
    assert_at_rest,
    assert_same_weights,
    seeded,
    sharded,
    square_loss,
    token_loss,
    train_sharded,
    unit_sizes,
)

FLAGS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SGD = functools.partial(torch.optim.SGD, lr=0.25)


def emulated(ctx, dtype: torch.dtype, config, *, ga: int, cut: bool, steps: int = 2, optimizer=SGD):
    """The same steps with explicit roundings, all ranks' samples in one process: whole weights by name."""
    model = seeded(lambda: Net(1).to(dtype))
    kept, wire = main_grad_dtype(dtype, config), grad_comm_dtype(dtype, config)
    main = {
        n: p.detach().to(main_weight_dtype(dtype, config)).requires_grad_()
        for n, p in model.named_parameters()
    }
    updates = optimizer(main.values())
    for step in range(steps):
        totals: dict[str, torch.Tensor] = {}
        for index in range(ga):
            parts: dict[str, list[torch.Tensor]] = {}
            for rank in range(ctx.world_size):
                model.zero_grad()
                (token_loss(model, 1000 * step + index * ctx.world_size + rank) / ga).backward()
                for name, parameter in model.named_parameters():
                    parts.setdefault(name, []).append(parameter.grad.clone())
            for name, grads in parts.items():
                if cut:  # each contribution travels, its sum is added to what is kept
                    scaled = [_scaled(grad, wire, ctx.world_size) for grad in grads]
                    total = _wide(scaled[0]) + _wide(scaled[1])
                    totals[name] = (
                        (_wide(totals[name]) + total).to(kept) if name in totals else total.to(kept)
                    )
                else:  # each rank adds up its own in what is kept, which travels once
                    totals.setdefault(name, [None, None])
                    for rank, grad in enumerate(grads):
                        totals[name][rank] = _added(totals[name][rank], grad, kept, ctx.world_size)
        for name, parameter in main.items():
            total = totals[name]
            parameter.grad = (total if cut else (_wide(total[0]) + _wide(total[1])).to(kept)).to(
                parameter.dtype
            )
        updates.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(main[name])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _scaled(grad: torch.Tensor, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    return grad.to(dtype).mul_(1 / ranks)


def _added(total: torch.Tensor | None, grad: torch.Tensor, kept: torch.dtype, ranks: int) -> torch.Tensor:
    return _scaled(grad, kept, ranks) if total is None else total.add_(grad, alpha=1 / ranks)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float64 else tensor.float()


# Of main gradients and wire: each dtype of either, and either of them left to the other flags.
SAMPLE = (
    ("auto", "auto"),
    ("auto", "fp16"),
    ("bf16", "auto"),
    ("bf16", "bf16"),
    ("bf16", "fp16"),
    ("fp16", "fp32"),
    ("fp32", "bf16"),
)


def combinations_of_dtypes_against_an_emulation(ctx, pairs=SAMPLE) -> None:
    """Model x main gradients x wire x main weights, over two microbatches: bit for bit with fp32 main weights."""
    expected: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for (kept, wire), main in itertools.product(pairs, ("fp32", "auto")):
            if dtype == torch.float32 and (main == "auto" or kept == "auto"):
                continue  # the same as fp32
            if main == "auto" and wire != kept:
                continue  # main weights do not meet the wire
            flags = {
                "megatron_fsdp_main_grads_dtype": kept,
                "megatron_fsdp_grad_comm_dtype": wire,
                "megatron_fsdp_main_params_dtype": main,
            }
            found = train_sharded(
                ctx, lambda d=dtype: Net(1).to(d), token_loss, steps=2, ga=2, optimizer=SGD, **flags
            )
            config = found.model.engine.config
            resolved = (dtype, main_grad_dtype(dtype, config), grad_comm_dtype(dtype, config), main)
            if resolved not in expected:
                expected[resolved] = emulated(ctx, dtype, config, ga=2, cut=True)
            weights = expected[resolved]
            # torch rounds a 16-bit update one way in vectors and another in what is left over of a tensor
            allowed = 0.02 if main == "auto" else 0.0
            for name, weight in weights.items():
                torch.testing.assert_close(
                    found.weights[name],
                    weight,
                    rtol=allowed,
                    atol=allowed / 10,
                    msg=f"{dtype} {flags} {name}",
                )
            kept_as = {one.dtype for one in found.model.engine.buffer.grads_at_rest()}
            assert kept_as == {main_grad_dtype(dtype, config)}, (dtype, flags)
            _, moved = found.traffic["reduce_scatter"]
            numel = sum(unit_sizes(found.model.engine))
            assert moved == 2 * numel * grad_comm_dtype(dtype, config).itemsize, (dtype, flags, moved)


def older_flags_against_an_emulation(ctx) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for flags in ({}, {"grad_reduce_in_bf16": True}, {"accumulate_allreduce_grads_in_fp32": True}):
            for strategy in STRATEGIES:
                cut = strategy in ("optim_grads", "optim_grads_params")
                for microbatches in (2,):
                    found = train_sharded(
                        ctx,
                        lambda d=dtype: Net(1).to(d),
                        token_loss,
                        steps=2,
                        ga=microbatches,
                        optimizer=SGD,
                        data_parallel_sharding_strategy=strategy,
                        **flags,
                    )
                    config = found.model.engine.config
                    weights = emulated(ctx, dtype, config, ga=microbatches, cut=cut)
                    for name, weight in weights.items():
                        assert torch.equal(found.weights[name], weight), (dtype, flags, strategy, name)


def main_weights_keep_what_16_bits_lose(ctx) -> None:
    """Updates too small for a bf16 weight add up in the fp32 one."""
    tiny = functools.partial(torch.optim.SGD, lr=1e-4)
    for dtype in (torch.bfloat16, torch.float16):
        for strategy in STRATEGIES:
            model = sharded(ctx, lambda d=dtype: Net(1).to(d), data_parallel_sharding_strategy=strategy)
            before = {name: shard.detach().clone() for name, shard in model.named_parameters()}
            updates = tiny(model.parameters())
            token_loss(model, ctx.rank).backward()
            updates.step()
            for name, shard in model.named_parameters():
                assert shard.dtype == torch.float32, name
                moved = (shard - before[name]).abs()
                assert shard.numel() == 0 or "embed" in name or moved.max() > 0, name
                rounded = shard.detach().to(dtype)
                assert shard.numel() == 0 or "norm" in name or not torch.equal(rounded.float(), shard), name


def kept_in_another_dtype_than_the_weights(ctx) -> None:
    """.grad is then a copy: what is done to it counts, zeros and clipping included."""
    for set_to_none in (True, False):
        for microbatches in (1, 2):
            flags = {"grad_reduce_in_bf16": True}
            found = train_sharded(
                ctx,
                lambda: Net(1).bfloat16(),
                token_loss,
                steps=2,
                ga=microbatches,
                optimizer=SGD,
                set_to_none=set_to_none,
                **flags,
            )
            weights = emulated(ctx, torch.bfloat16, found.model.engine.config, ga=microbatches, cut=True)
            for name, weight in weights.items():
                assert torch.equal(found.weights[name], weight), (set_to_none, microbatches, name)


class Mixed(nn.Module):
    """bf16 layers between fp32 norms; a frozen fp32 and an integer parameter; a BatchNorm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MixedBlock()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.second = MixedBlock()
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.batch(self.first(x)) * self.scale)[:, self.table]


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.group = nn.GroupNorm(4, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.group(self.norm(x)).bfloat16()).float()


def norms_and_several_dtypes_in_a_unit(ctx) -> None:
    """Data parallel with one sample on both ranks: the same as one process, whatever the norms' statistics."""
    reference = seeded(Mixed)
    main = [p.detach().float().requires_grad_() for p in reference.parameters() if p.requires_grad]
    updates = adamw(main)
    loss = square_loss(WIDTH, torch.float32)
    trained = [p for p in reference.parameters() if p.requires_grad]
    for step in range(3):
        reference.zero_grad()
        loss(reference, step).backward()
        for wide, parameter in zip(main, trained, strict=True):
            wide.grad = parameter.grad.float()
        updates.step()
        with torch.no_grad():
            for wide, parameter in zip(main, trained, strict=True):
                parameter.copy_(wide)
    for strategy in STRATEGIES:
        model = sharded(ctx, Mixed, units=[MixedBlock], data_parallel_sharding_strategy=strategy)
        updates = adamw(model.parameters())
        for step in range(3):
            updates.zero_grad()
            loss(model, step).backward()
            updates.step()
        assert_same_weights(
            model.full_state_dict(), {n: p.detach() for n, p in reference.named_parameters()}, 0.0
        )
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert torch.equal(model.batch.running_mean, reference.batch.running_mean)
        assert_at_rest(model)


def a_scaled_loss_in_fp16(ctx) -> None:
    """Scaling by a power of two and unscaling the shards changes nothing that does not underflow."""
    for strategy in STRATEGIES:
        plain = train_sharded(
            ctx,
            lambda: Net(1).half(),
            token_loss,
            optimizer=SGD,
            data_parallel_sharding_strategy=strategy,
            accumulate_allreduce_grads_in_fp32=True,
        )
        model = sharded(
            ctx,
            lambda: Net(1).half(),
            data_parallel_sharding_strategy=strategy,
            accumulate_allreduce_grads_in_fp32=True,
        )
        updates = SGD(model.parameters())
        for step in range(2):
            updates.zero_grad()
            (token_loss(model, 1000 * step + ctx.rank) * 256).backward()
            for shard in model.parameters():
                shard.grad.div_(256)
            updates.step()
        assert_same_weights(model.full_state_dict(), plain.weights, 2e-3)


CHECKS_ON_TWO = (
    combinations_of_dtypes_against_an_emulation,
    older_flags_against_an_emulation,
    main_weights_keep_what_16_bits_lose,
    kept_in_another_dtype_than_the_weights,
    norms_and_several_dtypes_in_a_unit,
    a_scaled_loss_in_fp16,
)


@pytest.mark.grid
def test_mixed_precision_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})


@pytest.mark.full
def test_every_combination_of_dtypes_on_two_ranks():
    pairs = list(itertools.product(("auto", *FLAGS), repeat=2))
    run_ranks(combinations_of_dtypes_against_an_emulation, 2, pairs)
