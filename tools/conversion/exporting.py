"""What exports of a checkpoint of ours share, whatever the format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.safe_files import sync_directory
from megatron.training.config.saved_config import MODEL_PREFIX
from tools.conversion.source_reader import SourceReader, fingerprint, reading

MAIN = "optimizer.main_weight."


def refuse_existing(folder: Path) -> None:
    """Raises CheckpointError where something is at the place of a result."""
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder}: there already: name another folder")


@contextlib.contextmanager
def exported(found: Found, folder: Path, *facts: Any) -> Iterator[tuple[Path, SourceReader]]:
    """Where the result is made, which becomes `folder` at the end by one rename, and the checkpoint's tensors. facts:
    what the result depends on besides; a killed call goes on where it was. Raises CheckpointError, as `reading`."""
    temporary = folder.with_name(f".{folder.name}.{fingerprint(found, *facts)}.tmp")
    with reading(found, temporary) as reader:
        yield temporary, reader
    sync_directory(temporary)
    os.rename(temporary, folder)
    sync_directory(folder.parent)


def stored_name(found: Found, name: str, dtype: str | None) -> str:
    """Main weights are what 16-bit weights are rounded from."""
    main = MAIN + name
    return main if dtype == "float32" and main in found.tensors else MODEL_PREFIX + name
