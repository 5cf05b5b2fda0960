"""From flags to a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer
from megatron.core.tokenizers.huggingface_tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.core.tokenizers.tiktoken_tokenizer import TikTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

TOKENIZER_TYPES = (
    "ByteTokenizer",
    "NullTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
FIXED_VOCABULARIES = (
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
    tiktoken_special_tokens: Sequence[str] | None = None,
) -> Tokenizer:
    """The tokenizer that the flags of the same names describe.

    vocab_size: needed by NullTokenizer, limits TikTokenizer; others have their own, which must equal it if
    given.
    Raises TokenizerError naming the flags, and MissingPackageError naming the pip line of a missing extra.
    """
    tokenizer = _build(
        tokenizer_type,
        tokenizer_model,
        vocab_file,
        merge_file,
        vocab_size,
        tiktoken_pattern,
        tiktoken_num_special_tokens,
        tiktoken_special_tokens,
    )
    if vocab_size is not None and tokenizer_type in FIXED_VOCABULARIES and tokenizer.vocab_size != vocab_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size}: {tokenizer_type} has {tokenizer.vocab_size} ids; "
            "leave --vocab-size out"
        )
    return tokenizer


def build_from_config(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration. Raises as `build_tokenizer`."""
    values = dataclasses.asdict(config)
    return build_tokenizer(values.pop("tokenizer_type"), **values)


def _build(
    tokenizer_type: str,
    tokenizer_model: str | None,
    vocab_file: str | None,
    merge_file: str | None,
    vocab_size: int | None,
    tiktoken_pattern: str | None,
    tiktoken_num_special_tokens: int,
    tiktoken_special_tokens: Sequence[str] | None,
) -> Tokenizer:
    match tokenizer_type:
        case "ByteTokenizer":
            return ByteTokenizer()
        case "NullTokenizer":
            if vocab_size is None:
                raise TokenizerError("--tokenizer-type NullTokenizer needs --vocab-size")
            return NullTokenizer(vocab_size)
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(vocab_file, merge_file)
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(tokenizer_model)
        case "SentencePieceTokenizer":
            return SentencePieceTokenizer(tokenizer_model)
        case "GPTSentencePieceTokenizer":
            return GPTSentencePieceTokenizer(tokenizer_model)
        case "Llama2Tokenizer":
            return Llama2Tokenizer(tokenizer_model)
        case "TikTokenizer":
            return TikTokenizer(
                tokenizer_model,
                pattern=tiktoken_pattern,
                vocab_size=vocab_size,
                num_special_tokens=tiktoken_num_special_tokens,
                special_tokens=tiktoken_special_tokens,
            )
        case _:
            raise TokenizerError(
                f"--tokenizer-type {tokenizer_type}: choose one of {', '.join(TOKENIZER_TYPES)}"
            )
