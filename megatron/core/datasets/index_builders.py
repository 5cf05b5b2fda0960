"""Which tokens make which sample: the document, sample and shuffle orders of one corpus and split.

Think of the split's sequences as documents. They are shuffled and laid end to end, epoch after epoch, into
one stream of E*T tokens; sample k is tokens [k*L, k*L + L + x) of it; a shuffled order of the samples is what
training reads. One `numpy.random.RandomState(seed)` draws the document order, then the shuffle order, so both
are the same as Megatron's. Letters: L sequence length, x = 1 where the label of the last token is one token
further (else 0), T tokens an epoch, E epochs, N samples, n samples asked for. Source: docs/data.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAST_EPOCH_SHARE = 0.80
DOCUMENTS_PER_BLOCK = 1 << 22
INT32_MAX = 2**31 - 1
UINT32_LIMIT = 2**32 - 2


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """How often a corpus is gone through, and how many samples that gives.

    num_epochs: E.  num_samples: N.  tokens: E*T.
    samples_before_last: a, the samples that the first E-1 epochs fill; where `last_epoch_apart`, documents
    and samples of the last epoch are shuffled on their own, so that an epoch barely begun is not mixed into
    the others.
    """

    num_epochs: int
    num_samples: int
    tokens: int
    last_epoch_apart: bool
    samples_before_last: int


def plan_epochs(
    tokens_per_epoch: int,
    sequence_length: int,
    requested_samples: int | None,
    *,
    extra_token: bool = True,
    drop_last_partial: bool = True,
) -> EpochPlan:
    """E, N and the last-epoch rule.

    requested_samples: n; None for one epoch.  drop_last_partial: False keeps a last, shorter sample, which is
    padded.
    """
    t, length, x = tokens_per_epoch, sequence_length, int(extra_token)
    assert t > 0, "an empty split has no epochs; the caller refuses it"
    if requested_samples is None:
        epochs = 1
    else:
        epochs = max(1, -(-(requested_samples * length + x) // t))
    if drop_last_partial:
        num_samples = (epochs * t - x) // length
    else:
        # float32, as Megatron computes it: above 2^24 samples it can be one off, and the order must be the
        # same.
        num_samples = math.ceil(float(np.float32(epochs * t - x) / np.float32(length)))
    if requested_samples is None or epochs == 1:
        return EpochPlan(epochs, num_samples, epochs * t, False, num_samples)
    before = ((epochs - 1) * t - x) // length
    whole_epoch = (t - x) // length
    apart = requested_samples - before < int(LAST_EPOCH_SHARE * whole_epoch)
    return EpochPlan(epochs, num_samples, epochs * t, apart, before)


def build_document_index(sequences: range, plan: EpochPlan, rng: np.random.RandomState) -> NDArray[np.int32]:
    """Order of the documents over all epochs, int32 [E * len(sequences)]."""
    ids = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    if not plan.last_epoch_apart:
        order = np.tile(ids, plan.num_epochs)
        rng.shuffle(order)
        return order
    order = np.tile(ids, plan.num_epochs - 1)
    rng.shuffle(order)
    rng.shuffle(ids)
    return np.concatenate([order, ids])


def sample_index_dtype(lengths: NDArray[Any], num_documents: int) -> np.dtype[Any]:
    """int32 where positions in the document order and offsets in a document fit, else int64."""
    largest = max(num_documents, int(lengths.max(initial=0)))
    return np.dtype(np.int32 if largest <= INT32_MAX else np.int64)


def build_sample_index(
    lengths: NDArray[Any],
    document_index: NDArray[Any],
    sequence_length: int,
    plan: EpochPlan,
    *,
    extra_token: bool = True,
) -> NDArray[Any]:
    """Where each sample starts: [N + 1, 2] of (position in `document_index`, offset in that document).

    lengths: tokens of every sequence of the corpus. Row N is where the last sample ends (its extra token, if
    any). With an extra token a start names a token; without, a start on a document's end is (that document,
    its length). Works through the document order in blocks, so memory stays near that of the result.
    """
    x = int(extra_token)
    rows = np.empty((plan.num_samples + 1, 2), dtype=sample_index_dtype(lengths, len(document_index)))
    last_start = plan.tokens - x
    base = done = 0
    for first in range(0, len(document_index), DOCUMENTS_PER_BLOCK):
        block = lengths[document_index[first : first + DOCUMENTS_PER_BLOCK]]
        ends = np.cumsum(block, dtype=np.int64)
        ends += base
        base = int(ends[-1])
        # Starts k*L that lie in this block: below its end, or on it where no extra token is needed.
        in_block = -(-base // sequence_length) if extra_token else base // sequence_length + 1
        stop = plan.num_samples + 1 if last_start < base + 1 - x else min(in_block, plan.num_samples + 1)
        if stop > done:
            starts = np.arange(done, stop, dtype=np.int64)
            starts *= sequence_length
            np.minimum(starts, last_start, out=starts)
            found = np.searchsorted(ends, starts, side="right" if extra_token else "left")
            rows[done:stop, 0] = found + first
            rows[done:stop, 1] = starts - (ends[found] - block[found])
            done = stop
    assert done == plan.num_samples + 1, f"{done - 1} sample starts found, {plan.num_samples} planned"
    return rows


def shuffle_index_dtype(plan: EpochPlan) -> np.dtype[Any]:
    """uint32, int64 above 2^32 - 2 samples."""
    return np.dtype(np.uint32 if plan.num_samples < UINT32_LIMIT else np.int64)


def build_shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> NDArray[Any]:
    """Order of the samples: [N] of `shuffle_index_dtype`."""
    dtype = shuffle_index_dtype(plan)
    first = plan.samples_before_last if plan.last_epoch_apart else plan.num_samples
    head = np.arange(first, dtype=dtype)
    rng.shuffle(head)
    if not plan.last_epoch_apart:
        return head
    tail = np.arange(first, plan.num_samples, dtype=dtype)
    rng.shuffle(tail)
    return np.concatenate([head, tail])
