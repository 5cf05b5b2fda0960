"""What the rest of the code knows of a tokenizer."""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TokenizerError(ValueError):
    """A tokenizer cannot be built from what the user gave."""


class Tokenizer(abc.ABC):
    """Text to ids and back.

    name: as in `--tokenizer-type`.  vocab_size: ids are below it.  eod: ends a document.
    pad: fills up samples, None where the vocabulary has no such token.
    special_ids: ids of all special tokens but `pad`; a `pad` among them is no padding (`gpt_dataset.pad_id`).
    """

    name: str
    vocab_size: int
    eod: int
    pad: int | None = None
    special_ids: frozenset[int] = frozenset()

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of a text; no end of document is added."""

    @abc.abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids; any ids below `vocab_size` are allowed."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Ids of several texts: what preprocessing calls."""
        return [np.array(self.tokenize(text), dtype=np.int64) for text in texts]

    def identity(self) -> str:
        """Equal for tokenizers that give the same ids to the same text; part of keys of caches."""
        return f"{self.name}:{self.vocab_size}:{self.eod}"


def require_file(path: str | None, flag: str, tokenizer: str) -> str:
    """The path, or TokenizerError naming the flag that should have given it."""
    if not path:
        raise TokenizerError(f"--tokenizer-type {tokenizer} needs {flag}")
    if not os.path.exists(path):
        raise TokenizerError(f"{flag} {path}: no such file; tokenizers are read from local files only")
    return path


def file_digest(*paths: str) -> str:
    """SHA-256 over the content of files, for identities."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
