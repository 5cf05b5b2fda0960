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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.agree import Outcome, rank_of, step, world_size_of
from megatron.core.dist_checkpointing.catalog import directory_name
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, FileEntry, canonical, config_digest
from megatron.core.dist_checkpointing.planning import PieceSavePlanner, PlanCache, plan_save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.dist_checkpointing.storage import (
    ManifestFacts,
    SafeStorageWriter,
    ShardLayout,
    lay_out,
    shard_name,
    write_results,
    write_shard,
)
from megatron.core.transport.parallel_state import ParallelState

Log = Callable[[str], None]
Guard = Callable[[], None]  # raises CheckpointError, or OSError, when the folder is not to be changed
_CHUNK_JSON_BYTES = 250  # what the manifest and the header of a shard say about one chunk, about


def no_log(line: str) -> None:
    """For callers that do not want the lines."""


def no_guard() -> None:
    """For callers who are alone in their folder."""


def save(
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
) -> Path:
    """Write `iter_<iteration>/` in `root` and commit it; the directory, on every rank.

    pieces: this rank's part of every tensor; all ranks' pieces together are every element once, replicas
    aside. common: JSON values that all ranks share (rank 0's are written); per_rank: this rank's own.
    retain_interval: once committed, older checkpoints of other iterations are removed, the newest two aside.
    owned: the iterations that this save may replace and remove; None: all. See [Note: what a save may replace].
    cache: keep one between saves, so that an unchanged plan is not made again. log: gets rank 0's lines.
    guard: called before rank 0 cleans up in the folder, again before it commits, and where a directory is gone.

    Communicates over the whole world. Raises CheckpointError on all ranks together, with nothing left behind
    and older checkpoints untouched.
    """
    pending = begin_save(
        root, iteration, pieces, common, per_rank, ps,
        retain_interval=retain_interval, owned=owned, cache=cache, log=log, guard=guard,
    )  # fmt: skip
    with step() as outcome:
        outcome.value = pending.write()
    return pending.commit(outcome, ps)


@dataclasses.dataclass
class PendingSave:
    """A save that is planned and has its directory, which it owns until `commit` returns or raises."""

    root: Path
    iteration: int
    temporary: Path
    layout: ShardLayout
    resolve: Callable[[WriteItem], Tensor]
    plans: list[SavePlan]
    metadata: Metadata
    facts: ManifestFacts
    per_rank: dict[str, Any]
    rank: int
    needed_bytes: int
    retain_interval: int | None
    owned: Collection[int] | None
    log: Log
    guard: Guard

    def snapshot(self, buffer: Tensor | None) -> Tensor:
        """Copy what this rank writes to host memory, so that training may go on; `write` then uses the copy.

        buffer: one returned earlier, reused when it has the right size.
        """
        num_bytes = self.layout.num_bytes - len(self.layout.header) if self.layout.items else 0
        tensors = [self.resolve(item) for item in self.layout.items]
        if buffer is None or buffer.numel() != num_bytes:
            on_device = any(tensor.device.type != "cpu" for tensor in tensors)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_device)
        copies: dict[MetadataIndex, Tensor] = {}
        rows = zip(self.layout.items, self.layout.entries, self.layout.begins, tensors, strict=True)
        for item, entry, begin, tensor in rows:
            part = buffer.narrow(0, begin - len(self.layout.header), entry.num_bytes)
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)  # sync: the values of this moment
            copies[item.index] = part
        self.resolve = lambda item: copies[item.index]
        return buffer

    def write(self) -> FileEntry | None:
        """Write and fsync this rank's file (None: nothing to write). Communicates with nobody."""
        path = self.temporary / shard_name(self.rank)
        try:
            return write_shard(path, self.layout, self.resolve)
        except OSError as error:
            raise CheckpointError(self._disk_problem(path, error)) from error

    def _disk_problem(self, path: Path, error: OSError) -> str:
        if isinstance(error, FileNotFoundError) and not self.temporary.is_dir():
            self.guard()  # knows who has done that, where anybody does
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
        outcome.value = [None if written is None else dataclasses.asdict(written), self.per_rank]
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
        files = [None if file is None else FileEntry(**file) for file, _ in answers]
        results = [
            [] if file is None else write_results(lay_out(plan.items), file)
            for plan, file in zip(self.plans, files, strict=True)
        ]
        writer = SafeStorageWriter(self.temporary)
        writer.facts = dataclasses.replace(self.facts, per_rank=tuple(own for _, own in answers))
        self.guard()
        owned = self.owned
        try:
            writer.finish(self.metadata, results)
            may_replace = owned is None or self.iteration in owned
            notes = commit.commit(self.temporary, self.root, self.iteration, may_replace=may_replace)
        except OSError as error:
            path = Path(error.filename or self.temporary / MANIFEST_NAME)
            raise CheckpointError(self._disk_problem(path, error)) from error
        if self.retain_interval is not None:
            with_this = None if owned is None else {*owned, self.iteration}
            notes += _told(commit.retain, self.root, self.iteration, self.retain_interval, with_this)
        for note in notes:
            self.log(note)


def _told(remove: Callable[..., list[str]], *args: Any) -> list[str]:
    """The checkpoint is committed: a failure to remove older ones is told and no more."""
    try:
        return remove(*args)
    except OSError as error:
        return [f"could not remove older checkpoints: {error}"]


def begin_save(
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
) -> PendingSave:
    """Agree on who writes what, look at the free space, make the directory. Arguments as in `save`.

    `common` and `per_rank` are copied: they may change once this returns. The tensors may not, before
    `snapshot` or `write` has returned.
    """
    root, rank = Path(root), rank_of(ps)
    planner = PieceSavePlanner(pieces)
    plans, metadata = plan_save(planner, ps, PlanCache() if cache is None else cache)
    own: dict[str, Any] = json.loads(canonical(dict(per_rank)))
    facts = _facts(iteration, json.loads(canonical(dict(common))), ps)
    with step() as prepared:
        if rank == 0:
            needed = _estimate(plans, facts, own)
            prepared.value = [_prepare(root, iteration, needed, log, guard).name, needed]
    name, needed = prepared.gather(ps)[0]
    return PendingSave(
        root=root,
        iteration=iteration,
        temporary=root / name,
        layout=lay_out(plans[rank].items),
        resolve=lambda item: planner.lookup_object(item.index),
        plans=plans,
        metadata=metadata,
        facts=facts,
        per_rank=own,
        rank=rank,
        needed_bytes=needed,
        retain_interval=retain_interval,
        owned=owned,
        log=log,
        guard=guard,
    )


def _prepare(root: Path, iteration: int, needed: int, log: Log, guard: Guard) -> Path:
    """On rank 0: clean up after killed saves, refuse what cannot fit, make the directory to write in."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=commit.DIRECTORY_MODE)
        guard()
        for note in commit.clean(root):
            log(note)
        free = shutil.disk_usage(root).free
        if needed > free:
            raise CheckpointError(
                f"{root}: no space for a checkpoint: it needs {needed} bytes, {free} bytes are free"
            )
        return commit.new_temporary(root, iteration)
    except OSError as error:
        raise CheckpointError(f"{error.filename or root}: cannot save here: {error.strerror}") from error


def _estimate(plans: Sequence[SavePlan], facts: ManifestFacts, own: dict[str, Any]) -> int:
    """Bytes of the whole checkpoint, before it is written."""
    layouts = [lay_out(plan.items) for plan in plans]
    chunks = sum(len(layout.items) for layout in layouts)
    notes = len(canonical(facts.common)) + len(plans) * len(canonical(own)) + chunks * _CHUNK_JSON_BYTES
    return sum(layout.num_bytes for layout in layouts) + notes


def _facts(iteration: int, common: dict[str, Any], ps: ParallelState | None) -> ManifestFacts:
    axes = {"tp": 1, "cp": 1, "ep": 1, "dp": 1, "pp": 1}
    if ps is not None:
        axes = {axis: getattr(ps.grid, axis) for axis in axes}
    return ManifestFacts(
        iteration=iteration,
        consumed_train_samples=int(common.get("consumed_train_samples", 0)),
        world_size=world_size_of(ps),
        topology=axes,
        config_hash=config_digest(common),
        code_version=code_version(),
        common=common,
    )


@functools.cache
def code_version() -> str:
    """The installed package's version; "source" when it runs from a source tree that is not installed."""
    try:
        return importlib.metadata.version("megatron-zero")
    except importlib.metadata.PackageNotFoundError:
        return "source"
