"""Collectives on real gloo ranks, against their definition computed on one process."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time

import pytest
import torch

from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import make_parallel_state, single_process
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.transport.point_to_point import send_receive
from megatron.core.transport.rank_grid import RankGrid
from megatron.core.transport.traffic import Moved
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
        collectives.reduce_scatter(out, values_of(ctx.rank, n), ctx.ps.dp_group)
        return out

    def reduce_scatter_own_slice(ctx):
        x = values_of(ctx.rank, n)
        mine = x[ctx.rank * 4 : (ctx.rank + 1) * 4]
        collectives.reduce_scatter(mine, x, ctx.ps.dp_group, async_op=True).wait()
        return mine.clone()

    def reduce_scatter_bf16(ctx):
        out = torch.empty(n // world, dtype=torch.bfloat16)
        collectives.reduce_scatter(out, values_of(ctx.rank, n, torch.bfloat16), ctx.ps.dp_group)
        return out

    def temporaries(ctx):
        bucket, out = values_of(ctx.rank, n), torch.empty(n // world)
        reduced = ctx.ps.dp_group
        started = [
            collectives.sum_gradients(bucket, reduced),
            collectives.reduce_scatter(out, bucket.clone(), reduced, async_op=True),
            collectives.all_reduce(bucket.clone(), reduced, async_op=True),
        ]
        for one in started:
            one.wait()
        return [one.temporary_bytes > 0 for one in started], [one.is_completed() for one in started]

    def sum_gradients(ctx):
        results = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            bucket = values_of(ctx.rank, n, dtype)
            collectives.sum_gradients(bucket, ctx.ps.dp_group).wait()
            results[dtype] = bucket
        return results

    def broadcast(ctx):
        x = values_of(ctx.rank, n)
        collectives.broadcast(x, ctx.ps.world_group, source=2)
        return x

    checks = [
        all_reduce,
        all_reduce_async,
        all_gather,
        all_gather_in_place,
        reduce_scatter,
        reduce_scatter_own_slice,
        reduce_scatter_bf16,
        temporaries,
        sum_gradients,
        broadcast,
    ]
    got = share_ranks(world, {check.__name__: check for check in checks})

    assert got["temporaries"] == [([True, True, False], [True] * 3)] * world
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


@pytest.mark.parametrize("world", [2, 4])
def test_units_are_gathered_in_one_call_whatever_their_types(world):
    sizes = (
        (5, torch.float32),
        (8, torch.bfloat16),
        (3, torch.float8_e4m3fn),
        (0, torch.float64),
        (2, torch.bool),
    )

    def mine(rank, i):
        n, dtype = sizes[i]
        return (values_of(10 * i + rank, n) * 8).to(dtype)

    def body(ctx):
        heard = []
        grid = RankGrid(world, dp=world)
        ps = make_parallel_state(
            grid, ctx.device, datetime.timedelta(seconds=20), lambda *call: heard.append(call)
        )
        heard.clear()
        pairs = []
        for i, (n, dtype) in enumerate(sizes):
            output = torch.zeros(world * n).to(dtype)
            own = output[ctx.rank * n : (ctx.rank + 1) * n]
            if i == 1:  # in place
                own.copy_(mine(ctx.rank, i))
            pairs.append((output, own if i == 1 else mine(ctx.rank, i)))
        first = collectives.all_gather_units(pairs[:3], ps.dp_group)
        second = collectives.all_gather_units(pairs[3:], ps.dp_group)
        second.wait()  # not in the order of issue
        first.wait()
        assert (first.temporary_bytes, first.is_completed()) == (0, True), "nothing is packed"
        assert collectives.all_gather_units([], ps.dp_group).is_completed()
        everyone = tuple(range(world))
        assert heard == [("all_gather", "dp", everyone)] * 2
        return [output.view(torch.uint8) for output, _ in pairs]

    for outputs in run_ranks(body, world):
        for i, output in enumerate(outputs):
            expected = torch.cat([mine(rank, i) for rank in range(world)])
            assert torch.equal(output, expected.view(torch.uint8)), sizes[i]


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.grid)])
def test_units_are_reduced_in_one_call_to_the_sums_in_rank_order(world):
    """Every mix of types, with and without what is there already; the bits are those of the written-out sum."""
    fp64, fp32, bf16, fp16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
    big = 300_000  # more than one block of the sum
    cases = [  # elements of a shard, full's type, shard's type, accumulate
        (7, fp32, fp32, False), (7, fp32, fp32, True), (big, fp32, fp32, True), (big, fp32, fp32, False),
        (9, bf16, fp32, True), (9, bf16, bf16, False), (big, fp16, fp32, False), (5, bf16, bf16, True),
        (6, fp64, fp64, True), (6, fp64, fp32, False), (6, fp32, fp64, True), (0, fp32, fp32, True),
    ]  # fmt: skip

    def full_of(rank, i):
        n, dtype, _, _ = cases[i]
        return values_of(100 * i + rank, world * n).to(dtype)

    def before(i):
        n, _, dtype, _ = cases[i]
        return values_of(7 + i, n).to(dtype)

    def body(ctx):
        heard = []
        grid = RankGrid(world, dp=world)
        ps = make_parallel_state(
            grid, ctx.device, datetime.timedelta(seconds=20), lambda *call: heard.append(call)
        )
        heard.clear()
        items = [(before(i), full_of(ctx.rank, i)) for i in range(len(cases))]
        added = [item for item, (*_, add) in zip(items, cases, strict=True) if add]
        replaced = [item for item, (*_, add) in zip(items, cases, strict=True) if not add]
        first = collectives.reduce_scatter_units(replaced, ps.dp_group, accumulate=False)
        second = collectives.reduce_scatter_units(added, ps.dp_group, accumulate=True)
        again = before(0)
        collectives.reduce_scatter_units([(again, items[0][1])], ps.dp_group, accumulate=True, async_op=False)
        second.wait()
        first.wait()
        assert heard == [("reduce_scatter", "dp", tuple(range(world)))] * 3
        for i, (_, full) in enumerate(items):
            assert torch.equal(full, full_of(ctx.rank, i))  # only read
        return [shard for shard, _ in items], again

    for rank, (shards, again) in enumerate(run_ranks(body, world)):
        for i, (n, wire, dtype, add) in enumerate(cases):
            parts = [full_of(r, i)[rank * n : (rank + 1) * n] for r in range(world)]
            if wire in (bf16, fp16):
                parts = [part.float() for part in parts]
            total = in_rank_order(parts)
            expected = (before(i) + total if add else total).to(dtype)
            assert torch.equal(shards[i], expected), cases[i]
        n = cases[0][0]
        parts = [full_of(r, 0)[rank * n : (rank + 1) * n] for r in range(world)]
        assert torch.equal(again, before(0) + in_rank_order(parts))


@pytest.mark.grid
def test_a_share_of_four_ranks_may_lie_in_what_is_reduced():
    """The own slice is a part of the sum and its place: ranks 2 and 3 add it last."""

    def body(ctx):
        n, found = 300_000, []
        for dtype in (torch.float32, torch.bfloat16):
            x = values_of(ctx.rank, 4 * n).to(dtype)
            own = x.view(4, n)[ctx.rank]
            collectives.reduce_scatter(own, x, ctx.ps.dp_group)
            found.append(own.clone())
        return found

    for rank, found in enumerate(run_ranks(body, 4)):
        for got, dtype in zip(found, (torch.float32, torch.bfloat16), strict=True):
            parts = [values_of(r, 1_200_000).to(dtype).view(4, -1)[rank].float() for r in range(4)]
            assert torch.equal(got, in_rank_order(parts).to(dtype))


def test_collectives_of_both_kinds_and_messages_share_a_group():
    """Made of messages between pairs, on gloo: nobody's message is taken for another's."""

    def body(ctx):
        group = ctx.make_ps(pp=2).pp_group
        other = 1 - ctx.rank
        mine = torch.full((4,), 1.0 + ctx.rank)
        box, gathered, shard = torch.zeros(4), torch.zeros(8), torch.zeros(2)
        sends, receives = send_receive([(mine, other)], [(box, other)], group)
        reduction = collectives.reduce_scatter_units([(shard, mine * 10)], group, accumulate=False)
        gather = collectives.all_gather_units([(gathered, mine * 100)], group)
        for pending in (gather, *receives, *sends, reduction):
            pending.wait()
        return box.unique().tolist(), gathered.unique().tolist(), shard.unique().tolist()

    assert run_ranks(body, 2) == [([2.0], [100.0, 200.0], [30.0]), ([1.0], [100.0, 200.0], [30.0])]


def test_the_way_of_other_backends_gives_the_same():
    """What NCCL is asked, asked of gloo: several types as bytes in one call, sums in one call a type."""

    def body(ctx):
        device_way = dataclasses.replace(ctx.ps.dp_group, backend="other")
        n = 6
        gathered = [torch.zeros(2 * n, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        pairs = [(one, values_of(ctx.rank, n, one.dtype)) for one in gathered]
        kept = collectives.Kept(pairs)
        for _ in range(2):  # the second from what the first has kept
            for one in gathered:
                one.zero_()
            collectives.all_gather_units(kept, device_way).wait()
        alone = torch.zeros(2 * n)
        collectives.all_gather(alone, pairs[0][1], device_way)

        full = [values_of(ctx.rank, 2 * n, dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
        shards = [torch.ones(n), torch.ones(n), torch.ones(n)]
        items = list(zip(shards, full, strict=True))
        added = collectives.reduce_scatter_units(items[:1], device_way, accumulate=True)
        pending = collectives.reduce_scatter_units(items[1:], device_way, accumulate=False)
        added.wait()
        pending.wait()
        lone = torch.ones(n)
        collectives.reduce_scatter(lone, full[0], device_way)
        assert added.temporary_bytes > 0  # of what accumulates
        assert pending.temporary_bytes > 0  # and of what changes its type
        assert torch.equal(full[1], values_of(ctx.rank, 2 * n, torch.float64))
        return gathered, alone, shards, lone

    for rank, (gathered, alone, shards, lone) in enumerate(run_ranks(body, 2)):
        for one in (*gathered, alone):
            assert torch.equal(one, torch.cat([values_of(r, 6, one.dtype) for r in range(2)]))
        mine = slice(6 * rank, 6 * rank + 6)
        fp32 = sum(values_of(r, 12) for r in range(2))[mine]
        fp64 = sum(values_of(r, 12, torch.float64) for r in range(2))[mine]
        expected = [1 + fp32, fp64.float(), fp32]
        assert all(torch.equal(*two) for two in zip(shards, expected, strict=True))
        assert torch.equal(lone, fp32)


def test_units_of_a_group_of_one():
    group = single_process().dp_group
    shard, full = torch.ones(3), torch.arange(3.0)
    collectives.reduce_scatter_units([(shard, full)], group, accumulate=True).wait()
    assert shard.tolist() == [1, 2, 3]
    half = torch.zeros(3, dtype=torch.bfloat16)
    collectives.reduce_scatter_units([(half, full), (full, full)], group, accumulate=False)
    assert half.tolist() == full.tolist() == [0, 1, 2]
    output = torch.zeros(3)
    collectives.all_gather_units([(output, full), (full, full)], group)
    assert output.tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="bfloat16 gathered from"):
        collectives.all_gather_units([(half, full)], group)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "sum_gradients", "all_to_all"])
def test_a_dead_and_a_silent_peer_are_lost_in_exchanges_too(op, tmp_path):
    def body(ctx):
        ps = short_ps(ctx, 2)
        collectives.barrier(ps.control_group)
        big, small = torch.ones(3 << 16), torch.ones(1 << 16)
        if ctx.rank == 2:
            os._exit(9)
        if ctx.rank == 1:
            return silent_until(tmp_path / "missed")
        try:
            if op == "all_gather":
                collectives.all_gather_units([(big, small)], ps.dp_group).wait()
            elif op == "reduce_scatter":
                collectives.reduce_scatter_units([(small, big)], ps.dp_group, accumulate=True).wait()
            elif op == "all_to_all":
                collectives.all_to_all(torch.empty(len(big)), big, *[[1 << 16] * 3] * 2, ps.dp_group)
            else:
                collectives.sum_gradients(big, ps.dp_group).wait()
        except PeerLostError as error:
            raise AssertionError(f"CAUGHT {error.op}|{error.purpose}|{error.rank}|{error}") from None
        finally:
            (tmp_path / "missed").touch()

    error = rank_outcomes(body, 3, timeout=30)[0].error or ""
    assert f"CAUGHT {op}|dp|0|rank 0: lost a peer in {op} over group 'dp' (ranks [0, 1, 2])" in error, error


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


def silent_until(missed):
    """Talks to nobody until another rank has made this file."""
    while not missed.exists():
        time.sleep(0.02)


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
        except PeerLostError as error:
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
        with pytest.raises(PeerLostError, match=r"barrier.*rank.*1") as caught:
            collectives.barrier(ps.control_group)
        with pytest.raises(PeerLostError, match="all_reduce"):
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
        return isinstance(caught.value, PeerLostError)

    assert run_ranks(body, 2) == [False, False]


def ring_neighbours(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


def test_messages_reach_the_other_end():
    def one_batch(ctx):
        """To the next, from the previous: everybody at once, which would deadlock with blocking sends."""
        group = ctx.make_ps(pp=4).pp_forward_group
        after, before = ring_neighbours(group)
        out, got = values_of(ctx.rank, 5), torch.zeros(5)
        sends, receives = send_receive([(out, after)], [(got, before)], group)
        for pending in (*receives, *sends):
            pending.wait()
            pending.wait()  # harmless
        return got

    def order_is_kept_across_batches(ctx):
        """Rank 0 starts one at a time, rank 1 receives in one batch posted before, and waits backwards."""
        group = ctx.make_ps(pp=4).pp_forward_group
        boxes = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(4)]
        if group.rank == 0:
            letters = [torch.full((3,), i + 1.0, dtype=torch.bfloat16) for i in range(4)]
            started = [send_receive([(letter, 1)], [], group) for letter in letters]
            for sends, receives in started:
                assert (len(sends), receives) == (1, [])
                sends[0].wait()
        if group.rank == 1:
            sends, receives = send_receive([], [(box, 0) for box in boxes], group)
            for pending in reversed(receives):
                pending.wait()
            return [box[0].item() for box in boxes]
        return None

    def many_peers(ctx):
        """One batch with everybody, of different sizes and types."""
        group = ctx.ps.group("dp")
        others = [place for place in range(group.size) if place != group.rank]
        dtype = {place: torch.float64 if place % 2 else torch.int64 for place in range(group.size)}
        sends = [(torch.full((1 + p, 2), 10 * group.rank + p, dtype=dtype[group.rank]), p) for p in others]
        boxes = {p: torch.zeros(1 + group.rank, 2, dtype=dtype[p]) for p in others}
        sent, received = send_receive(sends, [(boxes[p], p) for p in others], group)
        for pending in (*sent, *received):
            pending.wait()
        return {p: box.unique().tolist() for p, box in boxes.items()}

    def directions_are_independent(ctx):
        """A message backwards overtakes one forwards that was started first and has no receiver yet."""
        ps = ctx.make_ps(pp=4)
        x = torch.full((2,), float(ctx.rank))
        if ctx.rank == 0:
            held, _ = send_receive([(x, 1)], [], ps.pp_forward_group)
            got = torch.zeros(2)
            _, (back,) = send_receive([], [(got, 1)], ps.pp_backward_group)
            back.wait()
            held[0].wait()
            return got.tolist()
        if ctx.rank == 1:
            (back,), _ = send_receive([(x, 0)], [], ps.pp_backward_group)
            back.wait()
            got = torch.ones(2)
            _, (late,) = send_receive([], [(got, 0)], ps.pp_forward_group)
            late.wait()
            return got.tolist()
        return None

    def wrong_calls(ctx):
        ps = ctx.make_ps(pp=4)
        x = torch.ones(2, 2)
        with pytest.raises(AssertionError, match=f"send of rank {ctx.rank} to itself in 'pp_forward'"):
            send_receive([(x, ctx.rank)], [], ps.pp_forward_group)
        with pytest.raises(AssertionError, match="place 4 of 4"):
            send_receive([], [(x, 4)], ps.pp_forward_group)
        with pytest.raises(AssertionError, match="receive: strides"):
            send_receive([], [(torch.ones(2, 3).t(), (ctx.rank + 1) % 4)], ps.pp_forward_group)
        assert send_receive([], [], ps.pp_forward_group) == ([], [])

    checks = (one_batch, order_is_kept_across_batches, many_peers, directions_are_independent, wrong_calls)
    got = share_ranks(4, {check.__name__: check for check in checks})
    for rank in range(4):
        assert torch.equal(got["one_batch"][rank], values_of((rank - 1) % 4, 5))
        assert got["many_peers"][rank] == {p: [10 * p + rank] for p in range(4) if p != rank}
    assert got["order_is_kept_across_batches"][1] == [1, 2, 3, 4]
    assert got["directions_are_independent"][:2] == [[1, 1], [0, 0]]


def test_the_observer_hears_of_messages_by_pair_so_that_both_ends_count_alike():
    def body(ctx):
        heard = []
        grid = RankGrid(3, pp=3)
        ps = make_parallel_state(
            grid, ctx.device, datetime.timedelta(seconds=20), lambda *call: heard.append(call)
        )
        heard.clear()
        group = ps.pp_forward_group
        boxes = [torch.zeros(1), torch.zeros(1)]
        sends = [(torch.ones(1), group.rank + 1)] * 2 if group.rank < 2 else []
        receives = [(box, group.rank - 1) for box in boxes] if group.rank > 0 else []
        sent, received = send_receive(sends, receives, group)
        for pending in (*sent, *received):
            pending.wait()
        return heard

    got = run_ranks(body, 3)
    first = [("send", "pp_forward 0->1", (0, 1))] * 2
    assert got[0] == first
    assert got[1] == [("send", "pp_forward 1->2", (1, 2))] * 2 + [("receive", *first[0][1:])] * 2
    assert got[2] == [("receive", "pp_forward 1->2", (1, 2))] * 2


def test_a_dead_or_silent_end_is_named(tmp_path):
    def body(ctx):
        grid = RankGrid(3, pp=3)
        ps = make_parallel_state(grid, ctx.device, datetime.timedelta(seconds=2))
        collectives.barrier(ps.control_group)  # groups are made
        box = torch.zeros(1 << 20)
        if ctx.rank == 2:
            os._exit(9)
        if ctx.rank == 1:
            return silent_until(tmp_path / "missed")
        told = []
        for peer, calls in ((2, ([(box, 2)], [])), (1, ([], [(box, 1)]))):
            try:
                sends, receives = send_receive(*calls, ps.pp_forward_group)
                for pending in (*sends, *receives):
                    pending.wait()
            except PeerLostError as error:
                told.append(f"{peer}|{error.peer}|{error.status}|{error.at('stage 0, 0SEND_F1')}")
        (tmp_path / "missed").touch()
        raise AssertionError("CAUGHT " + " & ".join(told))

    outcomes = rank_outcomes(body, 3, timeout=30)
    error = outcomes[0].error or ""
    assert "CAUGHT 2|2|6|rank 0: stage 0, 0SEND_F1: lost rank 2 in send" in error, error
    assert "& 1|1|6|rank 0: stage 0, 0SEND_F1: lost rank 1 in receive over group 'pp_forward'" in error


def test_asynchronous_collectives_run_under_compute_and_in_order_of_issue():
    """The use of tensor parallel layers: several under way on one group, compute between start and wait."""

    def body(ctx):
        group = ctx.make_ps(tp=2).tp_group
        weight = values_of(9, 64 * 64).view(64, 64)
        parts = [values_of(10 * i + ctx.rank, 64 * 32).view(32, 64) for i in range(4)]
        wholes = [torch.empty(64, 64) for _ in parts]
        gathers = [
            collectives.all_gather(whole, part, group, async_op=True)
            for whole, part in zip(wholes, parts, strict=True)
        ]
        local = [part @ weight for part in parts]
        for pending in gathers:
            pending.wait()
        products = [whole @ weight for whole in wholes]
        scattered = [torch.empty(32, 64) for _ in parts]
        reductions = [
            collectives.reduce_scatter(mine, product, group, async_op=True)
            for mine, product in zip(scattered, products, strict=True)
        ]
        again = [part @ weight for part in parts]
        for pending in reversed(reductions):
            pending.wait()
        rows = slice(32 * ctx.rank, 32 * ctx.rank + 32)
        for i in range(4):
            expected = torch.cat([values_of(10 * i + r, 64 * 32).view(32, 64) for r in range(2)])
            assert torch.equal(wholes[i], expected)
            assert torch.equal(local[i], again[i])
            assert torch.equal(scattered[i], 2 * products[i][rows])

    run_ranks(body, 2)


def test_groups_count_what_their_collectives_have_moved():
    def body(ctx):
        group, size = ctx.ps.dp_group, ctx.world_size
        full, part = torch.zeros(4 * size), torch.zeros(4)
        half, narrow = torch.zeros(2 * size, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
        collectives.all_gather_units([(full, part), (half, narrow)], group).wait()  # one call of two buffers
        collectives.reduce_scatter_units([(part, full)], group, accumulate=True).wait()
        collectives.sum_gradients(half, group).wait()  # of three ranks an exchange and a gather, yet one sum
        collectives.all_reduce(part, group)
        collectives.broadcast(part, group)
        alone = ctx.ps.tp_group
        collectives.all_reduce(part, alone)
        names = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
        return [group.traffic.moved(name) for name in names], alone.traffic.moved("all_reduce")

    for counted, nothing in run_ranks(body, 3):
        assert counted == [
            Moved(1, 12 * 4 + 6 * 2),
            Moved(1, 12 * 4),
            Moved(2, 6 * 2 + 4 * 4),
            Moved(1, 4 * 4),
        ]
        assert nothing == Moved(0, 0)
