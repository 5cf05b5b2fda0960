"""Which tokens make which sample: the document, sample and shuffle orders of one corpus and split; checks of them.

Think of the split's sequences as documents. They are shuffled and laid end to end, epoch after epoch, into
one stream of E*T tokens; sample k is tokens [k*L, k*L + L + x) of it; a shuffled order of the samples is what
training reads. One `numpy.random.RandomState(seed)` draws the document order, then the shuffle order, so both
are the same as Megatron's. Letters: L sequence length, x = 1 where the label of the last token is one token
further (else 0), T tokens an epoch, E epochs, N samples, n samples asked for. Source: docs/data.md.

[Note: indices from disk] A digest tells that a file is whole, not who wrote it. What passes `index_fault` leads to
tokens of the split for every sample, each of the right length; the order itself is taken on trust. Checking takes a few
passes over the arrays, a block at a time, and no search as building does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.held_arrays import Array, Layout

LAST_EPOCH_SHARE = 0.80
DOCUMENTS_PER_BLOCK = 1 << 22
_STARTS_PER_BLOCK = 1 << 22
_ROWS_AT_A_TIME = 1 << 16  # whose temporaries stay in a core's cache
INT32_MAX = 2**31 - 1
UINT32_LIMIT = 2**32 - 2


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """How often a corpus is gone through, and how many samples that gives.

    num_epochs: E.  num_samples: N.  tokens: E*T.  sequence_length: L.  extra_token: x.
    samples_before_last: a, the samples that the first E-1 epochs fill; where `last_epoch_apart`, documents
    and samples of the last epoch are shuffled on their own, so that an epoch barely begun is not mixed into
    the others.
    """

    num_epochs: int
    num_samples: int
    tokens: int
    sequence_length: int
    extra_token: int
    last_epoch_apart: bool
    samples_before_last: int

    def starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """The token of the stream where each of samples [first, stop) starts; sample N is the end of the last one."""
        starts = np.arange(first, stop, dtype=np.int64)
        starts *= self.sequence_length
        return np.minimum(starts, self.tokens - self.extra_token, out=starts)


def plan_epochs(
    t: int, length: int, n: int | None, *, extra_token: bool = True, drop_last_partial: bool = True
) -> EpochPlan:
    """E, N and the last-epoch rule, of T, L and n.

    n: None for one epoch.  drop_last_partial: False keeps a last, shorter sample, which is padded.
    """
    x = int(extra_token)
    assert t > 0, "an empty split has no epochs; the caller refuses it"
    epochs = 1 if n is None else max(1, -(-(n * length + x) // t))
    num_samples = (epochs * t - x) // length
    if not drop_last_partial:
        # float32, as Megatron computes it: above 2^24 samples it can be one off, and the order must be the same.
        num_samples = math.ceil(float(np.float32(epochs * t - x) / np.float32(length)))
    before, apart = num_samples, False
    if n is not None and epochs > 1:
        before = ((epochs - 1) * t - x) // length
        apart = n - before < int(LAST_EPOCH_SHARE * ((t - x) // length))
    return EpochPlan(epochs, num_samples, epochs * t, length, x, apart, before)


def index_layouts(lengths: NDArray[Any], sequences: range, plan: EpochPlan) -> dict[str, Layout]:
    """Dtype and shape of each index, before there are any. lengths: tokens of every sequence of the corpus.

    document_index: int32 [E * len(sequences)].  sample_index: [N + 1, 2], int32 where positions in the document order
    and offsets in a document fit, else int64.  shuffle_index: [N], uint32, int64 above 2^32 - 2 samples.
    """
    num_documents = plan.num_epochs * len(sequences)
    fits = max(num_documents, int(lengths.max(initial=0))) <= INT32_MAX
    return {
        "document_index": (np.dtype(np.int32), (num_documents,)),
        "sample_index": (np.dtype(np.int32 if fits else np.int64), (plan.num_samples + 1, 2)),
        "shuffle_index": (shuffle_index_dtype(plan), (plan.num_samples,)),
    }


def build_document_index(sequences: range, plan: EpochPlan, rng: np.random.RandomState) -> NDArray[np.int32]:
    """Order of the documents over all epochs, int32 [E * len(sequences)]."""
    ids = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    order = np.tile(ids, plan.num_epochs)
    return _shuffled(order, len(order) - len(ids), plan, rng)


def _shuffled(order: NDArray[Any], last: int, plan: EpochPlan, rng: np.random.RandomState) -> NDArray[Any]:
    """Shuffled in place, what the last epoch begins at `last` on its own where it is apart."""
    last = last if plan.last_epoch_apart else len(order)
    rng.shuffle(order[:last])
    if plan.last_epoch_apart:
        rng.shuffle(order[last:])
    return order


def build_sample_index(
    lengths: NDArray[Any], document_index: NDArray[Any], plan: EpochPlan
) -> Iterator[NDArray[Any]]:
    """Where each sample starts: [N + 1, 2] of (position in `document_index`, offset in that document), in blocks.

    lengths: tokens of every sequence of the corpus. Row N is where the last sample ends (its extra token, if
    any). With an extra token a start names a token; without, a start on a document's end is (that document,
    its length).
    """
    an_epoch = range(len(document_index) // plan.num_epochs)
    dtype, _ = index_layouts(lengths, an_epoch, plan)["sample_index"]
    base = done = 0
    for first in range(0, len(document_index), DOCUMENTS_PER_BLOCK):
        block = lengths[document_index[first : first + DOCUMENTS_PER_BLOCK]]
        ends = np.cumsum(block, dtype=np.int64)
        ends += base
        base = int(ends[-1])
        # Starts k*L that lie in this block: below its end, or on it where no extra token is needed.
        last = (base - plan.extra_token) // plan.sequence_length + 1
        if plan.tokens <= base or last > plan.num_samples:
            last = plan.num_samples + 1
        while done < last:
            stop = min(last, done + _STARTS_PER_BLOCK)
            starts = plan.starts(done, stop)
            found = np.searchsorted(ends, starts, side="right" if plan.extra_token else "left")
            offsets = starts - (ends[found] - block[found])
            yield np.stack([found + first, offsets], axis=1).astype(dtype)
            done = stop
    assert done == plan.num_samples + 1, f"{done - 1} sample starts found, {plan.num_samples} planned"


def shuffle_index_dtype(plan: EpochPlan) -> np.dtype[Any]:
    return np.dtype(np.uint32 if plan.num_samples < UINT32_LIMIT else np.int64)


def build_shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> NDArray[Any]:
    """Order of the samples, [N]."""
    order = np.arange(plan.num_samples, dtype=shuffle_index_dtype(plan))
    return _shuffled(order, plan.samples_before_last, plan, rng)


def index_fault(
    arrays: Mapping[str, Array], lengths: NDArray[Any], sequences: range, plan: EpochPlan
) -> str | None:
    """What is wrong with indices of the right layouts, None where nothing is. See [Note: indices from disk]."""
    times = np.zeros(len(sequences), dtype=np.int64)
    for documents in _blocks(arrays["document_index"]):
        if not _within(documents, sequences.start, sequences.stop):
            return f"document_index has sequences outside {sequences.start} to {sequences.stop}"
        times += np.bincount(documents - sequences.start, minlength=len(sequences))
    if (times != plan.num_epochs).any():
        return f"document_index does not have each sequence {plan.num_epochs} times"
    fault = shuffle_fault(arrays["shuffle_index"], plan.num_samples)
    if fault is None and not _cuts(arrays["sample_index"], arrays["document_index"], lengths, plan):
        return f"sample_index does not cut the documents into samples of length {plan.sequence_length}"
    return fault


def shuffle_fault(order: Array, num_samples: int) -> str | None:
    """The same of an order of so many samples, or of its beginning."""
    seen = np.zeros(num_samples, dtype=bool)
    for block in _blocks(order):
        if not _within(block, 0, num_samples):
            return f"shuffle_index has samples outside 0 to {num_samples}"
        seen[block] = True
    return None if np.count_nonzero(seen) == len(order) else "shuffle_index does not have each sample once"


def _blocks(array: Array) -> Iterator[NDArray[Any]]:
    for first in range(0, len(array), _ROWS_AT_A_TIME):
        yield array[first : first + _ROWS_AT_A_TIME]


def _cuts(rows: Array, documents: Array, lengths: NDArray[Any], plan: EpochPlan) -> bool:
    """Whether each (position, offset) is where its sample starts. lengths: tokens of every sequence."""
    first = position = base = 0  # row; document that the last one is in, and where that one begins
    for block in _blocks(rows):
        positions, offsets = block.T.astype(np.int64)
        if not _within(positions, position, len(documents)) or (np.diff(positions) < 0).any():
            return False  # they rise with the rows
        held = lengths[documents[position : int(positions[-1]) + 1]].astype(np.int64)
        begins = base + np.cumsum(held) - held
        positions -= position
        starts = plan.starts(first, first + len(positions)) - begins[positions]
        is_inside = offsets.min() >= 0 and (offsets <= held[positions] - plan.extra_token).all()
        if not (is_inside and np.array_equal(offsets, starts)):
            return False
        first, position, base = first + len(positions), position + len(held) - 1, int(begins[-1])
    return True


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or (low <= int(values.min()) and int(values.max()) < high)
