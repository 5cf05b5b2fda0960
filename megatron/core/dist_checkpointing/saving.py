"""Write a checkpoint: plan together, write alone, commit together.

`save` does all three at once. A `PendingSave` does the first when it is made; its `write` needs no other rank, and its
`commit` makes the directory a checkpoint. An `AsyncSaver` writes in the background: training stands still only while
tensors are copied to host memory.

A thread writes, not a process: forking is unsafe once CUDA or gloo have threads, spawning would copy the
state a second time, and file writes, fsync and SHA-256 all release the GIL. The thread talks to nobody; what
needs all ranks (the manifest, the rename) happens in the main thread, at a step where every rank's thread has
finished, which the ranks agree on in `maybe_finalize`. One save at a time: the next one waits, and says so.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from megatron import __version__
from megatron.core.dist_checkpointing import commit, manifest, shard_files, storage
from megatron.core.dist_checkpointing.agree import Outcome, step
from megatron.core.dist_checkpointing.catalog import CheckpointKind, directory_name
from megatron.core.dist_checkpointing.files import DIRECTORY_MODE, CheckpointError, write_file
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, FileEntry, Manifest, canonical
from megatron.core.dist_checkpointing.pieces import PlanCache, place_pieces
from megatron.core.dist_checkpointing.planning import plan_save
from megatron.core.dist_checkpointing.shard_files import PieceFacts
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState, single_process
from megatron.core.transport.rank_grid import AXES

Log = Callable[[str], None]
Guard = Callable[[], None]  # raises CheckpointError, or OSError, when the folder is not to be changed
_CHUNK_JSON_BYTES = 250  # what the manifest and the header of a shard say about one chunk, about


def no_log(line: str) -> None:
    """For callers that do not want the lines."""


def no_guard() -> None:
    """For callers who are alone in their folder."""


class SaveOptions(TypedDict, total=False):
    """Keywords of `PendingSave`, which says what they mean."""

    retain_interval: int | None
    owned: Collection[int] | None
    cache: PlanCache | None
    log: Log
    guard: Guard


def save(
    root: str | Path,
    iteration: int,
    pieces: Sequence[LocalPiece],
    common: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    ps: ParallelState | None = None,
    **options: Unpack[SaveOptions],
) -> Path:
    """Write `iter_<iteration>/` in `root` and commit it; the directory, on every rank. Arguments: as `PendingSave`'s.

    Communicates over the whole world. Raises CheckpointError on all ranks together, with nothing left behind
    and older checkpoints untouched.
    """
    pending = PendingSave(root, iteration, pieces, common, per_rank, ps, **options)
    with step() as outcome:
        outcome.value = pending.write()
    return pending.commit(outcome)


class PendingSave:
    """A save that is planned, with space for it, and has its directory, which it owns until `commit` returns or raises.

    pieces: this rank's part of every tensor; all ranks' pieces together are every element once, replicas
    aside. common: JSON values that all ranks share (rank 0's are written); per_rank: this rank's own. Both are copied:
    they may change once it is made. The tensors may not, before `snapshot` or `write` has returned.

    retain_interval: once committed, older checkpoints of other iterations are removed, the newest two aside.
    owned: the iterations that this save may replace and remove; None: all. See [Note: what a save may replace].
    cache: keep one between saves, so that an unchanged plan is not made again. log: gets rank 0's lines.
    guard: called before rank 0 cleans up in the folder, again before it commits, and where a directory is gone.

    Making it communicates over the whole world, and raises CheckpointError on all ranks together.
    """

    def __init__(
        self,
        root: str | Path,
        iteration: int,
        pieces: Sequence[LocalPiece],
        common: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        ps: ParallelState | None = None,
        *,
        retain_interval: int | None = None,
        owned: Collection[int] | None = None,
        cache: PlanCache | None = None,
        log: Log = no_log,
        guard: Guard = no_guard,
    ) -> None:
        self.root, self.iteration, self.ps = Path(root), iteration, ps or single_process()
        self._retain_interval, self._owned, self._log, self._guard = retain_interval, owned, log, guard
        placed = place_pieces(piece for piece in pieces if piece.written)
        self._tensors = {place: piece.tensor for place, piece in placed.items()}
        self._plans = plan_save(placed.values(), self.ps, cache or PlanCache())
        self._layout = shard_files.lay_out(self._plans[self.ps.rank])
        self._common: dict[str, Any] = json.loads(canonical(dict(common)))
        self._per_rank: dict[str, Any] = json.loads(canonical(dict(per_rank)))
        with step() as prepared:
            if self.ps.rank == 0:
                needed = self._estimate()
                prepared.value = [self._prepare(needed).name, needed]
        name, self._needed_bytes = prepared.gather(self.ps)[0]
        self.temporary = self.root / name

    def _estimate(self) -> int:
        """Bytes of the whole checkpoint, before it is written."""
        layouts = [shard_files.lay_out(plan) for plan in self._plans]
        chunks = sum(len(layout.pieces) for layout in layouts)
        notes = len(canonical(self._common)) + len(layouts) * len(canonical(self._per_rank))
        return sum(layout.num_bytes for layout in layouts) + notes + chunks * _CHUNK_JSON_BYTES

    def _prepare(self, needed: int) -> Path:
        """On rank 0: clean up after killed saves, refuse what cannot fit, make the directory to write in."""
        root = self.root
        try:
            root.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
            self._guard()
            for note in commit.clean(root):
                self._log(note)
            free = shutil.disk_usage(root).free
            if needed > free:
                told = f"it needs {needed} bytes, {free} bytes are free"
                raise CheckpointError(f"{root}: no space for a checkpoint: {told}")
            path = root / directory_name(self.iteration, CheckpointKind.TEMPORARY, secrets.token_hex(4))
            path.mkdir(mode=DIRECTORY_MODE)
            return path
        except OSError as error:
            raise CheckpointError(f"{error.filename or root}: cannot save here: {error.strerror}") from error

    def _tensor(self, piece: PieceFacts) -> Tensor:
        return self._tensors[piece.name, piece.offset]

    def snapshot(self, buffer: Tensor | None) -> Tensor:
        """Copy what this rank writes to host memory, so that training may go on; `write` then uses the copy.

        buffer: one returned earlier, reused when it has the right size.
        """
        layout, first = self._layout, len(self._layout.header)
        num_bytes = layout.num_bytes - first if layout.pieces else 0
        if buffer is None or buffer.numel() != num_bytes:
            on_device = any(self._tensor(piece).device.type != "cpu" for piece in layout.pieces)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_device)
        copies = {}
        for piece, begin in zip(layout.pieces, layout.begins, strict=True):
            tensor = self._tensor(piece)
            part = copies[piece.name, piece.offset] = buffer.narrow(0, begin - first, tensor.nbytes)
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)  # sync: the values of this moment
        self._tensors = copies
        return buffer

    def write(self) -> FileEntry | None:
        """Write and fsync this rank's file (None: nothing to write). Communicates with nobody."""
        path = self.temporary / shard_files.shard_name(self.ps.rank)
        try:
            return storage.write_shard(path, self._layout, self._tensor)
        except OSError as error:
            raise CheckpointError(self._disk_problem(path, error)) from error

    def _disk_problem(self, path: Path, error: OSError) -> str:
        if isinstance(error, FileNotFoundError) and not self.temporary.is_dir():
            self._guard()  # knows who has done that, where anybody does
            return f"{self.temporary} was removed while this save was writing it: leave the folder to one run at a time"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{path}: {error.strerror}"
        return (
            f"{path}: {error.strerror}; this save needs {self._needed_bytes} bytes, "
            f"{shutil.disk_usage(self.root).free} bytes are free in {self.root}"
        )

    def commit(self, outcome: Outcome) -> Path:
        """Make it a checkpoint once every rank has written. outcome: of this rank's `write`.

        Communicates over the whole world; raises CheckpointError on all ranks together, the directory removed.
        """
        written: FileEntry | None = outcome.value
        outcome.value = [None if written is None else dataclasses.asdict(written), self._per_rank]
        try:
            answers = outcome.gather(self.ps)
            with step() as done:
                if self.ps.rank == 0:
                    self._commit_alone(answers)
            done.gather(self.ps)
        except CheckpointError:
            if self.ps.rank == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)  # else the next save removes it
            raise
        return self.root / directory_name(self.iteration)

    def _commit_alone(self, answers: Sequence[Any]) -> None:
        """On rank 0. answers: each rank's file and its `per_rank`."""
        self._guard()
        try:
            write_file(self.temporary / MANIFEST_NAME, [self._manifest(answers).to_bytes()])
            may_replace = self._owned is None or self.iteration in self._owned
            notes = commit.commit(self.temporary, self.root, self.iteration, may_replace=may_replace)
        except OSError as error:
            path = Path(error.filename or self.temporary / MANIFEST_NAME)
            raise CheckpointError(self._disk_problem(path, error)) from error
        if self._retain_interval is not None:
            with_this = None if self._owned is None else {*self._owned, self.iteration}
            try:
                notes += commit.retain(self.root, self.iteration, self._retain_interval, with_this)
            except OSError as error:  # it is committed: this is told and no more
                notes.append(f"could not remove older checkpoints: {error}")
        for note in notes:
            self._log(note)

    def _manifest(self, answers: Sequence[Any]) -> Manifest:
        files = {
            shard_files.shard_name(rank): FileEntry(**file) for rank, (file, _) in enumerate(answers) if file
        }
        tensors, common, ps = shard_files.describe_tensors(self._plans), self._common, self.ps
        unwritten = {chunk.file for entry in tensors.values() for chunk in entry.chunks} - files.keys()
        assert not unwritten, f"planned, and not written: {sorted(unwritten)}"
        return Manifest(
            iteration=self.iteration,
            consumed_train_samples=int(common.get("consumed_train_samples", 0)),
            world_size=ps.world_size,
            topology={axis: ps.grid.size(axis) for axis in AXES},
            config_hash=manifest.config_digest(common),
            code_version=__version__,
            torch_version=torch.__version__,
            files=files,
            tensors=tensors,
            common=common,
            per_rank=tuple(own for _, own in answers),
        )


def _write(pending: PendingSave, written: Future[Outcome]) -> None:
    try:
        with step() as outcome:
            outcome.value = pending.write()
        written.set_result(outcome)
    except BaseException as error:  # raised again in the main thread, which is where somebody listens
        written.set_exception(error)


class AsyncSaver:
    """Owns the save in flight, and the host copy, which it keeps for the next save."""

    def __init__(self, log: Log = no_log, guard: Guard = no_guard) -> None:
        self._log, self._guard = log, guard
        self._pending: PendingSave | None = None
        self._written: Future[Outcome] = Future()
        self._buffer: Tensor | None = None

    @property
    def copied_bytes(self) -> int:
        """Of the host copy."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def in_flight(self) -> int | None:
        """The iteration being written. The same on every rank."""
        return None if self._pending is None else self._pending.iteration

    def save(
        self,
        root: str | Path,
        iteration: int,
        pieces: Sequence[LocalPiece],
        common: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        ps: ParallelState | None = None,
        **options: Unpack[SaveOptions],
    ) -> Path | None:
        """Copy the state and start writing it. Arguments: as `PendingSave`'s; tensors may change once this returns.

        Returns the directory of an earlier save if it had to be waited for. Communicates over the whole world.
        """
        if self._pending is not None and self._pending.ps.rank == 0:
            before = f"before starting that of {iteration}"
            self._log(f"waiting for the save of iteration {self.in_flight} {before}")
        earlier = self.maybe_finalize(blocking=True)
        asked: SaveOptions = {**options, "log": self._log, "guard": self._guard}
        pending = PendingSave(root, iteration, pieces, common, per_rank, ps, **asked)
        self._buffer = pending.snapshot(self._buffer)
        self._pending, self._written = pending, Future()
        # A daemon: a process that stops at once leaves only a temporary directory.
        name = f"checkpoint-{iteration}"
        threading.Thread(target=_write, args=(pending, self._written), name=name, daemon=True).start()
        return earlier

    def maybe_finalize(self, blocking: bool = False) -> Path | None:
        """Commit the save in flight once every rank has written it; the directory if that happened now.

        Call it at the same step on every rank. Without a save in flight it costs nothing, with one a
        reduction of one number. blocking: wait for the writing. Raises CheckpointError on all ranks together.
        """
        pending = self._pending
        if pending is None or not (blocking or _all_true(self._written.done(), pending.ps)):
            return None
        started = time.monotonic()
        self._pending = None
        directory = pending.commit(self._written.result())
        if blocking and pending.ps.rank == 0:
            self._log(f"waited {time.monotonic() - started:.2f} s for {directory}")
        return directory


def _all_true(value: bool, ps: ParallelState) -> bool:
    if ps.world_size == 1:
        return value
    flag = torch.tensor([int(value)], dtype=torch.int32)
    collectives.all_reduce(flag, ps.control_group, "min")
    return bool(flag.item())
