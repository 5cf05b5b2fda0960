"""Collectives on real gloo ranks, against their definition computed on one process."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch

from megatron.core import collectives
from megatron.core.parallel_state import make_parallel_state, single_process
from megatron.core.rank_grid import RankGrid
from tests.harness.ranks import rank_outcomes, run_ranks, share_ranks


def values_of(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def test_every_collective_matches_its_definition():
    n, world = 12, 3

    def all_reduce(ctx):
        results = {}
        for op in ("sum", "max", "min"):
            x = values_of(ctx.rank, n, torch.float64)
            collectives.all_reduce(x, ctx.ps.dp_group, op)
            results[op] = x
        return results

    def all_reduce_async(ctx):
        x = values_of(ctx.rank, n, torch.float64)
        pending = collectives.all_reduce(x, ctx.ps.dp_group, async_op=True)
        pending.wait()
        pending.wait()  # harmless
        return x

    def all_gather(ctx):
        out = torch.empty(world * n)
        collectives.all_gather(out, values_of(ctx.rank, n), ctx.ps.dp_group)
        return out

    def all_gather_in_place(ctx):
        out = torch.zeros(world * n)
        mine = out[ctx.rank * n : (ctx.rank + 1) * n]
        mine.copy_(values_of(ctx.rank, n))
        collectives.all_gather(out, mine, ctx.ps.dp_group)
        return out

    def reduce_scatter(ctx):
        out = torch.empty(n // world)
        collectives.reduce_scatter(out, values_of(ctx.rank, n), ctx.ps.dp_reduce_group)
        return out

    def reduce_scatter_own_slice(ctx):
        x = values_of(ctx.rank, n)
        mine = x[ctx.rank * 4 : (ctx.rank + 1) * 4]
        collectives.reduce_scatter(mine, x, ctx.ps.dp_reduce_group, async_op=True).wait()
        return mine.clone()

    def reduce_scatter_bf16(ctx):
        out = torch.empty(n // world, dtype=torch.bfloat16)
        collectives.reduce_scatter(out, values_of(ctx.rank, n, torch.bfloat16), ctx.ps.dp_group)
        return out

    def sum_gradients(ctx):
        results = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            bucket = values_of(ctx.rank, n, dtype)
            collectives.sum_gradients(bucket, ctx.ps.dp_reduce_group).wait()
            results[dtype] = bucket
        return results

    def broadcast(ctx):
        x = values_of(ctx.rank, n)
        collectives.broadcast(x, ctx.ps.world_group, source=2)
        return x

    def json_values(ctx):
        value = {"rank": ctx.rank, "text": "ü" * ctx.rank, "nan": float("nan")}
        everyone = collectives.all_gather_json(value, ctx.ps.control_group)
        first = collectives.broadcast_json([ctx.rank, "x"], ctx.ps.control_group, source=1)
        empty = collectives.all_gather_bytes(b"", ctx.ps.control_group)
        return [v["rank"] for v in everyone], [v["text"] for v in everyone], first, empty

    checks = [
        all_reduce,
        all_reduce_async,
        all_gather,
        all_gather_in_place,
        reduce_scatter,
        reduce_scatter_own_slice,
        reduce_scatter_bf16,
        sum_gradients,
        broadcast,
        json_values,
    ]
    got = share_ranks(world, {check.__name__: check for check in checks})

    exact = torch.stack([values_of(r, n, torch.float64) for r in range(world)])
    single = [values_of(r, n) for r in range(world)]
    ordered = in_rank_order(single)
    half = [values_of(r, n, torch.bfloat16) for r in range(world)]
    ordered_bf16 = in_rank_order([h.float() for h in half]).bfloat16()
    for rank in range(world):
        torch.testing.assert_close(got["all_reduce"][rank]["sum"], exact.sum(0))
        assert torch.equal(got["all_reduce"][rank]["max"], exact.max(0).values)
        assert torch.equal(got["all_reduce"][rank]["min"], exact.min(0).values)
        torch.testing.assert_close(got["all_reduce_async"][rank], exact.sum(0))
        assert torch.equal(got["all_gather"][rank], torch.cat(single))
        assert torch.equal(got["all_gather_in_place"][rank], torch.cat(single))
        mine = slice(rank * 4, (rank + 1) * 4)
        assert torch.equal(got["reduce_scatter"][rank], ordered[mine])
        assert torch.equal(got["reduce_scatter_own_slice"][rank], ordered[mine])
        assert torch.equal(got["reduce_scatter_bf16"][rank], ordered_bf16[mine])
        assert torch.equal(got["sum_gradients"][rank][torch.float32], ordered)
        assert torch.equal(got["sum_gradients"][rank][torch.bfloat16], ordered_bf16)
        assert torch.equal(got["sum_gradients"][rank][torch.float64], in_rank_order(list(exact)))
        assert torch.equal(got["broadcast"][rank], single[2])
        assert got["json_values"][rank] == ([0, 1, 2], ["", "ü", "üü"], [1, "x"], [b"", b"", b""])


def test_group_of_one_communicates_nothing():
    ps = single_process()  # no process group exists: any real collective would raise
    x = torch.arange(4.0)
    for group in (ps.world_group, ps.dp_group, ps.dp_reduce_group, ps.control_group):
        assert group.process_group is None
        collectives.all_reduce(x, group, async_op=True).wait()
        collectives.broadcast(x, group)
        collectives.sum_gradients(x, group).wait()
        collectives.barrier(group)
    assert x.tolist() == [0, 1, 2, 3]
    out = torch.empty(4)
    collectives.all_gather(out, x, ps.dp_group)
    assert torch.equal(out, x)
    collectives.reduce_scatter(out, x * 2, ps.dp_group)
    assert torch.equal(out, x * 2)
    assert collectives.all_gather_json({"a": 1}, ps.control_group) == [{"a": 1}]
    assert collectives.broadcast_json((1, 2), ps.control_group) == [1, 2]


def short_ps(ctx, timeout_s):
    grid = RankGrid(ctx.world_size, dp=ctx.world_size)
    return make_parallel_state(grid, ctx.device, datetime.timedelta(seconds=timeout_s))


def test_dead_peer_is_a_peer_lost_error_naming_op_group_and_rank():
    def body(ctx):
        ps = short_ps(ctx, 20)
        x = torch.ones(1000)
        if ctx.rank == 1:
            collectives.all_reduce(x, ps.dp_reduce_group)  # both ranks have made their groups
            os._exit(9)
        try:
            for _ in range(100):
                collectives.all_reduce(x, ps.dp_reduce_group)
        except collectives.PeerLostError as error:
            raise AssertionError(
                f"CAUGHT {error.op}|{error.purpose}|{error.rank}|{error.status}|{error}"
            ) from None

    outcomes = rank_outcomes(body, 2)
    assert outcomes[1].died == "exited with status 9 without returning"
    error = outcomes[0].error
    assert error is not None
    assert "CAUGHT all_reduce|dp_reduce|0|6|rank 0: lost a peer in all_reduce over group 'dp_reduce'" in error


def test_silent_peer_times_out_and_the_barrier_names_it():
    def body(ctx):
        ps = short_ps(ctx, 1)
        if ctx.rank == 1:
            time.sleep(2.5)
            return None
        with pytest.raises(collectives.PeerLostError, match=r"barrier.*rank.*1") as caught:
            collectives.barrier(ps.control_group)
        with pytest.raises(collectives.PeerLostError, match="all_reduce"):
            collectives.all_reduce(torch.ones(3), ps.dp_group)
        return str(caught.value)

    outcomes = rank_outcomes(body, 2, timeout=30)
    assert outcomes[0].ok, outcomes[0].error or outcomes[0].died
    assert "'control'" in outcomes[0].value


def test_a_wrong_call_is_not_blamed_on_a_peer():
    def body(ctx):
        with pytest.raises(AssertionError, match="2 x"):
            collectives.all_gather(torch.empty(5), torch.empty(2), ctx.ps.dp_group)
        with pytest.raises(RuntimeError) as caught:
            collectives.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn), ctx.ps.dp_group)
        return isinstance(caught.value, collectives.PeerLostError)

    assert run_ranks(body, 2) == [False, False]
