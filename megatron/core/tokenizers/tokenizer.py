"""What the rest of the code knows of a tokenizer."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files

MAX_FILE_BYTES = 1 << 28  # the largest vocabularies take some ten million bytes


class TokenizerError(ValueError):
    """A tokenizer cannot be built from what the user gave."""


class Tokenizer(abc.ABC):
    """Text to ids and back. Named as its class, by `--tokenizer-type`, and made from a `TokenizerConfig`.

    vocab_size: ids are below it.  eod: ends a document.
    pad: fills up samples, None where the vocabulary has no such token.
    special_ids: ids of all special tokens but `pad`; a `pad` among them is no padding (`gpt_dataset.pad_id`).
    content: what else decides on ids, such as a digest of the files; part of `identity`.
    """

    vocab_size: int
    eod: int
    pad: int | None = None
    special_ids: frozenset[int] = frozenset()
    content: str = ""

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
        kind = f"{type(self).__name__}:{self.vocab_size}:{self.eod}"
        return f"{kind}:{self.content}" if self.content else kind

    def _need(self, path: str | None, flag: str) -> str:
        """The path, or TokenizerError naming the flag that should have given it."""
        if not path:
            raise TokenizerError(f"--tokenizer-type {type(self).__name__} needs {flag}")
        return path

    def _read(self, path: str | None, flag: str) -> bytes:
        """The content of a file that a flag names. Raises TokenizerError naming both."""
        path = self._need(path, flag)
        try:
            return safe_files.read_bytes(path, max_bytes=MAX_FILE_BYTES, follow=True)
        except FileNotFoundError:
            told = "no such file; tokenizers are read from local files only"
            raise TokenizerError(f"{flag} {path}: {told}") from None
        except OSError as error:
            raise TokenizerError(f"{flag} {path}: {error.strerror}") from error


def content_digest(*contents: bytes) -> str:
    """SHA-256 over the content of files, for identities."""
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()
