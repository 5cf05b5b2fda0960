"""Writer of a tokenized corpus: the layout is described in indexed_dataset.py.

Files appear under their final names only when complete: they are written beside, synced and renamed, the
index last, and an index that stands there from before is taken away first; so no moment shows a new `.bin`
under an old `.idx`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.core.datasets.errors import DataError
from megatron.core.datasets.indexed_dataset import (
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    data_path,
    dtype_code,
    index_path,
)

LONGEST_SEQUENCE_TOKENS = 2**31 - 1
COPY_BLOCK_BYTES = 1 << 24


class IndexedDatasetWriter:
    """Writes one corpus, document by document or part by part.

    prefix: path without `.bin`/`.idx`.  dtype: one of the layout's (see `token_dtype`).
    As a context manager it finishes the corpus at the end of the block, or drops what it wrote on an
    exception.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self._code = dtype_code(self.dtype)
        self._temporary = f"{prefix}.writing-{os.getpid()}"
        self._bin: IO[bytes] = open(data_path(self._temporary), "wb", buffering=1 << 20)  # noqa: SIM115
        self._lengths: list[NDArray[np.int32]] = []
        self._boundaries: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        self._pending_lengths: list[int] = []
        self._pending_boundaries: list[int] = []
        self._num_sequences = 0

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        tokens: [n] integers.  lengths: of the sequences that it consists of; one sequence of n tokens by
        default, none for an empty document.
        Raises DataError for a token that the dtype cannot hold or a sequence over 2^31 - 1 tokens.
        """
        array = np.asarray(tokens)
        if array.dtype != self.dtype:
            array = self._cast(array)
        if lengths is None:
            lengths = [len(array)] if len(array) else []
        assert sum(lengths) == len(array), f"lengths add up to {sum(lengths)}, {len(array)} tokens given"
        if lengths and max(lengths) > LONGEST_SEQUENCE_TOKENS:
            raise DataError(
                f"{self.prefix}: a sequence of {max(lengths)} tokens; the layout holds "
                f"{LONGEST_SEQUENCE_TOKENS} at most"
            )
        self._bin.write(np.ascontiguousarray(array).data)
        self._pending_lengths.extend(lengths)
        self._num_sequences += len(lengths)
        self._pending_boundaries.append(self._num_sequences)

    def add_corpus(self, prefix: str) -> None:
        """Append all documents of another corpus of the same dtype; its `.bin` is copied as it is."""
        with IndexedDataset(prefix) as part:
            if part.index.dtype != self.dtype:
                raise DataError(f"{prefix}: tokens are {part.index.dtype}, {self.prefix} holds {self.dtype}")
            self._flush_pending()
            self._lengths.append(part.index.lengths)
            self._boundaries.append(part.index.boundaries[1:] + self._num_sequences)
            self._num_sequences += len(part)
        with open(data_path(prefix), "rb") as source:
            shutil.copyfileobj(source, self._bin, COPY_BLOCK_BYTES)

    def finish(self) -> None:
        """Write the index and publish both files."""
        self._flush_pending()
        _sync_and_close(self._bin)
        lengths = np.concatenate([np.zeros(0, dtype=np.int32), *self._lengths])
        boundaries = np.concatenate(self._boundaries)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with open(index_path(self._temporary), "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(boundaries)))
            for array, dtype in ((lengths, "<i4"), (pointers, "<i8"), (boundaries, "<i8")):
                file.write(np.ascontiguousarray(array, dtype=dtype).data)
            _sync_and_close(file)
        if os.path.exists(index_path(self.prefix)):
            os.unlink(index_path(self.prefix))
        os.replace(data_path(self._temporary), data_path(self.prefix))
        os.replace(index_path(self._temporary), index_path(self.prefix))

    def discard(self) -> None:
        """Drop what was written; nothing appears under the final names."""
        self._bin.close()
        for path in (data_path(self._temporary), index_path(self._temporary)):
            if os.path.exists(path):
                os.unlink(path)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def _cast(self, array: NDArray[Any]) -> NDArray[Any]:
        if not len(array):
            return array.astype(self.dtype)
        assert array.dtype.kind in "iu", f"tokens are integers, got {array.dtype}"
        info = np.iinfo(self.dtype)
        low, high = int(array.min()), int(array.max())
        if low < info.min or high > info.max:
            raise DataError(
                f"{self.prefix}: token {low if low < info.min else high} does not fit {self.dtype.name}; "
                "the tokenizer makes ids beyond its own vocabulary size"
            )
        return array.astype(self.dtype)

    def _flush_pending(self) -> None:
        self._lengths.append(np.array(self._pending_lengths, dtype=np.int32))
        self._boundaries.append(np.array(self._pending_boundaries, dtype=np.int64))
        self._pending_lengths, self._pending_boundaries = [], []


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
