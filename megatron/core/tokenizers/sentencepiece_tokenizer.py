"""SentencePiece models (extra `sentencepiece`): Llama 2's, GPT's, and Megatron's own with added special tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from megatron.core.optional import require
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError, content_digest
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig


class GPTSentencePieceTokenizer(Tokenizer):
    """The model's vocabulary as it is; its end of sentence ends documents. Raises TokenizerError without one."""

    def __init__(self, config: TokenizerConfig) -> None:
        path = config.tokenizer_model
        data = self._read(path, "--tokenizer-model")
        library = require("sentencepiece", "sentencepiece")
        try:
            self.model: Any = library.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"--tokenizer-model {path}: not a SentencePiece model: {error}") from error
        self.content = content_digest(data)
        self.vocab_size = int(self.model.vocab_size())
        ends = int(self.model.pad_id()), int(self.model.bos_id())
        self.pad, self.bos = (one if one >= 0 else None for one in ends)
        self._add_special_tokens()
        if self.eod < 0:
            told = "the model has no end-of-sentence token to end documents"
            raise TokenizerError(f"--tokenizer-model {path}: {told}")
        ids = {self.eod, self.bos, int(self.model.eos_id()), int(self.model.unk_id()), *self.special_ids}
        self.special_ids = frozenset(i for i in ids if i is not None and i >= 0)

    def _add_special_tokens(self) -> None:
        self.eod = int(self.model.eos_id())

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids))


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """Like the model, with its begin-of-sentence id before each text."""

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text, add_bos=self.bos is not None)


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """The model with Megatron's special tokens: each that the model lacks gets the next id after its vocabulary.

    In this order: <CLS>, <SEP>, <EOD> (which ends documents), <MASK>, then padding, begin and end of sentence.
    """

    def _add_special_tokens(self) -> None:
        self._added: dict[int, str] = {}
        cls, sep, self.eod, mask = (self._id_of(piece) for piece in ("<CLS>", "<SEP>", "<EOD>", "<MASK>"))
        self.pad = self._id_of(self._piece(int(self.model.pad_id()), "<PAD>"))
        self.bos = self._id_of(self._piece(int(self.model.bos_id()), "<BOS>"))
        eos = self._id_of(self._piece(int(self.model.eos_id()), "<EOS>"))
        self.special_ids = frozenset({cls, sep, mask, eos})

    def detokenize(self, ids: Sequence[int]) -> str:
        """Added tokens are written by their names, between the pieces of text around them."""
        runs = itertools.groupby(ids, lambda i: self._added.get(i, ""))
        return "".join(name * len(list(run)) if name else self.model.decode(list(run)) for name, run in runs)

    def _piece(self, piece_id: int, default: str) -> str:
        return default if piece_id < 0 else str(self.model.id_to_piece(piece_id))

    def _id_of(self, piece: str) -> int:
        found = int(self.model.piece_to_id(piece))
        if str(self.model.id_to_piece(found)) == piece:
            return found
        if piece not in self._added.values():
            self._added[self.vocab_size] = piece
            self.vocab_size += 1
        return next(known for known, name in self._added.items() if name == piece)
