"""Gradients that other ranks read: two slots, taken in turns, without a word when they are free again."""

from __future__ import annotations

import time

import torch

from megatron.core import collectives
from megatron.core.distributed.custom_fsdp import outbox as module
from megatron.core.distributed.custom_fsdp.outbox import Outbox
from tests.harness.ranks import run_ranks

ROUNDS = 12


def gradients(rank: int, size: int, turn: int) -> list[torch.Tensor]:
    """Of a unit with two dtypes; elements are small integers, so sums are exact in bf16 too."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    wide = torch.randint(-9, 9, (size * 5,), generator=generator).float()
    return [wide, torch.randint(-9, 9, (size * 7,), generator=generator).bfloat16()]


def test_sums_are_right_however_far_ranks_drift_apart():
    def body(ctx):
        size, rank = ctx.world_size, ctx.rank
        outbox = Outbox.of_units([gradients(0, size, 0)] * 2, ctx.ps.dp_reduce_group)
        assert outbox is not None
        pending, shards, kept = [], [], []
        for turn in range(ROUNDS):
            if turn % size == rank:
                time.sleep(0.01)  # the others run ahead as far as they can
            fulls = gradients(rank, size, turn)
            assert outbox.fits(fulls)
            items = [(torch.full((full.numel() // size,), 1.0), full) for full in fulls]
            readable = outbox.put(turn % 2, fulls)
            one = collectives.reduce_scatter_units(
                items, ctx.ps.dp_reduce_group, accumulate=[True, False], readable=readable
            )
            outbox.taken_by(one)
            pending.append(one)
            kept.append(fulls)  # until the reduction ends
            shards.append([shard for shard, _ in items])
        for one in pending:
            one.wait()
        for turn, (wide, narrow) in enumerate(shards):
            of_ranks = [gradients(r, size, turn) for r in range(size)]
            sums = [sum(one[i].float() for one in of_ranks).view(size, -1)[rank] for i in range(2)]
            assert torch.equal(wide, 1 + sums[0]), turn
            assert torch.equal(narrow, sums[1]), turn
        return True

    assert run_ranks(body, 2) == [True] * 2
    assert run_ranks(body, 3) == [True] * 3


def test_what_is_too_large_is_not_put(monkeypatch):
    def body(ctx):
        small, large = torch.zeros(64), torch.zeros(64 * 1024)
        with monkeypatch.context() as one:
            one.setattr(module, "MAX_SLOT_BYTES", 4096)
            outbox = Outbox.of_units([[small], [large]], ctx.ps.dp_reduce_group)
            assert Outbox.of_units([[large]], ctx.ps.dp_reduce_group) is None
        middle = Outbox.of_units([[small], [small, small], [large], [], [small]], ctx.ps.dp_reduce_group)
        assert middle is not None
        assert middle.num_bytes == outbox.num_bytes * 2, "of the sizes 1, 1, 2 and large the third"
        assert outbox is not None
        return outbox.num_bytes, outbox.fits([small]), outbox.fits([small, small]), outbox.fits([large])

    slot = 64 * 4 // 2  # the other rank's half
    assert run_ranks(body, 2) == [(2 * slot, True, False, False)] * 2
