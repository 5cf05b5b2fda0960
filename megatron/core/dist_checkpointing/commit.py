"""How a written directory becomes a checkpoint, and how old ones go (floor 0). One process does this: rank 0.

[Note: commit protocol] Every rank has written and fsynced its files in `iter_N.tmp-<tag>/`. Then, in this
order: manifest.json, fsync of file and directory; a directory already named `iter_N` is renamed away; the new
one is renamed to `iter_N`; fsync of the folder; the tracker is replaced by a temporary file + rename; only
now anything old is removed. Whatever instant the process is killed at, the folder holds the old checkpoint or
the new one, whole.

[Note: what a save may replace] A save of an iteration that exists replaces it only if the run owns it: it wrote it,
goes on from it or a later one, or was told to go back with --ckpt-step. The replaced directory is removed last, and
until then `catalog` loads it if the new one has not taken its place. Any other whole checkpoint in the way is renamed
to `iter_N.kept-<tag>`, a damaged one to `iter_N.damaged-<tag>`, and neither is ever removed. A manifest of the same
bytes is the same checkpoint, and may go. `--save-retain-interval` gives up checkpoints that the run owns, no others.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.catalog import CheckpointKind, directory_name
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.safe_files import publish_text, remove_leftovers, sync_directory

KEEP_NEWEST = 2  # committed checkpoints that retention never touches


def clean(root: Path) -> list[str]:
    """Remove what killed saves left behind, and put a replaced checkpoint back that nothing replaced.

    Two runs must not save into one folder at once: this would remove the other's unfinished save
    (training/guard/lease.py sees to it). Returns log lines.
    """
    entries = catalog.list_entries(root)
    committed = {entry.iteration for entry in entries if entry.kind is CheckpointKind.COMMITTED}
    notes = []
    for iteration, path, kind in entries:
        if kind is CheckpointKind.REPLACED and iteration not in committed:
            back = root / directory_name(iteration)
            os.rename(path, back)
            sync_directory(root)
            committed.add(iteration)
            notes.append(f"put {back} back: the save replacing it was not finished")
        elif kind in (CheckpointKind.TEMPORARY, CheckpointKind.REPLACED, CheckpointKind.TRASH):
            shutil.rmtree(path)
            notes.append(f"removed {path}, left by a save that was not finished")
    remove_leftovers(root / catalog.TRACKER_NAME)
    for path in root.glob(f"{catalog.TRACKER_NAME}.tmp-*"):  # as they were named before
        os.unlink(path)
    return notes


def commit(temporary: Path, root: Path, iteration: int, *, may_replace: bool = True) -> list[str]:
    """Make a written directory with its manifest the checkpoint of `iteration`. Returns log lines.

    may_replace: whether a whole checkpoint of that iteration goes; else it is kept under another name.
    """
    final, notes, kind = root / directory_name(iteration), [], None
    sync_directory(temporary)
    if final.is_symlink() or final.exists():
        kind, why = _fate(final, temporary, iteration, may_replace)
        aside = root / directory_name(iteration, kind, temporary.name.rpartition("-")[2])
        os.rename(final, aside)
        if kind is not CheckpointKind.REPLACED:
            notes.append(f"{final} {why}: put aside as {aside}")
    os.rename(temporary, final)
    sync_directory(root)
    publish_text(root / catalog.TRACKER_NAME, str(iteration))  # no newline: as Megatron
    sync_directory(root)
    if kind is CheckpointKind.REPLACED:
        notes += _remove(aside)
    return notes


def _fate(final: Path, temporary: Path, iteration: int, may_replace: bool) -> tuple[CheckpointKind, str]:
    """What becomes of a directory that is in the way of a new one, and why it is kept."""
    if final.is_symlink() or not (final / MANIFEST_NAME).exists():
        return CheckpointKind.KEPT, "was not written by this project"
    try:
        there = catalog.open_directory(final, iteration)
    except CheckpointError as error:
        return CheckpointKind.DAMAGED, f"is damaged ({error})"
    same = hashlib.sha256((temporary / MANIFEST_NAME).read_bytes()).hexdigest() == there.manifest_sha256
    if may_replace or same:
        return CheckpointKind.REPLACED, ""
    told = "is a whole checkpoint that this run neither goes on from nor was told to replace"
    return CheckpointKind.KEPT, told


def to_remove(iterations: Sequence[int], newest: int, retain_interval: int) -> list[int]:
    """The iterations that `--save-retain-interval` gives up once `newest` is committed (pure).

    Multiples of the interval stay, so do the newest two, so does everything beyond `newest` (left by a run
    that went back to an older checkpoint).
    """
    assert retain_interval > 0, f"retain_interval {retain_interval}"
    past = sorted(iteration for iteration in iterations if iteration <= newest)
    return [iteration for iteration in past[:-KEEP_NEWEST] if iteration % retain_interval != 0]


def retain(root: Path, newest: int, retain_interval: int, owned: Collection[int] | None = None) -> list[str]:
    """Remove checkpoints that are given up; only ours, only while two whole ones stay. Returns log lines.

    owned: the iterations that the run may remove; None: all.
    """
    ours = {
        iteration: path
        for iteration, path, kind in catalog.list_entries(root)
        if kind is CheckpointKind.COMMITTED
        and (path / MANIFEST_NAME).exists()
        and (owned is None or iteration in owned)
    }
    given_up = to_remove(list(ours), newest, retain_interval)
    if not given_up:
        return []
    staying = sorted(iteration for iteration in ours if iteration <= newest)[-KEEP_NEWEST:]
    try:
        for iteration in staying:
            catalog.open_directory(ours[iteration], iteration)
    except CheckpointError as error:
        return [f"nothing removed (--save-retain-interval {retain_interval}): {error}"]
    notes = []
    for iteration in given_up:
        trash = root / directory_name(iteration, CheckpointKind.TRASH, secrets.token_hex(4))
        os.rename(ours[iteration], trash)
        notes += [f"removed {ours[iteration]} (--save-retain-interval {retain_interval})", *_remove(trash)]
    return notes


def _remove(path: Path) -> list[str]:
    """A checkpoint is committed by now: what cannot be removed is told, not fatal."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        return [f"could not remove {path}: {error.strerror}"]
    return []
