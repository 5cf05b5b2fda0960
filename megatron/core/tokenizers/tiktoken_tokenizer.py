"""Byte-pair vocabularies for `tiktoken` (extra `tiktoken`), in Megatron's JSON form or tiktoken's own."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.optional import require
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError, content_digest
from megatron.core.tokenizers.tokenizer_config import TIKTOKEN_SPECIAL_TOKENS, TokenizerConfig

DEFAULT_VOCAB_SIZE = 1 << 17
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How text is cut before merging: v1 by words, v2 also at changes from lower to upper case; digits one by one.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class TikTokenizer(Tokenizer):
    """Special tokens take the first ids, merges follow.

    Flags: --tokenizer-model, a JSON list of {"rank", "token_bytes" (base64)}, or lines `base64 rank`.
    --vocab-size: ids in all, 131072 by default; merges beyond it are cut off.
    --tiktoken-num-special-tokens: ids kept for special tokens; those without a name are <SPECIAL_i>.
    --tiktoken-special-tokens: their names, `<unk> <s> </s> ...` by default; <unk>, <s> and </s> must be among them,
    and </s> ends documents.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        path, vocab_size = config.tokenizer_model, config.vocab_size
        pattern, num_special_tokens = config.tiktoken_pattern or "v1", config.tiktoken_num_special_tokens
        data = self._read(path, "--tokenizer-model")
        if pattern not in PATTERNS:
            raise TokenizerError(f"--tiktoken-pattern {pattern}: choose one of {', '.join(PATTERNS)}")
        names = _special_names(num_special_tokens, config.tiktoken_special_tokens or TIKTOKEN_SPECIAL_TOKENS)
        ranks = read_ranks(data, f"--tokenizer-model {path}")
        room = (vocab_size or DEFAULT_VOCAB_SIZE) - num_special_tokens
        if vocab_size is not None and not 256 <= room <= len(ranks):
            raise TokenizerError(
                f"--vocab-size {vocab_size} with {num_special_tokens} special tokens takes {room} of the {len(ranks)} "
                f"tokens of {path}: give {num_special_tokens + 256} to {num_special_tokens + len(ranks)}"
            )
        ranks = {token: rank for token, rank in ranks.items() if rank < room}
        self.num_special_tokens, self._names = num_special_tokens, names
        self.vocab_size = num_special_tokens + len(ranks)
        self._encoding: Any = require("tiktoken", "tiktoken").Encoding(
            name="megatron", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
        )
        self.bos, self.eod = names.index("<s>"), names.index("</s>")
        self.pad = names.index("<pad>") if "<pad>" in names else None
        self.special_ids = frozenset(range(num_special_tokens)) - {self.pad}
        self.content = f"{pattern}:{','.join(names)}:{content_digest(data)}"

    def tokenize(self, text: str) -> list[int]:
        return [i + self.num_special_tokens for i in self._encoding.encode_ordinary(text)]

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encode, first = self._encoding.encode_ordinary, self.num_special_tokens
        return [np.array(encode(text), dtype=np.int64) + first for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        words = [
            self._names[i].encode()
            if i < self.num_special_tokens
            else self._encoding.decode_single_token_bytes(i - self.num_special_tokens)
            for i in ids
        ]
        return b"".join(words).decode("utf-8", errors="replace")


def read_ranks(data: bytes, name: str) -> dict[bytes, int]:
    """Token bytes to rank; ranks run from 0 without a gap, the first 256 being single bytes.

    Raises TokenizerError; name: of the file, in messages.
    """
    try:
        if data.lstrip()[:1] == b"[":
            rows = [(row["token_bytes"], row["rank"]) for row in json.loads(data)]
        else:
            lines = [line.split() for line in data.splitlines() if line.strip()]
            rows = [(token, int(rank)) for token, rank in lines]
        pairs = [(base64.b64decode(token, validate=True), rank) for token, rank in rows]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise TokenizerError(
            f"{name}: expected a JSON list of rank and token_bytes, or lines of base64 and rank: {error}"
        ) from error
    ranks = dict(pairs)
    numbers = [rank for rank in ranks.values() if type(rank) is int]
    if sorted(numbers) != list(range(len(pairs))):
        raise TokenizerError(f"{name}: ranks are not 0..{len(pairs) - 1}, each once")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{name}: no token for {len(missing)} single bytes, first {missing[0]}")
    return ranks


def _special_names(count: int, given: tuple[str, ...]) -> list[str]:
    for needed in ("<unk>", "<s>", "</s>"):
        if needed not in given:
            raise TokenizerError(f"--tiktoken-special-tokens: {needed} must be among {' '.join(given)}")
    if len(set(given)) != len(given):
        raise TokenizerError(f"--tiktoken-special-tokens: a name occurs twice in {' '.join(given)}")
    if len(given) > count:
        raise TokenizerError(f"--tiktoken-num-special-tokens {count}: {len(given)} special tokens are named")
    return [*given, *(f"<SPECIAL_{i}>" for i in range(len(given), count))]
