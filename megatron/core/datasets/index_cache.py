"""Built indices on disk, so that the next run starts at once and ranks do not build the same thing N times.

Files of one index, in one folder: `<md5>-GPTDataset-<split>-document_index.npy`, `...-sample_index.npy`,
`...-shuffle_index.npy` and `...-description.txt`, a JSON text: `key` (all that the order depends on; the md5 is over
it), `corpus` (fingerprint of the corpus) and `files` (SHA-256 of each array). The description is written last.

An index is used only if its description equals what this run would write, every array has the digest that the
description gives and the layout that was asked for, and what the arrays say is possible (`index_builders.index_fault`);
else it is stale, damaged or planted, and is built again. Building happens under a lock file, and each file appears by
rename, so that several jobs may start at once. Arrays stay in their files and are read in pieces (held_arrays.py), by
all processes of a machine; where none can be written they are in memory, once a machine too. Files are opened and
published by core/safe_files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files
from megatron.core.datasets import held_arrays
from megatron.core.datasets.held_arrays import Arrays, HeldArray, Layout, held_in_memory, layout_bytes

logger = logging.getLogger(__name__)
ABSENT = "not there yet"
MAX_DESCRIPTION_BYTES = 1 << 24
MAGIC = b"\x93NUMPY\x01\x00"
MAX_HEADER_BYTES = len(MAGIC) + 2 + 0xFFFF
READ_BYTES = 1 << 24
Build = Callable[[], Iterable[tuple[str, Iterable[NDArray[Any]]]]]
"""Makes the arrays one after the other, each in blocks of rows."""


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
    fault: Callable[[Mapping[str, HeldArray]], str | None]

    @functools.cached_property
    def stem(self) -> str:
        text = json.dumps(self.key, indent=4)
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        return os.path.join(self.folder, f"{digest}-{self.key['class']}-{self.key['index_split']}")

    @property
    def description_path(self) -> str:
        return f"{self.stem}-description.txt"

    def load_or_build(self, build: Build) -> Arrays:
        """The arrays: those that another process of this machine offers, or from disk if they are there and right, else
        built and, where the folder allows, written."""
        arrays = held_arrays.offered(self.stem, self.layouts)
        if arrays is not None:
            return arrays
        kept = self._load_or_store(build)
        if kept is not None:
            return held_arrays.offer(self.stem, kept, is_on_disk=True)
        made = {name: held_in_memory(self.path(name), self.layouts[name], blocks) for name, blocks in build()}
        return held_arrays.offer(self.stem, made, is_on_disk=False)

    def _load_or_store(self, build: Build) -> dict[str, HeldArray] | None:
        """None where the folder does not allow it."""
        with contextlib.suppress(OSError, ValueError):
            return self._load()
        try:
            os.makedirs(self.folder, exist_ok=True)
            patience_s = safe_files.CACHE_PATIENCE_S
            with safe_files.locked(f"{self.stem}.lock", patience_s=patience_s, say=logger.warning):
                try:
                    return self._load()  # another process may have built it while we waited
                except FileNotFoundError as error:
                    absent = error.filename == self.description_path
                    level, reason = (logging.INFO, ABSENT) if absent else (logging.WARNING, str(error))
                except (OSError, ValueError) as error:
                    level, reason = logging.WARNING, str(error)
                logger.log(level, "building index %s: %s", self.stem, reason)
                return self._store(build)
        except OSError as error:
            logger.warning(
                "index cache %s cannot be written (%s): the index is kept in memory and will be built again by the "
                "next run; give --data-cache-path a folder that is writable and that nobody locks",
                self.folder,
                error,
            )
        return None

    def path(self, name: str) -> str:
        return f"{self.stem}-{name}.npy"

    def _load(self) -> dict[str, HeldArray]:
        """Raises OSError or ValueError, which say why the arrays cannot be used."""
        description = safe_files.read_json(self.description_path, max_bytes=MAX_DESCRIPTION_BYTES)
        files = description.get("files") if isinstance(description, dict) else None
        if not isinstance(files, dict) or files.keys() != self.layouts.keys():
            raise ValueError(f"{self.description_path} is not a description")
        if description.get("key") != self.key or description.get("corpus") != self.corpus:
            raise ValueError("the corpus or the settings changed since it was built")
        arrays = {name: _opened(self.path(name), one, files[name]) for name, one in self.layouts.items()}
        if (fault := self.fault(arrays)) is not None:
            raise ValueError(f"{self.description_path} describes arrays that cannot be used: {fault}")
        return arrays

    def _store(self, build: Build) -> dict[str, HeldArray]:
        files = {}
        for name, blocks in build():
            safe_files.remove_leftovers(self.path(name))
            digest = hashlib.sha256()
            with safe_files.published(self.path(name), mode=safe_files.SHARED_MODE) as file:
                for part in itertools.chain([_header(*self.layouts[name])], map(_bytes, blocks)):
                    digest.update(part)
                    file.write(part)
            files[name] = digest.hexdigest()
        safe_files.remove_leftovers(self.description_path)
        text = json.dumps({"key": self.key, "corpus": self.corpus, "files": files}, indent=4) + "\n"
        safe_files.publish_text(self.description_path, text, mode=safe_files.SHARED_MODE)
        return {name: _opened(self.path(name), one) for name, one in self.layouts.items()}


def _bytes(block: NDArray[Any]) -> Any:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _opened(path: str, layout: Layout, digest: object = None) -> HeldArray:
    """The array in a file, which has to be of this layout, and have this SHA-256 where one is given. Raises OSError or
    ValueError."""
    dtype, shape = layout
    with safe_files.open_regular(path) as fd:
        text = len(MAGIC) + 2
        head = os.pread(fd, MAX_HEADER_BYTES, 0)
        begin = text + int.from_bytes(head[len(MAGIC) : text], "little")
        # Only the padding at the end of a header differs between versions of NumPy, so it need not be evaluated.
        same = head[text:begin].rstrip() == _header(dtype, shape)[text:].rstrip()
        if not head.startswith(MAGIC) or not same:
            raise ValueError(f"{path}: no {dtype} of shape {shape} in NumPy's format 1.0")
        if (size := os.fstat(fd).st_size) != begin + layout_bytes(layout):
            raise ValueError(f"{path}: expected {begin + layout_bytes(layout)} bytes, found {size}")
        if digest is not None and (found := _digest(fd)) != digest:
            raise ValueError(f"{path}: SHA-256 is {found}, expected {digest!r:.80}")
        return HeldArray(os.dup(fd), path, layout, begin)


def _digest(fd: int) -> str:
    digest, at = hashlib.sha256(), 0
    while part := os.pread(fd, READ_BYTES, at):
        digest.update(part)
        at += len(part)
    return digest.hexdigest()


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What an .npy file of such an array begins with."""
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()
