"""What the rest of the code knows of a tokenizer; those that need no files: one id for each byte, the default of the
quickstart, and text that is already ids."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

MAX_FILE_BYTES = 1 << 28  # the largest vocabularies take some ten million bytes


class TokenizerError(ValueError):
    """A tokenizer cannot be built from what the user gave."""


class Tokenizer(abc.ABC):
    """Text to ids and back. Named as its class, by `--tokenizer-type`, and made from a `TokenizerConfig`.

    vocab_size: ids are below it.  eod: ends a document.
    bos, pad: begins a text, fills up samples; None where the vocabulary has no such token.
    special_ids: ids of all special tokens but `pad`; a `pad` among them is no padding (`gpt_samples.pad_id`).
    content: what else decides on ids, such as a digest of the files; part of `identity`.
    """

    vocab_size: int
    eod: int
    bos: int | None = None
    pad: int | None = None
    special_ids: frozenset[int] = frozenset()
    content: str = ""

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of a text; no end of document is added."""

    def tokenize_whole(self, text: str) -> list[int]:
        """The same with the special tokens that the tokenizer's own files put around a text."""
        return self.tokenize(text)

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


NUM_BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"
LONGEST_ID = 19  # digits: a limit for Python's int, which takes its time


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of UTF-8 text, 256 ends a document. Loses nothing."""

    vocab_size = NUM_BYTES + 1
    eod = NUM_BYTES
    special_ids = frozenset({NUM_BYTES})

    def __init__(self, config: TokenizerConfig | None = None) -> None:
        """It needs no flags."""

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The end of document is written <|endoftext|>; bytes that are no UTF-8 and ids above become U+FFFD."""
        # 0xFF occurs in no UTF-8 text, so decoding turns it into U+FFFD.
        end = END_OF_DOCUMENT.encode()
        words = (end if i == self.eod else bytes([i if 0 <= i < NUM_BYTES else 0xFF]) for i in ids)
        return b"".join(words).decode("utf-8", errors="replace")

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [self.tokenize_bytes(text.encode("utf-8")) for text in texts]

    def tokenize_bytes(self, data: bytes) -> NDArray[np.uint8]:
        """Ids of a file's content, UTF-8 or not."""
        return np.frombuffer(data, dtype=np.uint8)


class NullTokenizer(Tokenizer):
    """Ids written as numbers, separated by blanks: for tests and benchmarks.

    `--vocab-size N` gives the ids 0..N-1 and N, which ends a document (Megatron up to 0.16; N+1 ids).
    """

    def __init__(self, config: TokenizerConfig) -> None:
        if (vocab_size := config.vocab_size) is None:
            raise TokenizerError("--tokenizer-type NullTokenizer needs --vocab-size")
        if vocab_size < 1:
            raise TokenizerError(f"--vocab-size {vocab_size}: must be at least 1")
        self.vocab_size, self.eod, self.special_ids = vocab_size + 1, vocab_size, frozenset({vocab_size})

    def tokenize(self, text: str) -> list[int]:
        """Raises TokenizerError for a word that is no id of the vocabulary."""
        return [self._id(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def _id(self, word: str) -> int:
        if word.isdecimal() and len(word) <= LONGEST_ID and (number := int(word)) < self.vocab_size:
            return number
        raise TokenizerError(
            f"--tokenizer-type NullTokenizer reads numbers from 0 to {self.eod} (--vocab-size), separated by blanks, "
            f"found {word[:40]!r}"
        )
