"""Read a checkpoint: choose it together, check all of it, and only then write into any tensor.

Rank 0 chooses the directory (`catalog`), all ranks read its manifest. Names, shapes and dtypes are compared with what
this run holds, each file's SHA-256 is checked by one rank, and every rank hears of every other's findings before the
first value is applied. Resharding is DCP's: each rank reads the parts of the saved chunks that make up its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing import safetensors_format as safetensors
from megatron.core.dist_checkpointing.agree import step
from megatron.core.dist_checkpointing.catalog import Found, LoadChoice, choose
from megatron.core.dist_checkpointing.files import CheckpointError, open_regular, read_exactly, sha256_of
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatron.core.dist_checkpointing.planning import PieceLoadPlanner, dtype_name
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.dist_checkpointing.storage import SafeStorageReader
from megatron.core.transport.parallel_state import ParallelState, single_process

_SHOWN = 8  # names that a message lists before it says how many more


def find(root: str | Path, ps: ParallelState | None = None, ckpt_step: int | None = None) -> LoadChoice:
    """The checkpoint to load from `root`, the same on every rank, or none: start from scratch.

    Communicates over the whole world. Raises CheckpointError on all ranks together (rules: `catalog.choose`).
    """
    choice, ps = LoadChoice(None, ()), ps or single_process()
    with step() as chosen:
        if ps.rank == 0:
            choice = choose(Path(root), ckpt_step)
            found = choice.found
            place = None if found is None else [found.directory.name, found.iteration, found.manifest_sha256]
            chosen.value = [place, list(choice.notes)]
    place, notes = chosen.gather(ps)[0]
    if place is None:
        return LoadChoice(None, tuple(notes))
    with step() as opened:
        if ps.rank != 0:
            name, iteration, digest = place
            directory = Path(root) / name
            manifest, own_digest = read_manifest(directory)
            if own_digest != digest:
                raise CheckpointError(
                    f"{directory / MANIFEST_NAME}: this rank reads SHA-256 {own_digest}, rank 0 {digest}: "
                    f"--load must be one folder that all ranks see"
                )
            choice = LoadChoice(Found(directory, iteration, manifest, digest), tuple(notes))
    opened.gather(ps)
    return choice


def load_pieces(
    found: Found,
    pieces: Sequence[LocalPiece],
    ps: ParallelState | None = None,
    *,
    prefixes: Sequence[str] = ("",),
    convert: bool = False,
) -> None:
    """Fill the pieces' tensors, in place, bit for bit.

    convert: a tensor saved in another floating dtype is rounded or widened into the piece's, instead of refused.
    prefixes: the names that must be used up; a tensor of the checkpoint under one of them that no rank holds
    is an error, all others are left alone (`("model.",)`: weights without the optimizer).

    Communicates over the whole world. Raises CheckpointError on all ranks together, before any tensor is
    touched unless a file becomes unreadable between check and use.
    """
    with step() as compared:
        _compare(found, pieces, convert)
        compared.value = sorted({piece.name for piece in pieces})
    wanted = {name for names in compared.gather(ps) for name in names}
    unused = [name for name in found.manifest.tensors.keys() - wanted if name.startswith(tuple(prefixes))]
    if unused:
        path = found.directory / MANIFEST_NAME
        raise CheckpointError(f"{path}: tensors that this run does not have: {_listed(unused)}")
    verify(found, ps)
    with step() as applied:  # DCP's local plan over our storage: each rank reads what it needs
        reader, planner = SafeStorageReader(found.directory, found.manifest), PieceLoadPlanner(pieces)
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
    applied.gather(ps)


_FLOATING = {"F64", "F32", "BF16", "F16"}


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (
        f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    )


def _compare(found: Found, pieces: Sequence[LocalPiece], convert: bool) -> None:
    """Names, shapes and dtypes of this rank's pieces against the manifest."""
    path = found.directory / MANIFEST_NAME
    if missing := {piece.name for piece in pieces} - found.manifest.tensors.keys():
        raise CheckpointError(f"{path}: tensors that this run needs are missing: {_listed(missing)}")
    for piece in pieces:
        saved, where = found.manifest.tensors[piece.name], f"{path}: tensor {piece.name}"
        if saved.shape != tuple(piece.global_shape):
            raise CheckpointError(f"{where}: expected shape {tuple(piece.global_shape)}, found {saved.shape}")
        dtype = dtype_name(piece.tensor.dtype)
        if saved.dtype != dtype and not (convert and {saved.dtype, dtype} <= _FLOATING):
            raise CheckpointError(
                f"{where}: expected dtype {dtype}, found {saved.dtype} (saved in another precision: give the same of "
                f"--bf16, --fp16, --fp64, or start from its weights alone with --finetune)"
            )


def verify(found: Found, ps: ParallelState | None = None) -> None:
    """Check every file's SHA-256 and header, each by one rank.

    Communicates over the whole world; raises CheckpointError on all ranks together, naming the file.
    """
    ps = ps or single_process()
    with step() as verified:
        for name in sorted(found.manifest.files)[ps.rank :: ps.world_size]:
            verify_file(found.directory, found.manifest, name)
    verified.gather(ps)


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
