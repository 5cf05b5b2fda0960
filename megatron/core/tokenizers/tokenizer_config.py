"""Which tokenizer, and its files (floor 0)."""

import dataclasses
from typing import Annotated, Literal

from megatron.core.config_base import Bounds, Ids, arg


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """One tokenizer."""

    tokenizer_type: (
        Literal[
            "ByteTokenizer",
            "NullTokenizer",
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
        ]
        | None
    ) = arg(
        None,
        "kind of tokenizer (ByteTokenizer is built in and needs no files)",
        derived="GPT2BPETokenizer with --vocab-file and --merge-file; NullTokenizer with --mock-data and --vocab-size, "
        "ByteTokenizer with --mock-data alone; else it must be given",
    )
    tokenizer_model: str | None = arg(None, "file or folder of the tokenizer")
    vocab_file: str | None = arg(None, "GPT-2 BPE vocabulary (vocab.json)")
    merge_file: str | None = arg(None, "GPT-2 BPE merges (merges.txt)")
    vocab_size: Ids | None = arg(
        None,
        "vocabulary of NullTokenizer (which adds one id, end of document), or to check others against",
        unit="ids",
    )
    tiktoken_pattern: Literal["v1", "v2"] | None = arg(
        None, "how TikTokenizer cuts text: v1, v2", derived="v1"
    )
    tiktoken_num_special_tokens: Annotated[int, Bounds(0, 2**20)] = arg(
        1000, "ids kept for special tokens by TikTokenizer", unit="ids"
    )
    tiktoken_special_tokens: tuple[str, ...] | None = arg(
        None, "special tokens of TikTokenizer, first ids first"
    )
