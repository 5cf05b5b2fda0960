"""Counting sequences instead of a corpus: `--mock-data`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets import index_builders as index
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset_config import MOCK_LONGEST_DOCUMENT
from megatron.core.datasets.index_cache import Arrays

MOCK_DOCUMENTS = 100_000
MOCK_SPLIT = "1,1,1"


class MockCorpus:
    """100000 documents 1, 2, ..., modulo the vocabulary, each ended by the end-of-document token.

    Lengths are drawn once and for all, so the samples are the same in every run.
    """

    prefix = "mock"

    def __init__(self, eod: int, vocab_size: int) -> None:
        self.eod, self.vocab_size = eod, vocab_size
        rng = np.random.default_rng(0)
        self._lengths = rng.integers(1, MOCK_LONGEST_DOCUMENT, size=MOCK_DOCUMENTS, dtype=np.int32)

    def __len__(self) -> int:
        return MOCK_DOCUMENTS

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self._lengths

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Tokens [offset, offset + length) of a document."""
        total = int(self._lengths[sequence])
        tokens = np.arange(1, total + 1, dtype=np.int64) % self.vocab_size
        tokens[-1] = self.eod
        return tokens[offset : total if length is None else offset + length]

    def fingerprint(self) -> dict[str, int | str]:
        """Identity of the content, as of a corpus on disk."""
        return {"mock": 1, "eod": self.eod, "vocab_size": self.vocab_size}


class MockDataset(GPTDataset):
    """Samples of mock data, in the order that they would have as a corpus.

    A split has millions, of which a run reads some: where one starts is computed when it is read, and as much of their
    order is kept, on disk too, as was asked for. A read beyond that makes the whole order.
    """

    def _indices(self, identity: dict[str, object], folder: str | None) -> Arrays:
        documents = index.build_document_index(self.sequences, self.plan, np.random.RandomState(self._seed))
        self._ends = np.cumsum(self.corpus.lengths[documents], dtype=np.int64)
        return {**super()._indices(identity, folder), "document_index": documents}

    def _layouts(self) -> dict[str, index.Layout]:
        whole = self.plan.num_samples
        kept = whole if self._requested is None else min(self._requested, whole)
        return {"shuffle_index": (index.shuffle_index_dtype(self.plan), (kept,))}

    def _index_bytes(self) -> int:
        ends = 8 * self.plan.num_epochs * len(self.sequences)
        return ends + index.layout_bytes(super()._layouts())

    def _fault(self, arrays: Arrays) -> str | None:
        return index.shuffle_fault(arrays["shuffle_index"], self.plan.num_samples)

    def _build(self) -> Arrays:
        dtype, (kept,) = self._layouts()["shuffle_index"]
        return {"shuffle_index": self._order()[:kept].copy() if kept else np.empty(0, dtype)}

    def _order(self) -> NDArray[Any]:
        rng = np.random.RandomState(self._seed)
        index.build_document_index(self.sequences, self.plan, rng)  # draws first
        return index.build_shuffle_index(self.plan, rng)

    def _bounds(self, i: int) -> list[list[int]]:
        if i >= len(self._arrays["shuffle_index"]):
            self._arrays["shuffle_index"] = self._order()
        k = int(self._arrays["shuffle_index"][i])
        starts = self.plan.starts(k, k + 2)
        positions = np.searchsorted(self._ends, starts, side="right" if self.plan.extra_token else "left")
        befores = np.where(positions > 0, self._ends[positions - 1], 0)
        return np.stack([positions, starts - befores], axis=1).tolist()
