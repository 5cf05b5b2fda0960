"""Which checkpoints a folder holds, and which one to load (floor 0; reads only).

    ROOT/latest_checkpointed_iteration.txt  the tracker: the newest iteration, a hint
    ROOT/iter_0000123/                      a committed checkpoint
    ROOT/iter_0000123.tmp-1f2e3d4c/         a save that has not finished: never loaded
    ROOT/iter_0000123.old-1f2e3d4c/         committed, being replaced by a new save of its iteration
    ROOT/iter_0000123.trash-1f2e3d4c/       being removed
    ROOT/iter_0000123.kept-1f2e3d4c/        not this run's, put out of the way of a save and never removed
    ROOT/iter_0000123.damaged-1f2e3d4c/     the same of a damaged one
    ROOT/lease.json                         who writes here now (training/guard/lease.py)

A directory becomes `iter_N` by one rename, with everything in it durable. So a damaged `iter_N` is not the
rest of a save that was killed but a fault of storage or of somebody's hand, and going on from an older one
would lose work unasked: it is refused, and the message says how to choose the older one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.files import CheckpointError, named_errors, open_regular
from megatron.core.dist_checkpointing.foreign import describe_file, names_in, recognise
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatron.core.dist_checkpointing.source import SourceTensor
from megatron.core.dist_checkpointing.verification import verify_file
from megatron.core.safe_files import read_bytes
from megatron.core.schema import Place
from megatron.core.words import first_of, printable, printable_json

TRACKER_NAME = "latest_checkpointed_iteration.txt"
LEASE_FILE = "lease.json"
CONSOLE_FILE = "console.log"  # what a run that is shown on a terminal writes in full
MAX_TRACKER_BYTES = 64
_NAME = re.compile(r"iter_([0-9]{7,12})(?:\.(tmp|old|trash|kept|damaged)-([0-9a-f]{1,32}))?")


class CheckpointKind(Enum):
    """What a directory of the folder is; values are the suffixes."""

    COMMITTED = None
    TEMPORARY = "tmp"
    REPLACED = "old"
    TRASH = "trash"
    KEPT = "kept"
    DAMAGED = "damaged"


class IterationFolder(NamedTuple):
    """One directory of the folder."""

    iteration: int
    path: Path
    kind: CheckpointKind


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint whose manifest parses and whose files have the right sizes (digests: `verify_file`), as a
    `TensorSource`."""

    directory: Path
    iteration: int
    manifest: Manifest
    manifest_sha256: str
    described_in: Path
    tensors: Mapping[str, SourceTensor]
    files: Collection[str]
    verify_file: Callable[[str], None]
    follows_links: bool

    @staticmethod
    def of_ours(directory: Path, iteration: int, manifest: Manifest, manifest_sha256: str) -> Found:
        stated, verify = directory / MANIFEST_NAME, functools.partial(verify_file, directory, manifest)
        own = stated, manifest.tensors, manifest.files, verify, False
        return Found(directory, iteration, manifest, manifest_sha256, *own)

    def place(self, where: str = "") -> Place:
        """A field of its manifest, for messages."""
        return Place(self.described_in, where, CheckpointError)


OpenOther = Callable[[Path, int | None], Found | None]


def open_no_other(root: Path, ckpt_step: int | None) -> Found | None:
    """Of formats of others none is read."""
    return None


@dataclasses.dataclass(frozen=True)
class LoadChoice:
    """What to load, or None: start from scratch. notes: why, one line each, for the log."""

    found: Found | None
    notes: tuple[str, ...]


def directory_name(iteration: int, kind: CheckpointKind = CheckpointKind.COMMITTED, tag: str = "") -> str:
    """`iter_0000123`, or with the suffix of a kind: `iter_0000123.tmp-1f2e3d4c`."""
    name = f"iter_{iteration:07d}"
    return name if kind is CheckpointKind.COMMITTED else f"{name}.{kind.value}-{tag}"


def list_entries(root: Path) -> list[IterationFolder]:
    """Every directory of the folder that follows the naming, by iteration. A missing folder has none."""
    with named_errors(root):
        names = os.listdir(root) if _is_folder(root) else []
    matches = filter(None, map(_NAME.fullmatch, names))
    return sorted(IterationFolder(int(one[1]), root / one[0], CheckpointKind(one[2])) for one in matches)


def _is_folder(path: Path) -> bool:
    """False where nothing is. Raises CheckpointError saying what is there instead of a folder, and OSError."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path}: a link to {os.readlink(path)}, which is missing") from None
        return False
    except ValueError as error:  # a name that no file can have
        raise CheckpointError(f"{str(path)!r}: names no folder: {error}") from None
    if not stat.S_ISDIR(mode):
        what = describe_file(path, mode)
        raise CheckpointError(f"{path}: not a directory but {what}; --save and --load name folders")
    return True


def candidates(entries: Sequence[IterationFolder]) -> dict[int, Path]:
    """Directory to load for each iteration. A replaced one counts only while nothing has taken its place."""
    replaced = {iteration: path for iteration, path, kind in entries if kind is CheckpointKind.REPLACED}
    return replaced | {number: path for number, path, kind in entries if kind is CheckpointKind.COMMITTED}


def read_tracker(root: Path) -> int | str | None:
    """The iteration it names; None without a tracker; a text saying what is wrong with it otherwise."""
    path = root / TRACKER_NAME
    try:
        raw = read_bytes(path, max_bytes=MAX_TRACKER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}, expected a file with one iteration number"
    text = raw.decode("utf-8", "backslashreplace").strip()
    if not re.fullmatch(r"[0-9]{1,12}", text):
        return f"{path}: expected an iteration number, found {text!r}"
    return int(text)


def open_directory(directory: Path, iteration: int) -> Found:
    """Check manifest, names and sizes; CheckpointError names the file and what was expected."""
    stated = directory / MANIFEST_NAME
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory (links are refused)")
    if not stated.exists():
        raise CheckpointError(f"{stated}: missing: not a checkpoint of ours, or no longer a whole one")
    manifest, digest = read_manifest(directory)
    if manifest.iteration != iteration:
        Place(stated, "iteration", CheckpointError).fail(f"{iteration} as in the name", manifest.iteration)
    for name, entry in manifest.files.items():
        path = directory / name
        with open_regular(path) as fd:
            size = os.fstat(fd).st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {entry.bytes}")
    listed = {MANIFEST_NAME, *manifest.files}
    for path in sorted(directory.iterdir()):
        if path.name not in listed and not path.name.startswith("."):  # file systems leave hidden files
            raise CheckpointError(f"{path}: not listed in {MANIFEST_NAME}; a checkpoint holds nothing else")
    return Found.of_ours(directory, iteration, manifest, digest)


def choose(root: Path, ckpt_step: int | None = None, open_other: OpenOther = open_no_other) -> LoadChoice:
    """What `--load ROOT` loads. open_other(root, ckpt_step): the checkpoint of another format that the folder is.

    With `ckpt_step`: that one. Else the one the tracker names. Where that directory is gone, or the tracker
    says nothing: the newest valid one not newer than the tracker, else the newest valid one. A folder without
    tracker and without `iter_*`: nothing. Raises CheckpointError when `ckpt_step` or the tracker's directory
    is damaged or `ckpt_step` missing, when there is something but nothing valid, and as `check_loadable`.
    """
    with named_errors(root):
        if not holds_ours(root) and (other := open_other(root, ckpt_step)) is not None:
            return LoadChoice(other, ())
        there = _ours(root)
        tracker = read_tracker(root)
        if ckpt_step is not None:
            if ckpt_step not in there:
                known = f"(iterations there: {', '.join(map(str, sorted(there))) or 'none'})"
                told = f"missing: --ckpt-step {ckpt_step} is not in {root} {known}"
                raise CheckpointError(f"{root / directory_name(ckpt_step)}: {told}")
            found = open_directory(there[ckpt_step], ckpt_step)
            return LoadChoice(found, (f"loading iteration {ckpt_step} (--ckpt-step)",))
        if isinstance(tracker, int) and tracker in there:
            return LoadChoice(_open_tracked(there, tracker), ())
        if not there and tracker is None:
            return LoadChoice(None, (_nothing_in(root),))
        return _newest_valid(root, there, tracker)


def check_loadable(load: str, *, needed_by: str | None = None) -> None:
    """What can be told of a folder without reading a checkpoint: before a launch, on every rank.

    needed_by: the flag that says that there is something to load. Raises CheckpointError for a folder of another format
    (it says of which), for what is no folder or cannot be read, and where there is nothing although a flag needs it.
    """
    root = Path(load)
    with named_errors(root):
        if not _ours(root) and needed_by is not None and read_tracker(root) is None:
            raise CheckpointError(nothing_for(needed_by, _nothing_in(root)))


def nothing_for(flag: str, why: str) -> str:
    """The message where a flag needs a checkpoint. why: there is none."""
    return f"{why}; {flag} needs one: give --load the folder that a run has saved to, or leave {flag} out"


def holds_ours(root: Path) -> bool:
    """Whether it is a folder of checkpoints of ours, or there is none, or it is one of them. Such go before others'."""
    there = candidates(list_entries(root)).values()
    return not root.exists() or any((path / MANIFEST_NAME).exists() for path in (root, *there))


def holds_any(root: Path) -> bool:
    """Whether anything is there that `choose` loads, or refuses to."""
    begun = bool(candidates(list_entries(root))) or read_tracker(root) is not None
    return begun or (root.exists() and (holds_ours(root) or recognise(root) is not None))


def _ours(root: Path) -> dict[int, Path]:
    """`candidates`. Raises CheckpointError for the checkpoints of others."""
    there = candidates(list_entries(root))
    if (root / MANIFEST_NAME).exists():
        if (match := _NAME.fullmatch(root.name)) is not None and match[2] is None:
            how = f"--load {root.parent} --ckpt-step {int(match[1])} loads it"
            raise CheckpointError(f"{root}: one checkpoint and not the folder of them: {how}")
        raise CheckpointError(
            f"{root}: one checkpoint ({MANIFEST_NAME}) and not a folder of them: move it to DIR/iter_NNNNNNN, the "
            f"number being field 'iteration' of its {MANIFEST_NAME}, and give --load DIR"
        )
    if not holds_ours(root) and (what := recognise(root)) is not None:
        told = f"{min(there.values()) / MANIFEST_NAME}: missing: not a" if there else f"{root}: no"
        raise CheckpointError(f"{told} checkpoint of ours but {what}; {what.fix}")
    return there


def _nothing_in(root: Path) -> str:
    """Why a run starts from scratch, and what is there instead of checkpoints."""
    if not root.exists():
        return f"no checkpoint in {root}: there is no such folder"
    # What this run has put there, and hidden names, say nothing of what the folder was meant for.
    own = (LEASE_FILE, CONSOLE_FILE)
    names = [name for name in names_in(root) if name not in own and not name.startswith(".")]
    holds = f"; it holds {first_of([*map(ascii, names)])}" if names else ""
    return f"no checkpoint in {root}: no {TRACKER_NAME}, no iter_*{holds}"


def _open_tracked(there: dict[int, Path], tracker: int) -> Found:
    found = _try_open(there[tracker], tracker)
    if isinstance(found, Found):
        return found
    for iteration in sorted(there.keys() - {tracker}, reverse=True):
        if isinstance(_try_open(there[iteration], iteration), Found):
            told = f"Iteration {iteration} is whole: --ckpt-step {iteration} goes on from there"
            raise CheckpointError(f"{found}. {told}")
    raise CheckpointError(found)


def _newest_valid(root: Path, there: dict[int, Path], tracker: int | str | None) -> LoadChoice:
    """The tracker is of no use: take the newest valid directory not beyond it, else the newest valid one."""
    hint, notes = max(there, default=0), [str(tracker or f"{root / TRACKER_NAME} is missing")]
    if isinstance(tracker, int):
        told = f"names iteration {tracker}, but {root / directory_name(tracker)} is missing"
        hint, notes = tracker, [f"{root / TRACKER_NAME} {told}"]
    for iteration in sorted(there, key=lambda it: (it <= hint, it), reverse=True):
        found = _try_open(there[iteration], iteration)
        if isinstance(found, Found):
            notes.append(f"loading iteration {iteration}, the newest valid one of {root}")
            return LoadChoice(found, tuple(notes))
        notes.append(found)
    raise CheckpointError("; ".join([*notes, f"no valid checkpoint in {root}"]))


def _try_open(directory: Path, iteration: int) -> Found | str:
    try:
        return open_directory(directory, iteration)
    except CheckpointError as error:
        return str(error)


CheckConfig = Callable[[Found, dict[str, Any]], None]


def config_of(found: Found, check_config: CheckConfig | None = None) -> dict[str, Any]:
    """The flat configuration that a checkpoint was saved with, its texts printable, since they come to be shown."""
    config = found.manifest.common.get("config")
    if not isinstance(config, dict):
        found.place("common.config").fail("an object", config)
    if check_config is not None:
        check_config(found, config)
    return {printable(name): printable_json(value) for name, value in config.items()}
