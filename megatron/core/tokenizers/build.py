"""From flags to a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tokenizers.builtin_tokenizers import ByteTokenizer, NullTokenizer
from megatron.core.tokenizers.huggingface_tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.core.tokenizers.tiktoken_tokenizer import TikTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

_BUILDERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "ByteTokenizer": lambda config: ByteTokenizer(),
    "NullTokenizer": lambda config: NullTokenizer(config.vocab_size),
    "GPT2BPETokenizer": lambda config: GPT2BPETokenizer(config.vocab_file, config.merge_file),
    "HuggingFaceTokenizer": lambda config: HuggingFaceTokenizer(config.tokenizer_model),
    "SentencePieceTokenizer": lambda config: SentencePieceTokenizer(config.tokenizer_model),
    "GPTSentencePieceTokenizer": lambda config: GPTSentencePieceTokenizer(config.tokenizer_model),
    "Llama2Tokenizer": lambda config: Llama2Tokenizer(config.tokenizer_model),
    "TikTokenizer": lambda config: TikTokenizer(
        config.tokenizer_model,
        pattern=config.tiktoken_pattern,
        vocab_size=config.vocab_size,
        num_special_tokens=config.tiktoken_num_special_tokens,
        special_tokens=config.tiktoken_special_tokens,
    ),
}
TOKENIZER_TYPES = tuple(_BUILDERS)


def build_tokenizer(tokenizer_type: str, **flags: Any) -> Tokenizer:
    """The tokenizer that the flags of these names describe (`TokenizerConfig`). Raises as `build_from_config`."""
    return build_from_config(TokenizerConfig(**{**flags, "tokenizer_type": tokenizer_type}))


def build_from_config(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration.

    vocab_size: needed by NullTokenizer, limits TikTokenizer; others have their own, which must equal it if given.
    Raises TokenizerError naming the flags, and MissingPackageError naming the pip line of a missing extra.
    """
    kind, vocab_size = config.tokenizer_type, config.vocab_size
    if kind not in _BUILDERS:
        raise TokenizerError(f"--tokenizer-type {kind}: choose one of {', '.join(TOKENIZER_TYPES)}")
    tokenizer = _BUILDERS[kind](config)
    has_its_own = kind not in ("NullTokenizer", "TikTokenizer")
    if vocab_size is not None and has_its_own and tokenizer.vocab_size != vocab_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size}: {kind} has {tokenizer.vocab_size} ids; leave --vocab-size out"
        )
    return tokenizer
