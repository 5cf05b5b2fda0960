"""Ranks of one host that exchange tensors through memory: the same bits as by messages, in any order of waiting."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import signal
import time

import pytest
import torch

from megatron.core.transport import collectives, shared_memory, shm_transport
from megatron.core.transport.parallel_state import make_parallel_state
from megatron.core.transport.rank_grid import RankGrid
from tests.harness.ranks import rank_outcomes, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
SIZES = (1, 7, 1023, 70001)


def values(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_messages(group):
    return dataclasses.replace(group, shm=None)


def no_message(monkeypatch) -> None:
    for name in ("gather_in_pairs", "exchange_in_pairs", "exchange_uneven", "all_reduce"):
        monkeypatch.setattr(collectives, name, lambda *_, **__: pytest.fail("a message"))


def everything(ctx, group) -> list[torch.Tensor]:
    """What all collectives that the transport takes give, of many sizes and dtypes, several of them in one call."""
    size, found = group.size, []
    for dtype in DTYPES:
        inputs = [values(ctx.rank, numel, dtype) for numel in SIZES]
        outputs = [torch.zeros(numel * size, dtype=dtype) for numel in SIZES]
        in_place = torch.zeros(3 * size, dtype=dtype)
        own = in_place.view(size, 3)[ctx.rank]
        own.copy_(values(ctx.rank, 3, dtype))
        pairs = [*zip(outputs, inputs, strict=True), (in_place, own)]
        collectives.all_gather_units(pairs, group).wait()
        found += [*outputs, in_place]
        for wider in {dtype, torch.float32}:
            fulls = [values(10 + ctx.rank, numel * size, dtype) for numel in SIZES]
            shards = [torch.ones(numel, dtype=wider) for numel in SIZES]
            for accumulate in (True, False):
                items = list(zip(shards, fulls, strict=True))
                collectives.reduce_scatter_units(items, group, accumulate=accumulate).wait()
                found += [shard.clone() for shard in shards]
        for numel in SIZES:
            bucket = values(20 + ctx.rank, numel * size, dtype)
            shard = bucket.view(size, numel)[ctx.rank]
            collectives.reduce_scatter_units([(shard, bucket)], group, accumulate=False).wait()
            found.append(shard.clone())
            summed = values(30 + ctx.rank, numel * size, dtype)
            collectives.sum_gradients(summed, group).wait()
            found.append(summed)
        found += exchanges(ctx.rank, dtype, group)
    return found


def exchanges(rank: int, dtype: torch.dtype, group) -> list[torch.Tensor]:
    """Rows and single values from each rank to each, 0 to 6 of them, several exchanges under way at once."""
    ranks, received = range(group.size), []
    rows = [[3 * (source + target) % 7 for target in ranks] for source in ranks]
    sent, came = rows[rank], [rows[source][rank] for source in ranks]
    pending = []
    for width in ((), (70001,), (5, 3)):
        given = values(40 + rank, sum(sent) * math.prod(width), dtype).view(sum(sent), *width)
        received.append(torch.zeros(sum(came), *width, dtype=dtype))
        most = max(map(max, rows))
        pending.append(
            collectives.all_to_all(received[-1], given, came, sent, group, most=most, async_op=True)
        )
    for exchange in pending:
        exchange.wait()
    return received


@pytest.mark.grid
@pytest.mark.parametrize("world", [2, 4])
def test_the_bits_are_those_of_messages_and_no_message_is_sent(world, monkeypatch):
    def body(ctx):
        group = ctx.ps.dp_reduce_group
        assert group.shm is not None
        sent = everything(ctx, by_messages(group))
        with monkeypatch.context() as patched:
            no_message(patched)
            taken = everything(ctx, group)
        different = [at for at, pair in enumerate(zip(sent, taken, strict=True)) if not torch.equal(*pair)]
        return len(sent) > 100, different

    assert run_ranks(body, world) == [(True, [])] * world


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_is_under_way_in_any_order_of_waiting_with_ranks_late_in_turn(world):
    """Inputs are written again as soon as they may be: every value that arrives is that of its own turn."""

    def body(ctx):
        gathers, reductions = ctx.ps.dp_gather_group, ctx.ps.dp_reduce_group
        inputs, outputs = torch.zeros(6, 33), torch.zeros(6, world * 33)
        full, shards = torch.zeros(6, world * 33), torch.zeros(6, 33)
        for turn in range(60):
            if turn % (10 * world) == 10 * ctx.rank:
                time.sleep(0.01)
            number = turn % 6 + 1
            for one in range(number):
                inputs[one] = full[one] = 100 * turn + 10 * one + ctx.rank
            started = [
                (
                    collectives.all_gather_units([(outputs[one], inputs[one])], gathers),
                    collectives.reduce_scatter_units(
                        [(shards[one], full[one])], reductions, accumulate=False
                    ),
                )
                for one in range(number)
            ]
            for gather, reduction in reversed(started) if turn % 2 else started:
                reduction.wait()
                gather.wait()
            for one in range(number):
                expected = [100.0 * turn + 10 * one + rank for rank in range(world)]
                assert outputs[one].view(world, 33)[:, 32].tolist() == expected
                assert shards[one].tolist() == [sum(expected)] * 33
        return True

    assert run_ranks(body, world) == [True] * world


def test_starting_never_waits_for_anybody():
    """More than fit into the slots, before the other rank has started any."""

    def body(ctx):
        group, control = ctx.ps.dp_gather_group, ctx.ps.control_group
        outputs = torch.zeros(5, 2)
        if ctx.rank == 1:
            collectives.barrier(control)
        inputs = [torch.tensor([10.0 * one + ctx.rank]) for one in range(5)]
        started = [collectives.all_gather_units([pair], group) for pair in zip(outputs, inputs, strict=True)]
        if ctx.rank == 0:
            collectives.barrier(control)
        early = started[4].is_completed()
        for one in started:
            one.wait()
        return outputs.tolist(), (early and ctx.rank == 0)

    expected = [[10.0 * one, 10.0 * one + 1] for one in range(5)]
    assert run_ranks(body, 2) == [(expected, False)] * 2


def test_ranks_may_wait_for_two_groups_in_different_orders():
    """Rank 0 waits for the last of three reductions, which rank 1 puts only after rank 0 has taken the first; rank 1
    waits for a gather meanwhile, which rank 0 starts behind its reductions."""

    def body(ctx):
        gathers, reductions = ctx.ps.dp_gather_group, ctx.ps.dp_reduce_group
        shards, output = torch.zeros(3, 1), torch.zeros(2)
        full = torch.ones(2)
        under_way = [
            collectives.reduce_scatter_units([(shard, full)], reductions, accumulate=False)
            for shard in shards
        ]
        if ctx.rank == 0:
            under_way[2].wait()
        collectives.all_gather(output, torch.ones(1), gathers)
        under_way[2].wait()
        return shards.view(-1).tolist(), output.tolist()

    assert run_ranks(body, 2) == [([2.0] * 3, [1.0] * 2)] * 2


def test_what_does_not_fit_is_sent(monkeypatch):
    def body(ctx):
        group = ctx.ps.dp_gather_group
        fits = shm_transport.SLOT_BYTES // 4
        calls = []
        real = collectives.gather_in_pairs
        monkeypatch.setattr(collectives, "gather_in_pairs", lambda *args: calls.append(1) or real(*args))
        for numel in (fits, fits + 1, 3):
            output = torch.zeros(2 * numel)
            collectives.all_gather(output, torch.full((numel,), ctx.rank + 1.0), group)
            assert output.view(2, numel).sum(1).tolist() == [numel, 2.0 * numel]
        return len(calls)

    assert run_ranks(body, 2) == [1, 1]


def test_ranks_that_do_different_things_hear_of_it():
    def body(ctx):
        group, numel = ctx.ps.dp_gather_group, 100 * (1 + ctx.rank)
        with pytest.raises(
            AssertionError, match=r"2 x bytes \(\+ 1: sums; < 0: exchanges\): here \d+, others \{\d+\}"
        ):
            collectives.all_gather(torch.zeros(2 * numel), torch.zeros(numel), group)
        return True

    assert run_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "sum_gradients"])
def test_a_dead_or_silent_peer_is_lost(op, silent):
    def body(ctx):
        timeout = datetime.timedelta(seconds=1.5 if silent else 30)  # gloo's messages have it too
        group = make_parallel_state(RankGrid(3, dp=3), ctx.device, timeout).dp_reduce_group
        assert group.shm is not None
        big, small = torch.ones(3 << 8), torch.ones(1 << 8)
        collectives.all_gather(big, small, group)
        if ctx.rank == 1:
            if silent:
                time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        if op == "all_gather":
            collectives.all_gather(big, small, group)
        elif op == "reduce_scatter":
            collectives.reduce_scatter_units([(small, big)], group, accumulate=True).wait()
        else:
            collectives.sum_gradients(big, group).wait()

    outcomes = rank_outcomes(body, 3, timeout=40)
    for rank in (0, 2):
        error = outcomes[rank].error or ""
        assert f"PeerLostError: rank {rank}: lost a peer in {op} over group 'dp_reduce'" in error
        assert ("waiting for ranks [1]" if silent else "the process of rank 1 has ended") in error


def test_what_a_process_has_put_before_it_ended_is_there():
    def body(ctx):
        group = ctx.ps.dp_gather_group
        output = torch.zeros(2)
        pending = collectives.all_gather_units([(output, torch.tensor([ctx.rank + 1.0]))], group)
        if ctx.rank == 1:
            os._exit(9)
        time.sleep(0.3)
        pending.wait()
        raise AssertionError(f"GOT {output.tolist()}")

    assert "GOT [1.0, 2.0]" in (rank_outcomes(body, 2)[0].error or "")


def test_where_one_rank_cannot_share_all_send_messages(monkeypatch):
    def body(ctx):
        group = by_messages(ctx.ps.dp_gather_group)
        files, found = len(os.listdir("/proc/self/fd")), []
        for owner, name, instead in (
            (shm_transport, "new_file", lambda num_bytes, token: -1),
            (shm_transport, "_map_all", lambda told: None),
            (shared_memory.platform, "machine", lambda: "aarch64"),
            (shared_memory.os, "readlink", lambda path: "/somebody/elses"),
        ):
            with monkeypatch.context() as patched:
                if ctx.rank == 1:
                    patched.setattr(owner, name, instead)
                joint = []
                found.append((shm_transport.open_shm_transport(group, joint), joint))
        left = len(os.listdir("/proc/self/fd")) - files
        output = torch.zeros(2)
        collectives.all_gather(output, torch.tensor([ctx.rank + 1.0]), group)
        return found, output.tolist(), left

    assert run_ranks(body, 2) == [([(None, [])] * 4, [1.0, 2.0], 0)] * 2


def test_memory_of_another_process_with_these_numbers_is_not_taken():
    def body(ctx):
        own, other, here = (
            shared_memory.new_file(shm_transport.NUM_BYTES, 7),
            os.memfd_create("other"),
            os.getpid(),
        )
        right = shm_transport._map_all([[here, own, 7], [here, own, 7]])
        wrong = [[here, own, 8], [here, other, 7], [here, own + 1000, 7]]
        found = [shm_transport._map_all([[here, own, 7], one]) for one in wrong]
        return right is not None, found, os.fstat(other).st_size

    assert run_ranks(body, 1) == [(True, [None] * 3, 0)]


def test_no_file_stays_open():
    def body(ctx):
        group = by_messages(ctx.ps.dp_gather_group)
        files = len(os.listdir("/proc/self/fd"))
        transport = shm_transport.open_shm_transport(group, [])
        return transport is not None, len(os.listdir("/proc/self/fd")) - files

    assert run_ranks(body, 2) == [(True, 0)] * 2
