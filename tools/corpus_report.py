"""A corpus read from end to end: what `tools/inspect_data.py --verify` checks."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from megatron.core.datasets.checksums import check_corpus, read_checksums
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset

TOKENS_PER_BLOCK = 1 << 22


class CorpusReport(TypedDict):
    """Facts of a corpus. Token figures are None for a corpus without tokens, eod_tokens also without an eod id."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    shortest: int | None
    longest: int | None
    smallest_token: int | None
    largest_token: int | None
    eod_tokens: int | None
    checksums: str


def verify_corpus(
    prefix: str, eod: int | None = None, vocab_size: int | None = None, *, threads: int = 1
) -> CorpusReport:
    """Check the index (at open), all bytes against their checksums, where there are some, and every token.

    vocab_size: ids must be below it.  eod: id to count.  threads: that compare checksums.
    Raises DataError naming the file and the bytes that were changed, or the token that is out of range.
    """
    with IndexedDataset(prefix) as corpus:
        checksums = read_checksums(prefix)
        if checksums is not None:
            check_corpus(prefix, checksums, threads=threads)
        count, index, lengths = corpus.num_tokens, corpus.index, corpus.lengths
        lows, highs, eods = [], [], 0
        for start in range(0, count, TOKENS_PER_BLOCK):
            tokens = corpus.read_tokens(start, min(TOKENS_PER_BLOCK, count - start))
            lows.append(tokens.min())
            highs.append(tokens.max())
            eods += 0 if eod is None else int(np.count_nonzero(tokens == eod))
            if lows[-1] < 0 or (vocab_size is not None and highs[-1] >= vocab_size):
                wrong = (tokens < 0) | (tokens >= vocab_size) if vocab_size is not None else tokens < 0
                at = int(np.argmax(wrong))
                place = f"{prefix}.bin: token {start + at} at byte {(start + at) * index.dtype.itemsize}"
                limit = "at least 0" if vocab_size is None else f"0 to {vocab_size - 1}"
                raise DataError(f"{place}: expected {limit}, found {tokens[at]}")
        document_starts = index.starts[index.boundaries]
        return CorpusReport(
            prefix=prefix,
            dtype=index.dtype.name,
            documents=corpus.num_documents,
            empty_documents=int(np.count_nonzero(document_starts[1:] == document_starts[:-1])),
            sequences=len(corpus),
            tokens=count,
            shortest=int(lengths.min()) if len(lengths) else None,
            longest=int(lengths.max()) if len(lengths) else None,
            smallest_token=int(min(lows)) if lows else None,
            largest_token=int(max(highs)) if highs else None,
            eod_tokens=None if eod is None or not count else eods,
            checksums="absent" if checksums is None else "good",
        )
