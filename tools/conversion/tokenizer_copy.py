"""Files of a tokenizer, and of how a model is sampled from, taken from one folder into another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.files import CheckpointError, named_errors
from megatron.core.safe_files import published, read_bytes
from megatron.core.words import size_text
from megatron.interchange.tokenizer_files import COPIED

BESIDE = "hugging_face"  # the folder of such files beside checkpoints of ours
_MAX_COPIED_BYTES = 256 << 20


def tokenizer_files(folder: Path) -> list[Path]:
    """Those of a folder. Raises CheckpointError for one that is too large to be copied."""
    there = [folder / name for name in COPIED if (folder / name).is_file()]
    for path in there:
        if (size := path.stat().st_size) > _MAX_COPIED_BYTES:
            most = size_text(_MAX_COPIED_BYTES)
            raise CheckpointError(f"{path}: {size_text(size)}; at most {most} are read of a tokenizer's file")
    return there


def copy_tokenizer(files: Sequence[Path], into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for path in files:
        with named_errors(path), published(into / path.name) as file:
            file.write(read_bytes(path, max_bytes=_MAX_COPIED_BYTES, follow=True))
