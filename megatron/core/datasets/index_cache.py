"""Built indices on disk, so that the next run starts at once and ranks do not build the same thing N times.

Files of one index, in one folder: `<md5>-GPTDataset-<split>-document_index.npy`, `...-sample_index.npy`,
`...-shuffle_index.npy` and `...-description.txt`, a JSON text: `key` (all that the order depends on; the md5
is over it), `corpus` (fingerprint of the corpus) and `files` (SHA-256 of each array). The description is
written last.

An index is used only if its description equals what this run would write and every array has the digest that
the description gives; else it is stale or damaged, and is built again. Building happens under a lock file,
and each file appears by rename, so that several jobs may start at once. Arrays are read into memory, not
mapped: a file that someone truncates can then not end the run (indexed_dataset.py, [Note: no mmap]).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)
Arrays = dict[str, NDArray[Any]]


class IndexCache:
    """One index in a folder.

    kind, split: parts of the file names.  key: what the index depends on.  corpus: fingerprint of its corpus.
    """

    def __init__(
        self, folder: str, kind: str, split: str, key: Mapping[str, object], corpus: Mapping[str, object]
    ) -> None:
        self.folder = folder
        self.key = dict(key)
        self.corpus = dict(corpus)
        text = json.dumps(self.key, indent=4)
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        self.stem = os.path.join(folder, f"{digest}-{kind}-{split}")

    def load_or_build(self, build: Callable[[], Arrays]) -> Arrays:
        """The arrays, from disk if they are there and right, else built and, where the folder allows, written."""
        arrays, reason = self._load()
        if arrays is not None:
            return arrays
        try:
            with self._lock():
                arrays, reason = self._load()  # another process may have built it while we waited
                if arrays is None:
                    logger.info("building index %s: %s", self.stem, reason)
                    arrays = build()
                    self._store(arrays)
        except OSError as error:
            logger.warning(
                "index cache %s cannot be written (%s): the index is kept in memory and will be built again "
                "by every "
                "process and run; give --data-cache-path a writable folder",
                self.folder,
                error,
            )
        return build() if arrays is None else arrays

    def path(self, name: str) -> str:
        return f"{self.stem}-{name}.npy"

    @property
    def description_path(self) -> str:
        return f"{self.stem}-description.txt"

    def _load(self) -> tuple[Arrays | None, str]:
        """The arrays, or None and why they cannot be used."""
        try:
            with open(self.description_path, encoding="utf-8") as file:
                description = json.load(file)
        except FileNotFoundError:
            return None, "not there yet"
        except (OSError, ValueError) as error:
            return None, f"{self.description_path}: {error}"
        if not isinstance(description, dict) or not isinstance(description.get("files"), dict):
            return None, f"{self.description_path} is not a description"
        if description.get("key") != self.key or description.get("corpus") != self.corpus:
            return None, "the corpus or the settings changed since it was built"
        arrays: Arrays = {}
        for name, digest in description["files"].items():
            array, reason = _read_array(self.path(name), digest)
            if array is None:
                return None, reason
            arrays[name] = array
        return arrays, ""

    def _store(self, arrays: Arrays) -> None:
        files = {}
        for name, array in arrays.items():
            with _published(self.path(name)) as file:
                np.save(file, array, allow_pickle=False)
            with open(self.path(name), "rb") as written:
                files[name] = hashlib.file_digest(written, "sha256").hexdigest()
        description = {"key": self.key, "corpus": self.corpus, "files": files}
        with _published(self.description_path) as file:
            file.write((json.dumps(description, indent=4) + "\n").encode())

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One builder at a time; the system frees the lock of a process that dies."""
        os.makedirs(self.folder, exist_ok=True)
        fd = os.open(f"{self.stem}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _read_array(path: str, digest: object) -> tuple[NDArray[Any] | None, str]:
    """An array whose file has this SHA-256, or None and what is wrong."""
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                return None, f"{path}: SHA-256 is {found}, expected {digest}"
            file.seek(0)
            array: NDArray[Any] = np.load(file, allow_pickle=False)
            return array, ""
    except (OSError, ValueError, EOFError) as error:
        return None, f"{path}: {error}"


@contextlib.contextmanager
def _published(path: str) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when completely written."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
