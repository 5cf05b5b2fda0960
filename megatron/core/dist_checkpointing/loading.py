"""Read a checkpoint: choose it together, check all of it, and only then write into any tensor.

Rank 0 chooses the directory (`catalog`), all ranks read its manifest. Names, shapes and dtypes are compared with what
this run holds, each file's SHA-256 is checked by one rank, and every rank hears of every other's findings before the
first value is applied. Each rank reads the parts of the saved chunks that make up its pieces, whatever their layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from megatron.core.dist_checkpointing.agree import step
from megatron.core.dist_checkpointing.catalog import Found, LoadChoice, OpenOther, choose, open_no_other
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, read_manifest
from megatron.core.dist_checkpointing.pieces import dtype_name, place_pieces
from megatron.core.dist_checkpointing.source import TensorSource, parts_of
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.dist_checkpointing.storage import Read, fill
from megatron.core.rectangles import Rectangle
from megatron.core.transport.parallel_state import ParallelState, single_process
from megatron.core.words import FIRST, first_of


def find(
    root: str | Path,
    ps: ParallelState | None = None,
    ckpt_step: int | None = None,
    open_other: OpenOther = open_no_other,
) -> LoadChoice:
    """The checkpoint to load from `root`, the same on every rank, or none: start from scratch.

    Communicates over the whole world. Raises CheckpointError on all ranks together (rules: `catalog.choose`).
    """
    choice, place, ps = LoadChoice(None, ()), None, ps or single_process()
    with step() as chosen:
        if ps.rank == 0:
            choice = choose(Path(root), ckpt_step, open_other)
            found = choice.found
            if found is not None:
                of_ours = found.described_in.name == MANIFEST_NAME
                place = [found.directory.name, found.iteration, found.manifest_sha256, of_ours]
            chosen.value = [place, list(choice.notes)]
    place, notes = chosen.gather(ps)[0]
    if place is None:
        return LoadChoice(None, tuple(notes))
    with step() as opened:
        if ps.rank != 0:
            name, iteration, digest, of_ours = place
            found = None if of_ours else open_other(Path(root), ckpt_step)
            if found is None:
                directory = Path(root) / name
                found = Found.of_ours(directory, iteration, *read_manifest(directory))
            if found.manifest_sha256 != digest:
                raise CheckpointError(
                    f"{found.described_in}: this rank reads SHA-256 {found.manifest_sha256}, rank 0 {digest}: "
                    f"--load must be one folder that all ranks see"
                )
            choice = LoadChoice(found, tuple(notes))
    opened.gather(ps)
    return choice


def load_pieces(
    source: TensorSource,
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
    check_pieces(source, pieces, ps, prefixes=prefixes, convert=convert)
    verify(source, ps)
    with step() as applied:
        fill(source.directory, planned_reads(source, pieces), follow=source.follows_links)
    applied.gather(ps)


def planned_reads(source: TensorSource, pieces: Iterable[LocalPiece]) -> Iterator[Read]:
    """What of which chunks makes up the pieces of this rank."""
    for piece in place_pieces(pieces).values():
        entry, box = source.tensors[piece.name], Rectangle(tuple(piece.offset), tuple(piece.tensor.shape))
        for chunk, inside, at in parts_of(entry, box):
            # Detached last: a rounded copy of main weights is read-only, and so is what is cut out of it.
            yield Read(chunk, entry.dtype, inside, piece.tensor[at.slices].detach())


def check_pieces(
    source: TensorSource,
    pieces: Sequence[LocalPiece],
    ps: ParallelState | None = None,
    *,
    prefixes: Sequence[str] = ("",),
    convert: bool = False,
) -> None:
    """Refuse a checkpoint that does not fit, as `load_pieces`, which has the same arguments; no value is read.

    Communicates over the whole world. Raises CheckpointError on all ranks together, naming all that does not fit.
    """
    with step() as compared:
        some = list(islice(_problems(source, pieces, convert), FIRST + 1))  # thousands of ranks tell theirs
        compared.value = sorted({piece.name for piece in pieces}), some
    told = compared.gather(ps)
    wanted = {name for names, _ in told for name in names}
    first: dict[str, int] = {}
    for rank, (_, own) in enumerate(told):
        first |= {problem: rank for problem in own if problem not in first}
    problems = [f"rank {rank}: {one}" if len(told) > 1 else one for one, rank in first.items()]
    if unused := [name for name in source.tensors.keys() - wanted if name.startswith(tuple(prefixes))]:
        problems.append(f"tensors that this run does not have: {first_of(sorted(unused))}")
    if problems:
        raise CheckpointError(f"{source.described_in}: {first_of(problems, '; ')}")


_FLOATING = {"F64", "F32", "BF16", "F16"}


def _problems(source: TensorSource, pieces: Sequence[LocalPiece], convert: bool) -> Iterator[str]:
    """Names, shapes and dtypes of this rank's pieces against the checkpoint's."""
    if missing := {piece.name for piece in pieces} - source.tensors.keys():
        yield f"tensors that this run needs are missing: {first_of(sorted(missing))}"
    for piece in {piece.name: piece for piece in pieces if piece.name not in missing}.values():
        saved, where = source.tensors[piece.name], f"tensor {piece.name}"
        if saved.shape != tuple(piece.global_shape):
            yield f"{where}: expected shape {tuple(piece.global_shape)}, found {saved.shape}"
        dtype = dtype_name(piece.tensor.dtype)
        if saved.dtype != dtype and not (convert and {saved.dtype, dtype} <= _FLOATING):
            yield (
                f"{where}: expected dtype {dtype}, found {saved.dtype} (saved in another precision: give the same of "
                f"--bf16, --fp16, --fp64, or start from its weights alone with --finetune)"
            )


def verify(source: TensorSource, ps: ParallelState | None = None) -> None:
    """Check every file, each by one rank: of our checkpoints SHA-256 and header.

    Communicates over the whole world; raises CheckpointError on all ranks together, naming the file.
    """
    ps = ps or single_process()
    with step() as verified:
        for name in sorted(source.files)[ps.rank :: ps.world_size]:
            source.verify_file(name)
    verified.gather(ps)
