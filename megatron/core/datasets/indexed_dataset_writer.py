"""Writer of a tokenized corpus: the layout is described in indexed_dataset_reader.py.

Files appear under their final names only when complete, first the data, then the index, then the checksums; what stands
there from before of the last two is taken away first. So no moment shows a new `.bin` under an old `.idx`.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.core.datasets import checksums
from megatron.core.datasets import indexed_dataset_reader as layout
from megatron.core.datasets.errors import DataError
from megatron.core.safe_files import SHARED_MODE, published, sync_directory

LONGEST_SEQUENCE_TOKENS = 2**31 - 1
BUFFER_BYTES = 1 << 20
COPIED_TOKENS = 1 << 22


class IndexedDatasetWriter:
    """Writes one corpus, document by document or part by part.

    prefix: path without `.bin`/`.idx`.  dtype: one of the layout's (see `token_dtype`). As a context manager it
    finishes the corpus at the end of the block, or drops what it wrote on an exception.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        codes = [code for code, known in layout.DTYPES.items() if known == self.dtype]
        assert codes, f"no dtype code for {dtype}; codes are {layout.DTYPES}"
        self._code = codes[0]
        with contextlib.ExitStack() as files:  # ended in the other order: the data is published first
            self._sums, self._idx, self._bin = (
                files.enter_context(published(path(prefix), mode=SHARED_MODE))
                for path in (checksums.checksums_path, layout.index_path, layout.data_path)
            )
            self._files = files.pop_all()
        self._hasher = checksums.BlockHasher()
        self._buffer = bytearray()
        self._lengths, self._boundaries = array("i"), array("q", [0])  # int32, int64

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        tokens: [n] integers.  lengths: of the sequences that it consists of; one sequence of n tokens by
        default, none for an empty document.
        Raises DataError for a token that the dtype cannot hold or a sequence over 2^31 - 1 tokens.
        """
        ids = self._cast(np.asarray(tokens))
        if lengths is None:
            lengths = [len(ids)] if len(ids) else []
        assert sum(lengths) == len(ids), f"lengths add up to {sum(lengths)}, {len(ids)} tokens given"
        if lengths and max(lengths) > LONGEST_SEQUENCE_TOKENS:
            told = f"a sequence of {max(lengths)} tokens; the layout holds {LONGEST_SEQUENCE_TOKENS} at most"
            raise DataError(f"{self.prefix}: {told}")
        self._write(ids)
        self._lengths.extend(lengths)
        self._boundaries.append(len(self._lengths))

    def add_corpus(self, prefix: str) -> None:
        """Append all documents of another corpus of the same dtype; its `.bin` is copied as it is. Raises DataError."""
        with layout.IndexedDataset(prefix) as part:
            if part.index.dtype != self.dtype:
                raise DataError(f"{prefix}: tokens are {part.index.dtype}, {self.prefix} holds {self.dtype}")
            self._boundaries.frombytes((part.index.boundaries[1:] + len(self._lengths)).tobytes())
            self._lengths.frombytes(part.index.lengths.tobytes())
            for start in range(0, part.num_tokens, COPIED_TOKENS):
                self._write(part.read_tokens(start, min(COPIED_TOKENS, part.num_tokens - start)))

    def finish(self) -> None:
        """Write index and checksums, and publish all three files."""
        with self._files:
            self._flush_buffer()
            idx_sums = checksums.BlockHasher()
            for part in self._index():
                idx_sums.update(part)
                self._idx.write(part)
            sums = checksums.Checksums(checksums.BLOCK_BYTES, self._hasher.sums(), idx_sums.sums())
            self._sums.write(checksums.encoded(sums).encode())
            for file in (self._bin, self._idx, self._sums):  # a full disk must leave what was there before
                file.flush()
                os.fsync(file.fileno())
            for path in (layout.index_path(self.prefix), checksums.checksums_path(self.prefix)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        sync_directory(os.path.dirname(self.prefix) or ".")

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self.finish()
        else:
            self._files.__exit__(*exception)  # nothing appears under the final names

    def _cast(self, ids: NDArray[Any]) -> NDArray[Any]:
        if ids.dtype == self.dtype or not len(ids):
            return ids.astype(self.dtype, copy=False)
        assert ids.dtype.kind in "iu", f"tokens are integers, got {ids.dtype}"
        info, low, high = np.iinfo(self.dtype), int(ids.min()), int(ids.max())
        if low < info.min or high > info.max:
            raise DataError(
                f"{self.prefix}: token {low if low < info.min else high} does not fit {self.dtype.name}; "
                "the tokenizer makes ids beyond its own vocabulary size"
            )
        return ids.astype(self.dtype)

    def _index(self) -> Iterator[bytes]:
        lengths, boundaries = np.array(self._lengths), np.array(self._boundaries)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        yield layout.HEADER.pack(layout.MAGIC, layout.VERSION, self._code, len(lengths), len(boundaries))
        for values, dtype in ((lengths, "<i4"), (pointers, "<i8"), (boundaries, "<i8")):
            yield values.astype(dtype, copy=False).tobytes()

    def _write(self, tokens: NDArray[Any]) -> None:
        self._buffer += tokens.tobytes()
        if len(self._buffer) >= BUFFER_BYTES:
            self._flush_buffer()

    def _flush_buffer(self) -> None:
        self._hasher.update(self._buffer)
        self._bin.write(self._buffer)
        self._buffer = bytearray()
