"""How many samples a run asks of its data sets, and how large the indices over so many are (floor 0)."""

from __future__ import annotations

from typing import NamedTuple

# [Note: size of an index] A sample has a row of two numbers and a place in a shuffled order, 12 bytes; making them
# takes a quarter of a microsecond. So this many samples are 48 GiB and 18 minutes; 15 trillion tokens in sequences of
# 4096 are fewer. Every rank holds the index.
MAX_SAMPLES = 2**32
BYTES_PER_SAMPLE = 12
S_PER_SAMPLE = 2.5e-7
MOCK_LONGEST_DOCUMENT = (
    4096  # of mock data: on average they are half as long; each has a place in an order too
)


class RequestedSizes(NamedTuple):
    """Samples that a run asks of each split."""

    train: int
    valid: int
    test: int


def requested_sizes(
    *,
    train_samples: int | None,
    train_iters: int,
    eval_interval: int | None,
    eval_iters: int,
    global_batch_size: int,
) -> RequestedSizes:
    """Samples asked for: all training, all evaluations on the way and the one at the end, one test.

    train_iters: also given for sample-based runs, where it is derived.  eval_interval None: only the final
    evaluation.
    """
    train = train_samples if train_samples is not None else train_iters * global_batch_size
    evaluations = (train_iters // eval_interval if eval_interval else 0) + 1
    return RequestedSizes(train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size)
