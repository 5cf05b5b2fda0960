"""One id for each byte: needs no files, loses nothing, and is the default of the quickstart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.tokenizer import Tokenizer

NUM_BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of UTF-8 text, 256 ends a document."""

    name = "ByteTokenizer"
    vocab_size = NUM_BYTES + 1
    eod = NUM_BYTES
    special_ids = frozenset({NUM_BYTES})

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The end of document is written <|endoftext|>; bytes that are no UTF-8 and ids above become U+FFFD."""
        # 0xFF occurs in no UTF-8 text, so decoding turns it into U+FFFD.
        words: list[bytes] = []
        for i in ids:
            if i == self.eod:
                words.append(END_OF_DOCUMENT.encode())
            else:
                words.append(bytes([i if 0 <= i < NUM_BYTES else 0xFF]))
        return b"".join(words).decode("utf-8", errors="replace")

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [self.tokenize_bytes(text.encode("utf-8")) for text in texts]

    def tokenize_bytes(self, data: bytes) -> NDArray[np.uint8]:
        """Ids of a file's content, UTF-8 or not."""
        return np.frombuffer(data, dtype=np.uint8)
