"""Samples of mock data, by an index as a corpus's, or, where they are too many for one, by an order that is computed.

[Note: an order by formula] The documents of each epoch are shuffled by a generator of seed and epoch, and the samples
of all epochs by a `Permutation` of the seed, so samples that are read one after the other come from epochs far apart.
As in an index, what a last epoch that is hardly begun gives is shuffled apart (`EpochPlan.last_epoch_apart`). Nothing
is kept but the newest epochs' documents, so a run begins, and resumes, at any sample at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets import index_builders as index
from megatron.core.datasets.gpt_samples import GPTDataset
from megatron.core.datasets.held_arrays import Array, Arrays, Layout, layout_bytes
from megatron.core.datasets.index_builders import EpochPlan
from megatron.core.datasets.permutation import Permutation

MOCK_INDEX_BYTES = 1 << 30  # an index beyond that is not made
_EPOCHS_KEPT = 4  # a sample may end in the epoch behind the one where it starts


class MockDataset(GPTDataset):
    """Samples of mock data, in the order that they would have as a corpus.

    A split has millions, of which a run reads some: where one starts is computed when it is read, and as much of their
    order is kept, on disk too, as was asked for. A read beyond that makes the whole order. by_formula: there are so
    many that no order is made at all, see [Note: an order by formula].
    """

    def _indices(self, identity: dict[str, object], folder: str | None) -> Arrays:
        self._formula = MockOrder(self.corpus.lengths, self.sequences, self.plan, self._seed)
        if self.by_formula:
            return {}
        documents = index.build_document_index(self.sequences, self.plan, np.random.RandomState(self._seed))
        self._ends = np.cumsum(self.corpus.lengths[documents], dtype=np.int64)
        return {**super()._indices(identity, folder), "document_index": documents}

    @property
    def by_formula(self) -> bool:
        ends = 8 * self.plan.num_epochs * len(self.sequences)
        return ends + sum(map(layout_bytes, super()._layouts().values())) > MOCK_INDEX_BYTES

    def description(self) -> dict[str, object]:
        """As a corpus's; the order only where it is another."""
        return super().description() | ({"order": "formula"} if self.by_formula else {})

    def _layouts(self) -> dict[str, Layout]:
        whole = self.plan.num_samples
        kept = whole if self._requested is None else min(self._requested, whole)
        return {"shuffle_index": (index.shuffle_index_dtype(self.plan), (kept,))}

    def _fault(self, arrays: Mapping[str, Array]) -> str | None:
        return index.shuffle_fault(arrays["shuffle_index"], self.plan.num_samples)

    def _build(self) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        dtype, (kept,) = self._layouts()["shuffle_index"]
        yield "shuffle_index", [self._order()[:kept].copy() if kept else np.empty(0, dtype)]

    def _order(self) -> NDArray[Any]:
        rng = np.random.RandomState(self._seed)
        index.build_document_index(self.sequences, self.plan, rng)  # draws first
        return index.build_shuffle_index(self.plan, rng)

    def _pieces(self, i: int) -> list[tuple[int, int, int]]:
        if self.by_formula and 0 <= i < len(self):
            return self._formula.pieces(i)
        return super()._pieces(i)

    def _bounds(self, i: int) -> list[list[int]]:
        if i >= len(self._arrays["shuffle_index"]):
            self._arrays = {**self._arrays, "shuffle_index": self._order()}
        k = self._shuffled(i)
        starts = self.plan.starts(k, k + 2)
        positions = np.searchsorted(self._ends, starts, side="right" if self.plan.extra_token else "left")
        befores = np.where(positions > 0, self._ends[positions - 1], 0)
        return np.stack([positions, starts - befores], axis=1).tolist()


class MockOrder:
    """Of [Note: an order by formula].

    lengths: tokens of every document. sequences: those of the split, an epoch of which is all of them once."""

    def __init__(self, lengths: NDArray[Any], sequences: range, plan: EpochPlan, seed: int) -> None:
        self._lengths, self._sequences, self._plan, self._seed = lengths, sequences, plan, seed
        self._epochs: dict[int, tuple[NDArray[Any], NDArray[np.int64]]] = {}
        first = plan.samples_before_last if plan.last_epoch_apart else plan.num_samples
        self._shuffles = [
            (begin, Permutation(stop - begin, seed, number))
            for number, (begin, stop) in enumerate([(0, first), (first, plan.num_samples)])
            if stop > begin
        ]

    def pieces(self, i: int) -> list[tuple[int, int, int]]:
        """(document, offset, tokens) of each stretch that sample i is made of."""
        begin, shuffle = next(one for one in reversed(self._shuffles) if i >= one[0])
        plan, k = self._plan, begin + shuffle(i - begin)
        at, end = plan.starts(k, k + 2).tolist()
        end += plan.extra_token
        pieces = []
        while at < end:
            epoch, into = divmod(at, plan.tokens // plan.num_epochs)
            documents, ends = self._epoch(epoch)
            position = int(np.searchsorted(ends, into, side="right"))
            document = int(documents[position])
            offset = into - (int(ends[position]) - int(self._lengths[document]))
            count = min(int(ends[position]) - into, end - at)
            pieces.append((document, offset, count))
            at += count
        return pieces

    def _epoch(self, epoch: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The documents of an epoch in their order, and where in it each ends."""
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            shuffled = np.random.RandomState([self._seed, epoch]).permutation(len(self._sequences))
            documents = (shuffled + self._sequences.start).astype(np.int32)
            self._epochs[epoch] = documents, np.cumsum(self._lengths[documents], dtype=np.int64)
        return self._epochs[epoch]
