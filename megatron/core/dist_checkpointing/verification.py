"""A file of a checkpoint against its manifest: SHA-256, and its own header (floor 0)."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import safetensors_format as safetensors
from megatron.core.dist_checkpointing.files import CheckpointError, open_regular, read_exactly, sha256_of
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest


def verify_file(directory: Path, manifest: Manifest, name: str) -> None:
    """Check one file; CheckpointError says what was expected and what was found."""
    entry, path = manifest.files[name], directory / name
    with open_regular(path) as fd:
        found = sha256_of(fd, path, entry.bytes)
        if found != entry.sha256:
            raise CheckpointError(f"{path}: SHA-256 is {found}, expected {entry.sha256}")
        _check_header(fd, path, manifest, name)


def _check_header(fd: int, path: Path, manifest: Manifest, name: str) -> None:
    """The file's own header must be, byte for byte, the one that follows from the manifest."""
    placed = [
        (safetensors.StoredTensor(chunk.key, tensor.dtype, chunk.shape), chunk.begin)
        for tensor in manifest.tensors.values()
        for chunk in tensor.chunks
        if chunk.file == name
    ]
    placed.sort(key=lambda pair: pair[0].rank)
    if len({stored.key for stored, _ in placed}) != len(placed):
        raise CheckpointError(f"{path}: {MANIFEST_NAME} lists two chunks under one key")
    expected, places = safetensors.build_header([stored for stored, _ in placed])
    prefix = bytes(read_exactly(fd, path, 0, safetensors.LENGTH_BYTES))
    try:
        length = safetensors.header_length(prefix, manifest.files[name].bytes)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if safetensors.LENGTH_BYTES + length != len(expected) or places[:-1] != [begin for _, begin in placed]:
        raise CheckpointError(f"{path}: header and {MANIFEST_NAME} disagree about where tensors begin")
    if bytes(read_exactly(fd, path, 0, len(expected))) != expected:
        raise CheckpointError(f"{path}: header and {MANIFEST_NAME} disagree about keys, dtypes or shapes")
