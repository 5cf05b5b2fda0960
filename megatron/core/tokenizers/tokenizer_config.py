"""Which tokenizer, and its files (floor 0)."""

import dataclasses
from typing import Annotated, Literal

from megatron.core.config_base import Bounds, Ids, arg

TIKTOKEN_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_WITH_TIKTOKEN = ("tokenizer_type", "TikTokenizer")


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
        weights=True,
    )
    tokenizer_model: str | None = arg(None, "file or folder of the tokenizer", from_checkpoint="unset")
    vocab_file: str | None = arg(None, "GPT-2 BPE vocabulary (vocab.json)", from_checkpoint="unset")
    merge_file: str | None = arg(None, "GPT-2 BPE merges (merges.txt)", from_checkpoint="unset")
    vocab_size: Ids | None = arg(
        None,
        "vocabulary of NullTokenizer (which adds one id, end of document), or to check others against",
        unit="ids",
        weights=("tokenizer_type", "NullTokenizer"),
    )
    tiktoken_pattern: Literal["v1", "v2"] = arg("v1", "how TikTokenizer cuts text", weights=_WITH_TIKTOKEN)
    tiktoken_num_special_tokens: Annotated[int, Bounds(0, 2**20)] = arg(
        1000,
        "ids kept for special tokens by TikTokenizer",
        unit="ids",
        weights=_WITH_TIKTOKEN,
    )
    tiktoken_special_tokens: tuple[str, ...] = arg(
        TIKTOKEN_SPECIAL_TOKENS, "special tokens of TikTokenizer, first ids first", weights=_WITH_TIKTOKEN
    )
