"""Built indices on disk, so that the next run starts at once and ranks do not build the same thing N times.

Files of one index, in one folder: `<md5>-GPTDataset-<split>-document_index.npy`, `...-sample_index.npy`,
`...-shuffle_index.npy` and `...-description.txt`, a JSON text: `key` (all that the order depends on; the md5 is over
it), `corpus` (fingerprint of the corpus) and `files` (SHA-256 of each array). The description is written last.

An index is used only if its description equals what this run would write, every array has the digest that the
description gives and the layout that was asked for, and what the arrays say is possible (`index_builders.index_fault`);
else it is stale, damaged or planted, and is built again. Building happens under a lock file, and each file appears by
rename, so that several jobs may start at once. Arrays are read into memory, not mapped: a file that someone truncates
can then not end the run (indexed_dataset_reader.py, [Note: no mmap]). core/safe_files opens and publishes files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files
from megatron.core.datasets.index_builders import Layout

logger = logging.getLogger(__name__)
ABSENT = "not there yet"
MAX_DESCRIPTION_BYTES = 1 << 24
MAGIC = b"\x93NUMPY\x01\x00"
MAX_HEADER_BYTES = len(MAGIC) + 2 + 0xFFFF
Arrays = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class IndexCache:
    """One index in a folder.

    key: what the index depends on, its class and split, which are in the files' names, among it.  corpus: fingerprint
    of its corpus.  layouts: of its arrays.  fault: says what is wrong with arrays of these layouts.
    """

    folder: str
    key: Mapping[str, object]
    corpus: Mapping[str, object]
    layouts: Mapping[str, Layout]
    fault: Callable[[Arrays], str | None]

    @functools.cached_property
    def stem(self) -> str:
        text = json.dumps(self.key, indent=4)
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        return os.path.join(self.folder, f"{digest}-{self.key['class']}-{self.key['index_split']}")

    @property
    def description_path(self) -> str:
        return f"{self.stem}-description.txt"

    def load_or_build(self, build: Callable[[], Arrays]) -> Arrays:
        """The arrays, from disk if they are there and right, else built and, where the folder allows, written."""
        with contextlib.suppress(OSError, ValueError):
            return self._load()
        arrays = None
        try:
            os.makedirs(self.folder, exist_ok=True)
            with safe_files.locked(f"{self.stem}.lock"):
                try:
                    return self._load()  # another process may have built it while we waited
                except FileNotFoundError as error:
                    absent = error.filename == self.description_path
                    level, reason = (logging.INFO, ABSENT) if absent else (logging.WARNING, str(error))
                except (OSError, ValueError) as error:
                    level, reason = logging.WARNING, str(error)
                logger.log(level, "building index %s: %s", self.stem, reason)
                arrays = build()
                self._store(arrays)
        except OSError as error:
            logger.warning(
                "index cache %s cannot be written (%s): the index is kept in memory and will be built again by every "
                "process and run; give --data-cache-path a writable folder",
                self.folder,
                error,
            )
        return build() if arrays is None else arrays

    def path(self, name: str) -> str:
        return f"{self.stem}-{name}.npy"

    def _load(self) -> Arrays:
        """Raises OSError or ValueError, which say why the arrays cannot be used."""
        description = safe_files.read_json(self.description_path, max_bytes=MAX_DESCRIPTION_BYTES)
        files = description.get("files") if isinstance(description, dict) else None
        if not isinstance(files, dict) or files.keys() != self.layouts.keys():
            raise ValueError(f"{self.description_path} is not a description")
        if description.get("key") != self.key or description.get("corpus") != self.corpus:
            raise ValueError("the corpus or the settings changed since it was built")
        arrays = {name: _read_array(self.path(name), files[name], one) for name, one in self.layouts.items()}
        if (fault := self.fault(arrays)) is not None:
            raise ValueError(f"{self.description_path} describes arrays that cannot be used: {fault}")
        return arrays

    def _store(self, arrays: Arrays) -> None:
        files = {}
        for name, array in arrays.items():
            safe_files.remove_leftovers(self.path(name))
            digest = hashlib.sha256()
            with safe_files.published(self.path(name), mode=safe_files.SHARED_MODE) as file:
                for part in (_header(array.dtype, array.shape), np.ascontiguousarray(array).reshape(-1).data):
                    digest.update(part)
                    file.write(part)
            files[name] = digest.hexdigest()
        safe_files.remove_leftovers(self.description_path)
        text = json.dumps({"key": self.key, "corpus": self.corpus, "files": files}, indent=4) + "\n"
        safe_files.publish_text(self.description_path, text, mode=safe_files.SHARED_MODE)


def _read_array(path: str, digest: object, layout: Layout) -> NDArray[Any]:
    """The array of a file with this SHA-256; nothing is read, or allocated, but for one of this layout.

    Raises OSError or ValueError.
    """
    dtype, shape = layout
    expected_bytes = dtype.itemsize * math.prod(shape)
    data = safe_files.read_bytes(path, max_bytes=expected_bytes + MAX_HEADER_BYTES)
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise ValueError(f"{path}: SHA-256 is {found}, expected {digest!r:.80}")
    text = len(MAGIC) + 2
    begin = text + int.from_bytes(data[len(MAGIC) : text], "little")
    # Only the padding at the end of a header differs between versions of NumPy, so it need not be evaluated.
    same = data[text:begin].rstrip() == _header(dtype, shape)[text:].rstrip()
    if not data.startswith(MAGIC) or not same:
        raise ValueError(f"{path}: no {dtype} of shape {shape} in NumPy's format 1.0")
    if len(data) != begin + expected_bytes:
        raise ValueError(f"{path}: expected {begin + expected_bytes} bytes, found {len(data)}")
    return np.frombuffer(data, dtype=dtype, offset=begin).reshape(shape)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What an .npy file of such an array begins with."""
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()
