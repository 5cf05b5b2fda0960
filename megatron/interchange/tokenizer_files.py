"""Which files of a Hugging Face folder are its tokenizer, and the flags that name them (floor 0)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# With what says how a model is sampled from: it is no use without them.
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
        "config.json",
    ),
)


def tokenizer_flags(folder: Path) -> dict[str, Any]:
    """Our fields for the tokenizer of a folder; none where it has none."""
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    if (folder / "tokenizer.model").is_file():
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(folder / "tokenizer.model")}
    return {}
