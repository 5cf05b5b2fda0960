"""Ranks of one host exchange tensors through memory; ranks of several send messages. Training has the same bits."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from megatron.core.transport.shm_transport import ShmTransport
from tests.harness.layouts import Layout, train
from tests.harness.ranks import run_ranks

ZERO3 = ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
RUNS = {
    "no_shard, small buckets": ("--ddp-bucket-size", "2000", "--overlap-grad-reduce"),
    "optim": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "optim_grads_params": ZERO3,
}
INSTANCES = {"HSDP": (*ZERO3, "--num-distributed-optimizer-instances", "2")}


def run(ctx, more, dtype, *, shared):
    """What some steps give on this rank, and how many operations went through memory."""
    started = []
    real, fits = ShmTransport._start, ShmTransport.fits

    def start(*arguments):
        started.append(1)
        return real(*arguments)

    def fits_here(*arguments):
        return shared and fits(*arguments)

    with mock.patch.multiple(ShmTransport, _start=start, fits=fits_here):
        found = train(
            ctx,
            Layout(dp=ctx.world_size, more=more),
            ["--num-layers", "2", *dtype],
            global_batch=2 * ctx.world_size,
            steps=3,
            masked=True,
        )
    return found, len(started)


def both(ctx, runs, dtype):
    torch.set_num_threads(1)
    for name, more in runs.items():
        (one, through_memory), (other, none) = (
            run(ctx, more, dtype, shared=shared) for shared in (True, False)
        )
        assert (through_memory > 0, none) == (True, 0), name
        assert one.losses == other.losses, name
        assert one.norms == other.norms, name
        for kind in ("weights", "model", "moments"):
            here, there = getattr(one, kind), getattr(other, kind)
            assert len(here) == len(there) > 0, (name, kind)
            for parameter, rectangles in here.items():
                for (offset, values), (place, expected) in zip(rectangles, there[parameter], strict=True):
                    assert offset == place
                    assert np.array_equal(values, expected), (name, kind, parameter)
    return True


@pytest.mark.parametrize(
    "dtype", [(), pytest.param(("--bf16",), marks=pytest.mark.grid)], ids=["fp32", "bf16"]
)
def test_two_ranks(dtype):
    assert run_ranks(both, 2, RUNS, dtype, timeout=300) == [True] * 2


@pytest.mark.grid
def test_four_ranks_in_two_instances():
    assert run_ranks(both, 4, INSTANCES, (), timeout=300) == [True] * 4
