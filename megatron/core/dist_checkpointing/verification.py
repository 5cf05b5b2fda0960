"""A file of a checkpoint against its manifest: SHA-256, and its own header (floor 0)."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.dist_checkpointing.files import CheckpointError, open_regular, read_exactly, sha256_of
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest
from megatron.core.dist_checkpointing.safetensors_format import (
    LENGTH_BYTES,
    StoredArray,
    header_length,
    parse_header,
)


def verify_file(directory: Path, manifest: Manifest, name: str) -> None:
    """Check one file; CheckpointError says what was expected and what was found."""
    entry, path = manifest.files[name], directory / name
    with open_regular(path) as fd:
        found = sha256_of(fd, path, entry.bytes)
    if found != entry.sha256:
        raise CheckpointError(f"{path}: SHA-256 is {found}, expected {entry.sha256}")
    stated = [
        (chunk.key, StoredArray(tensor.dtype, chunk.shape, chunk.begin))
        for tensor in manifest.tensors.values()
        for chunk in tensor.chunks
        if chunk.file == name
    ]
    if sorted(read_header(path).items()) != sorted(stated):
        raise CheckpointError(f"{path}: header and {MANIFEST_NAME} disagree about the tensors in it")


def read_header(path: Path, *, follow: bool = False) -> dict[str, StoredArray]:
    """The arrays that a safetensors file lists, by their names. Raises CheckpointError where it cannot be true."""
    with open_regular(path, follow=follow) as fd:
        file_bytes = os.fstat(fd).st_size
        try:
            length = header_length(read_exactly(fd, path, 0, LENGTH_BYTES), file_bytes)
            return parse_header(read_exactly(fd, path, LENGTH_BYTES, length), file_bytes)
        except CheckpointError:
            raise
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: {error}") from None
