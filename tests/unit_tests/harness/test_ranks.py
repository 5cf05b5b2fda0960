"""The harness that every multi-rank test stands on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RanksError, rank_outcomes, run_ranks, share_ranks


def test_returns_each_ranks_value_in_order():
    def scaled_sum(ctx, x, *, y):
        total = torch.tensor([float(ctx.rank)])
        dist.all_reduce(total)
        return ctx.rank, total, x + y

    values = run_ranks(scaled_sum, 3, 1, y=2)
    assert [v[0] for v in values] == [0, 1, 2]
    assert all(v[1].item() == 3.0 and v[2] == 3 for v in values)


def test_children_use_one_thread_after_parent_computed():
    torch.randn(300, 300) @ torch.randn(300, 300)
    assert run_ranks(lambda ctx: torch.get_num_threads(), 2) == [1, 1]


def test_large_values_do_not_block_on_the_pipe():
    values = run_ranks(lambda ctx: torch.full((1_000_000,), float(ctx.rank)), 2)
    assert [v[-1].item() for v in values] == [0.0, 1.0]


def test_failing_rank_is_named_with_its_traceback():
    def fails(ctx):
        if ctx.rank == 1:
            raise ValueError("from rank one")
        dist.barrier()

    with pytest.raises(RanksError, match=r"(?s)rank 1 of 2.*in fails.*ValueError: from rank one"):
        run_ranks(fails, 2)


def test_silent_rank_is_named_and_killed():
    def hangs(ctx):
        if ctx.rank == 1:
            time.sleep(1000)
        return os.getpid()

    # A world in which rank 0 would wait for rank 1 in the closing barrier: both are silent.
    with pytest.raises(RanksError, match=r"silent after 1 s \(silent ranks: \[0, 1\]\)"):
        run_ranks(hangs, 2, timeout=1.0)


def test_death_is_reported_with_the_signal():
    def dies(ctx):
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        os._exit(7)

    outcomes = rank_outcomes(dies, 2)
    assert outcomes[1].died == "killed by SIGKILL"
    assert outcomes[0].died == "exited with status 7 without returning"


def test_several_checks_share_ranks():
    pids = share_ranks(2, {"a": lambda ctx: os.getpid(), "b": lambda ctx: os.getpid()})
    assert pids["a"] == pids["b"]
    assert len({*pids["a"], os.getpid()}) == 3


def test_no_child_is_left():
    pids = run_ranks(lambda ctx: os.getpid(), 2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
