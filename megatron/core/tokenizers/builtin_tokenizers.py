"""Tokenizers that need no files: one id for each byte, the default of the quickstart, and text that is already ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

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
