"""Text that is already ids, separated by blanks: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError

LONGEST_ID = 19  # digits: a limit for Python's int, which takes its time


class NullTokenizer(Tokenizer):
    """`--vocab-size N` gives the ids 0..N-1 and N, which ends a document (Megatron up to 0.16; N+1 ids)."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise TokenizerError(f"--vocab-size {vocab_size}: must be at least 1")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size
        self.special_ids = frozenset({self.eod})

    def tokenize(self, text: str) -> list[int]:
        """Raises TokenizerError for a word that is no id of the vocabulary."""
        return [self._id(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)

    def _id(self, word: str) -> int:
        if word.isdecimal() and len(word) <= LONGEST_ID and (number := int(word)) < self.vocab_size:
            return number
        raise TokenizerError(
            f"--tokenizer-type NullTokenizer reads numbers from 0 to {self.eod} (--vocab-size), separated by blanks, "
            f"found {word[:40]!r}"
        )
