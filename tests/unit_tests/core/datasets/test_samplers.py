import contextlib
import itertools
import os
import signal

import numpy as np
import pytest
import torch

from megatron.core.datasets.errors import DataError
from megatron.core.datasets.samplers import CyclicSampler, SequentialSampler, build_data_loader


class Numbers:
    """Sample i is i."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"tokens": np.full(3, i, dtype=np.int64), "loss_mask": np.ones(3, dtype=np.float32)}


def sequential(total, consumed, micro, dp, rank):
    return SequentialSampler(
        total, consumed_samples=consumed, micro_batch_size=micro, dp_rank=rank, dp_size=dp
    )


def test_sequential_order_over_ranks():
    rows = [list(sequential(23, 4, 2, 3, rank)) for rank in range(3)]
    assert rows[0] == [[4, 5], [10, 11], [16, 17]]
    assert rows[1] == [[6, 7], [12, 13], [18, 19]]
    assert rows[2] == [[8, 9], [14, 15], [20, 21]]  # 22 is an incomplete tail


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_position_does_not_depend_on_the_number_of_ranks(dp_size):
    """Ids read by all ranks from sample 16 on, in step order, are 16, 17, ...: resuming may change DP."""
    ranks = [list(sequential(48, 16, 2, dp_size, rank)) for rank in range(dp_size)]
    assert [i for step in zip(*ranks, strict=True) for row in step for i in row] == list(range(16, 48))


def cyclic(total, consumed, micro, dp, rank, sharding=True):
    return CyclicSampler(
        total,
        consumed_samples=consumed,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=dp,
        data_sharding=sharding,
    )


@pytest.mark.parametrize("data_sharding", [True, False])
def test_cyclic_against_the_prose(data_sharding):
    total, micro, dp = 29, 2, 3  # 4 steps of 6 an epoch
    for rank in range(dp):
        rows = list(itertools.islice(cyclic(total, 0, micro, dp, rank, data_sharding), 12))
        for epoch in range(3):
            generator = torch.Generator()
            generator.manual_seed(epoch)
            if data_sharding:
                bucket = total // (micro * dp) * micro
                order = [rank * bucket + i for i in torch.randperm(bucket, generator=generator).tolist()]
            else:
                order = torch.randperm(total // micro * micro, generator=generator).tolist()[rank::dp][:8]
            assert [i for row in rows[4 * epoch : 4 * epoch + 4] for i in row] == order
        for steps in (1, 4, 7):
            resumed = cyclic(total, steps * micro * dp, micro, dp, rank, data_sharding)
            assert list(itertools.islice(resumed, 12 - steps)) == rows[steps:]


def test_cyclic_refuses():
    with pytest.raises(DataError, match="fewer than one step"):
        cyclic(5, 0, 2, 3, 0)
    with pytest.raises(DataError, match="no whole number of steps"):
        next(iter(cyclic(50, 3, 2, 1, 0)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_batches(num_workers):
    loader = build_data_loader(
        Numbers(20), consumed_samples=8, micro_batch_size=2, dp_rank=1, dp_size=2, num_workers=num_workers
    )
    batches = list(loader)
    assert [batch["tokens"][:, 0].tolist() for batch in batches] == [[10, 11], [14, 15], [18, 19]]
    assert batches[0]["tokens"].shape == (2, 3)
    assert batches[0]["tokens"].dtype == torch.int64
    assert batches[0]["loss_mask"].dtype == torch.float32


ONE_RANK = {"consumed_samples": 0, "micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}


def test_external_and_none_pass_through():
    mine = [1, 2]
    assert build_data_loader(mine, dataloader_type="external", **ONE_RANK) is mine
    assert build_data_loader(None, **ONE_RANK) is None


def test_error_in_a_worker_stays_a_data_error():
    class Bad(Numbers):
        def __getitem__(self, i):
            raise DataError(f"c.bin: sample {i} is bad")

    batches = iter(build_data_loader(Bad(4), num_workers=1, **ONE_RANK))
    with pytest.raises(DataError, match=r"c\.bin: sample 0 is bad"):
        next(batches)


def test_workers_outlive_one_sigterm_and_not_two():
    batches = iter(build_data_loader(Numbers(400), num_workers=1, **ONE_RANK))
    next(batches)
    (worker,) = batches._workers
    os.kill(worker.pid, signal.SIGINT)
    os.kill(worker.pid, signal.SIGTERM)
    assert [next(batches)["tokens"][0, 0].item() for _ in range(50)] == list(range(1, 51))
    os.kill(worker.pid, signal.SIGTERM)
    # torch's handler of SIGCHLD may find the dead worker before `join` does, and says so wherever we are
    with contextlib.suppress(RuntimeError):
        worker.join(10)
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM
