"""A checkpoint of ours as it is read for an export, whatever the format."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.safe_files import sync_directory
from megatron.training.config.saved_config import MODEL_PREFIX
from tools.conversion.incoming import fingerprint, removed_if_refused, verify_files
from tools.conversion.source_reader import SourceReader

MAIN = "optimizer.main_weight."


def refuse_existing(folder: Path) -> None:
    """Raises CheckpointError where something is at the place of a result."""
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder}: there already: name another folder")


@contextlib.contextmanager
def exported(found: Found, folder: Path, *facts: Any) -> Iterator[tuple[Path, SourceReader]]:
    """Where the result is made, which becomes `folder` at the end by one rename, and the checkpoint's tensors, whose
    files are verified meanwhile. facts: what the result depends on besides; a killed call goes on where it was.

    Raises CheckpointError, also where the checkpoint is removed or replaced before the end.
    """
    tag = fingerprint(found.manifest_sha256, *facts)
    temporary = folder.with_name(f".{folder.name}.{tag}.tmp")
    with _still_there(found, temporary), SourceReader(found) as reader, ThreadPoolExecutor(1) as beside:
        verified = beside.submit(verify_files, found)
        yield temporary, reader
        with removed_if_refused(temporary):
            verified.result()
    sync_directory(temporary)
    os.rename(temporary, folder)
    sync_directory(folder.parent)


@contextlib.contextmanager
def _still_there(found: Found, temporary: Path) -> Iterator[None]:
    """A run that goes on may remove the checkpoint, or save its iteration again, while it is read."""
    failure: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as error:
        failure = error
    try:
        same = read_manifest(found.directory)[1] == found.manifest_sha256
    except CheckpointError:
        same = False
    if not same:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{found.directory}: removed or replaced while it was read, as a run does that goes on (see "
            "--save-retain-interval): call again, which takes the newest, or name one that stays by --ckpt-step"
        ) from failure
    if failure is not None:
        raise failure


def stored_name(found: Found, name: str, dtype: str | None) -> str:
    """Main weights are what 16-bit weights are rounded from."""
    main = MAIN + name
    return main if dtype == "float32" and main in found.tensors else MODEL_PREFIX + name
