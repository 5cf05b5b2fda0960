"""Write a checkpoint: plan together, write alone, commit together.

`save` does all three at once. `begin_save` does the first and returns a `PendingSave`, whose `write` needs no
other rank (so a thread can do it, `async_save`) and whose `commit` makes the directory a checkpoint.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megatron.core.dist_checkpointing import commit, storage
from megatron.core.dist_checkpointing.agree import Outcome, rank_of, step, world_size_of
from megatron.core.dist_checkpointing.catalog import directory_name
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import write_file
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    canonical,
    config_digest,
)
from megatron.core.dist_checkpointing.planning import PieceSavePlanner, PlanCache, plan_save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.rank_grid import AXES

Log = Callable[[str], None]
Guard = Callable[[], None]  # raises CheckpointError, or OSError, when the folder is not to be changed
_CHUNK_JSON_BYTES = 250  # what the manifest and the header of a shard say about one chunk, about


def no_log(line: str) -> None:
    """For callers that do not want the lines."""


def no_guard() -> None:
    """For callers who are alone in their folder."""


class SaveOptions(TypedDict, total=False):
    """Keywords of `save`, `begin_save` and `AsyncSaver.save`.

    retain_interval: once committed, older checkpoints of other iterations are removed, the newest two aside.
    owned: the iterations that this save may replace and remove; None: all. See [Note: what a save may replace].
    cache: keep one between saves, so that an unchanged plan is not made again. log: gets rank 0's lines.
    guard: called before rank 0 cleans up in the folder, again before it commits, and where a directory is gone.
    """

    retain_interval: int | None
    owned: Collection[int] | None
    cache: PlanCache
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
    """Write `iter_<iteration>/` in `root` and commit it; the directory, on every rank.

    pieces: this rank's part of every tensor; all ranks' pieces together are every element once, replicas
    aside. common: JSON values that all ranks share (rank 0's are written); per_rank: this rank's own.

    Communicates over the whole world. Raises CheckpointError on all ranks together, with nothing left behind
    and older checkpoints untouched.
    """
    pending = begin_save(root, iteration, pieces, common, per_rank, ps, **options)
    with step() as outcome:
        outcome.value = pending.write()
    return pending.commit(outcome, ps)


@dataclasses.dataclass
class PendingSave:
    """A save that is planned and has its directory, which it owns until `commit` returns or raises.

    layout: of this rank's file. resolve: the values of an item of it. plans: of all ranks. facts: what the manifest
    says beside tensors, files and `per_rank`.
    """

    root: Path
    temporary: Path
    layout: storage.ShardFile
    resolve: Callable[[WriteItem], Tensor]
    plans: list[SavePlan]
    facts: Manifest
    per_rank: dict[str, Any]
    rank: int
    needed_bytes: int
    options: SaveOptions

    @property
    def iteration(self) -> int:
        return self.facts.iteration

    def snapshot(self, buffer: Tensor | None) -> Tensor:
        """Copy what this rank writes to host memory, so that training may go on; `write` then uses the copy.

        buffer: one returned earlier, reused when it has the right size.
        """
        layout, first = self.layout, len(self.layout.header)
        num_bytes = layout.num_bytes - first if layout.items else 0
        tensors = [self.resolve(item) for item in layout.items]
        if buffer is None or buffer.numel() != num_bytes:
            on_device = any(tensor.device.type != "cpu" for tensor in tensors)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_device)
        copies = {}
        for item, begin, tensor in zip(layout.items, layout.begins, tensors, strict=True):
            part = copies[item.index] = buffer.narrow(0, begin - first, tensor.nbytes)
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)  # sync: the values of this moment
        self.resolve = lambda item: copies[item.index]
        return buffer

    def write(self) -> FileEntry | None:
        """Write and fsync this rank's file (None: nothing to write). Communicates with nobody."""
        path = self.temporary / storage.shard_name(self.rank)
        try:
            return storage.write_shard(path, self.layout, self.resolve)
        except OSError as error:
            raise CheckpointError(self._disk_problem(path, error)) from error

    def _disk_problem(self, path: Path, error: OSError) -> str:
        if isinstance(error, FileNotFoundError) and not self.temporary.is_dir():
            self.options.get("guard", no_guard)()  # knows who has done that, where anybody does
            return f"{self.temporary} was removed while this save was writing it: leave the folder to one run at a time"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{path}: {error.strerror}"
        return (
            f"{path}: {error.strerror}; this save needs {self.needed_bytes} bytes, "
            f"{shutil.disk_usage(self.root).free} bytes are free in {self.root}"
        )

    def commit(self, outcome: Outcome, ps: ParallelState | None) -> Path:
        """Make it a checkpoint once every rank has written. outcome: of this rank's `write`.

        Communicates over the whole world; raises CheckpointError on all ranks together, the directory removed.
        """
        written: FileEntry | None = outcome.value
        outcome.value = [None if written is None else dataclasses.astuple(written), self.per_rank]
        try:
            answers = outcome.gather(ps)
            with step() as done:
                if self.rank == 0:
                    self._commit_alone(answers)
            done.gather(ps)
        except CheckpointError:
            if self.rank == 0:
                commit.abandon(self.temporary)
            raise
        return self.root / directory_name(self.iteration)

    def _commit_alone(self, answers: Sequence[Any]) -> None:
        """On rank 0. answers: each rank's file and its `per_rank`."""
        files = [None if file is None else FileEntry(*file) for file, _ in answers]
        facts = dataclasses.replace(self.facts, per_rank=tuple(own for _, own in answers))
        owned, interval = self.options.get("owned"), self.options.get("retain_interval")
        self.options.get("guard", no_guard)()
        try:
            manifest = storage.build_manifest(self.plans, files, facts)
            write_file(self.temporary / MANIFEST_NAME, manifest.to_bytes())
            may_replace = owned is None or self.iteration in owned
            notes = commit.commit(self.temporary, self.root, self.iteration, may_replace=may_replace)
        except OSError as error:
            path = Path(error.filename or self.temporary / MANIFEST_NAME)
            raise CheckpointError(self._disk_problem(path, error)) from error
        if interval is not None:
            with_this = None if owned is None else {*owned, self.iteration}
            try:
                notes += commit.retain(self.root, self.iteration, interval, with_this)
            except OSError as error:  # it is committed: this is told and no more
                notes.append(f"could not remove older checkpoints: {error}")
        for note in notes:
            self.options.get("log", no_log)(note)


def begin_save(
    root: str | Path,
    iteration: int,
    pieces: Sequence[LocalPiece],
    common: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    ps: ParallelState | None = None,
    **options: Unpack[SaveOptions],
) -> PendingSave:
    """Agree on who writes what, look at the free space, make the directory. Arguments as in `save`.

    `common` and `per_rank` are copied: they may change once this returns. The tensors may not, before
    `snapshot` or `write` has returned.
    """
    root, rank = Path(root), rank_of(ps)
    planner = PieceSavePlanner(pieces)
    plans = plan_save(planner, ps, options.get("cache") or PlanCache())
    own: dict[str, Any] = json.loads(canonical(dict(per_rank)))
    facts = _facts(iteration, json.loads(canonical(dict(common))), ps)
    with step() as prepared:
        if rank == 0:
            needed = _estimate(plans, facts, own)
            prepared.value = [_prepare(root, iteration, needed, options).name, needed]
    name, needed = prepared.gather(ps)[0]

    def resolve(item: WriteItem) -> Tensor:
        return planner.lookup_object(item.index)

    layout = storage.lay_out(plans[rank].items)
    return PendingSave(root, root / name, layout, resolve, plans, facts, own, rank, needed, options)


def _prepare(root: Path, iteration: int, needed: int, options: SaveOptions) -> Path:
    """On rank 0: clean up after killed saves, refuse what cannot fit, make the directory to write in."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=commit.DIRECTORY_MODE)
        options.get("guard", no_guard)()
        for note in commit.clean(root):
            options.get("log", no_log)(note)
        free = shutil.disk_usage(root).free
        if needed > free:
            raise CheckpointError(
                f"{root}: no space for a checkpoint: it needs {needed} bytes, {free} bytes are free"
            )
        return commit.new_temporary(root, iteration)
    except OSError as error:
        raise CheckpointError(f"{error.filename or root}: cannot save here: {error.strerror}") from error


def _estimate(plans: Sequence[SavePlan], facts: Manifest, own: dict[str, Any]) -> int:
    """Bytes of the whole checkpoint, before it is written."""
    layouts = [storage.lay_out(plan.items) for plan in plans]
    chunks = sum(len(layout.items) for layout in layouts)
    notes = len(canonical(facts.common)) + len(plans) * len(canonical(own)) + chunks * _CHUNK_JSON_BYTES
    return sum(layout.num_bytes for layout in layouts) + notes


def _facts(iteration: int, common: dict[str, Any], ps: ParallelState | None) -> Manifest:
    return Manifest(
        iteration=iteration,
        consumed_train_samples=int(common.get("consumed_train_samples", 0)),
        world_size=world_size_of(ps),
        topology={axis: 1 if ps is None else ps.grid.size(axis) for axis in AXES},
        config_hash=config_digest(common),
        code_version=code_version(),
        torch_version=torch.__version__,
        files={},
        tensors={},
        common=common,
        per_rank=(),
    )


@functools.cache
def code_version() -> str:
    """The installed package's version; "source" when it runs from a source tree that is not installed."""
    try:
        return importlib.metadata.version("megatron-zero")
    except importlib.metadata.PackageNotFoundError:
        return "source"
