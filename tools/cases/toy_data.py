"""Data for cases that name none: what stands at ${DATA_PATH} of Megatron-LM's CI, of some thousand words."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from megatron.core import safe_files
from tools.cases.case import ROOT

PLACES = ("text/the_pile/shard00", "text/common_pile/v01_filtered_data")
_SEED, _DOCUMENTS, _WORDS = 1234, 2000, 24
_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ri", "sa", "tu")
_MERGES = ("b a", "d e", "k i", "l o", "m u", "n a", "p o", "r i", "s a", "t u")


def make_toy_data(folder: Path) -> None:
    """A corpus `my-gpt3_00_text_document` with `bpe/vocab.json` and `bpe/merges.txt`, here and at PLACES: the same
    bytes always. Does nothing where it is there."""
    if folder.exists():
        return
    made = folder.with_name(folder.name + ".new")
    shutil.rmtree(made, ignore_errors=True)  # of a tool that was interrupted
    (made / "bpe").mkdir(parents=True)
    # GPT-2's letters for bytes, as far as this text has them, a few pairs, and the end of a document.
    tokens = [
        *map(chr, range(33, 127)),
        "\u0120",
        *(pair.replace(" ", "") for pair in _MERGES),
        "<|endoftext|>",
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    safe_files.publish_text(made / "bpe" / "vocab.json", json.dumps(vocabulary))
    safe_files.publish_text(made / "bpe" / "merges.txt", "\n".join(["#version: 0.2", *_MERGES, ""]))
    draw = random.Random(_SEED)
    with safe_files.published(made / "text.jsonl") as file:
        for _ in range(_DOCUMENTS):
            words = (
                "".join(draw.choices(_SYLLABLES, range(10, 0, -1), k=draw.randint(1, 3)))
                for _ in range(_WORDS)
            )
            file.write((json.dumps({"text": " ".join(words)}) + "\n").encode())
    flags = ["--input", "text.jsonl", "--output-prefix", "my-gpt3_00", "--append-eod", "--workers", "1"]
    tokenizer = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        "bpe/vocab.json",
        "--merge-file",
        "bpe/merges.txt",
    ]
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *flags, *tokenizer]
    subprocess.run(command, cwd=made, check=True, stdout=subprocess.DEVNULL)
    for place in PLACES:
        link = made / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * place.count("/")))
    made.rename(folder)
