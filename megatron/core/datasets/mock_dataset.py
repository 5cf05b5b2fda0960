"""Counting sequences instead of a corpus: `--mock-data`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.requested_sizes import MOCK_LONGEST_DOCUMENT

MOCK_DOCUMENTS = 100_000
MOCK_SPLIT = "1,1,1"


class MockCorpus:
    """100000 documents 1, 2, ..., modulo the vocabulary, each ended by the end-of-document token.

    Lengths are drawn once and for all, so the samples are the same in every run.
    """

    prefix = "mock"

    def __init__(self, eod: int, vocab_size: int) -> None:
        self.eod = eod
        self.vocab_size = vocab_size
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
