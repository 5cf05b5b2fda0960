"""Memory that the ranks of one host share: everybody reads everybody's, or nobody does."""

from __future__ import annotations

import gc
import os

import torch

from megatron.core import collectives, host_memory
from megatron.core.device import heap_bytes
from megatron.core.host_memory import shared_zeros
from tests.harness.ranks import run_ranks


def test_every_rank_reads_what_the_others_have_written():
    def body(ctx):
        group = ctx.ps.dp_gather_group
        files = len(os.listdir("/proc/self/fd"))
        shared = shared_zeros(1000, torch.bfloat16, group)
        assert shared is not None
        assert len(os.listdir("/proc/self/fd")) == files, "no file stays open"
        assert not shared.own.any(), "zeros"
        seen = []
        for step in range(20):
            shared.own.fill_(100 * step % 64 + ctx.rank)
            collectives.fence(group)
            seen.append([float(one[999]) for one in shared.of_ranks])
            collectives.fence(group)
        assert shared.of_ranks[ctx.rank].data_ptr() == shared.own.data_ptr()
        return seen

    for seen in run_ranks(body, 3):
        assert seen == [[100 * step % 64 + rank for rank in range(3)] for step in range(20)]


def test_it_counts_as_memory_in_use_for_as_long_as_it_lives():
    def body(ctx):
        before = heap_bytes()
        if before is None:  # no such count here
            return 4 << 20, 0
        shared = shared_zeros(1 << 20, torch.float32, ctx.ps.dp_gather_group)
        held = heap_bytes() - before
        del shared
        gc.collect()
        return held, heap_bytes() - before

    for held, left in run_ranks(body, 2):
        assert held >= 4 << 20
        assert left < 1 << 20


def test_where_one_rank_cannot_share_nobody_does(monkeypatch):
    def body(ctx):
        found = []
        for name, replacement in (
            ("_new_file", lambda num_bytes: -1),
            ("_host", lambda: ctx.rank),
            ("_map_all", lambda *_: None),
        ):
            with monkeypatch.context() as one:
                if ctx.rank == 1:
                    one.setattr(host_memory, name, replacement)
                found.append(shared_zeros(8, torch.float32, ctx.ps.dp_gather_group))
        return found, shared_zeros(8, torch.float32, ctx.ps.dp_gather_group) is not None

    assert run_ranks(body, 2) == [([None] * 3, True)] * 2


def test_a_file_of_another_process_is_not_taken_for_a_peers():
    def body(ctx):
        own = os.memfd_create("other")
        os.posix_fallocate(own, 0, 64)
        wrong_inode = [[1, os.getpid(), own, os.fstat(own).st_ino + 1]]
        gone = [[1, os.getpid(), own + 1000, 7]]
        right = [[1, os.getpid(), own, os.fstat(own).st_ino]]
        return [host_memory._map_all(told, 16, torch.float32) is None for told in (wrong_inode, gone, right)]

    assert run_ranks(body, 1) == [[True, True, False]]


def test_alone_or_without_elements_there_is_nothing_to_share():
    def body(ctx):
        group = ctx.ps.dp_gather_group
        return shared_zeros(8 if ctx.world_size == 1 else 0, torch.float32, group)

    assert run_ranks(body, 1) == [None]
    assert run_ranks(body, 2) == [None, None]
