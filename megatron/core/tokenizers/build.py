"""From flags to a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tokenizers.huggingface_tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.core.tokenizers.tiktoken_tokenizer import TikTokenizer
from megatron.core.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, TokenizerError
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

_BY_TYPE: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    cls.__name__: cls
    for cls in (
        *(ByteTokenizer, NullTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer),
        *(GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer),
    )
}
TOKENIZER_TYPES = tuple(_BY_TYPE)


def build_tokenizer(tokenizer_type: str, **flags: Any) -> Tokenizer:
    """The tokenizer that the flags of these names describe (`TokenizerConfig`). Raises as `build_from_config`."""
    return build_from_config(TokenizerConfig(**{**flags, "tokenizer_type": tokenizer_type}))


def build_from_config(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration.

    vocab_size: needed by NullTokenizer, limits TikTokenizer; others have their own, which must equal it if given.
    Raises TokenizerError naming the flags, and MissingPackageError naming the pip line of a missing extra.
    """
    kind, vocab_size = config.tokenizer_type, config.vocab_size
    if kind not in _BY_TYPE:
        raise TokenizerError(f"--tokenizer-type {kind}: choose one of {', '.join(TOKENIZER_TYPES)}")
    tokenizer = _BY_TYPE[kind](config)
    has_its_own = kind not in ("NullTokenizer", "TikTokenizer")
    if vocab_size is not None and has_its_own and tokenizer.vocab_size != vocab_size:
        told = f"{kind} has {tokenizer.vocab_size} ids; leave --vocab-size out"
        raise TokenizerError(f"--vocab-size {vocab_size}: {told}")
    return tokenizer
