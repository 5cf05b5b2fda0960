"""Checkpoints written in the background: training stands still only while tensors are copied to host memory.

A thread writes, not a process: forking is unsafe once CUDA or gloo have threads, spawning would copy the
state a second time, and file writes, fsync and SHA-256 all release the GIL. The thread talks to nobody; what
needs all ranks (the manifest, the rename) happens in the main thread, at a step where every rank's thread has
finished, which the ranks agree on in `maybe_finalize`. One save at a time: the next one waits, and says so.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import save as saving
from megatron.core.dist_checkpointing.agree import Outcome, rank_of, step
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState


def _write(pending: saving.PendingSave, written: Future[Outcome]) -> None:
    try:
        with step() as outcome:
            outcome.value = pending.write()
        written.set_result(outcome)
    except BaseException as error:  # raised again in the main thread, which is where somebody listens
        written.set_exception(error)


class AsyncSaver:
    """Owns the save in flight, and the host copy, which it keeps for the next save."""

    def __init__(self, log: saving.Log = saving.no_log, guard: saving.Guard = saving.no_guard) -> None:
        self._log, self._guard = log, guard
        self._pending: saving.PendingSave | None = None
        self._written: Future[Outcome] = Future()
        self._buffer: Tensor | None = None

    @property
    def in_flight(self) -> int | None:
        """The iteration being written. The same on every rank."""
        return None if self._pending is None else self._pending.iteration

    def save(self, root: str | Path, iteration: int, *content: Any, **options: Any) -> Path | None:
        """Copy the state and start writing it. Arguments: as `PendingSave`'s; tensors may change once this returns.

        Returns the directory of an earlier save if it had to be waited for. Communicates over the whole world.
        """
        if self._pending is not None and rank_of(self._pending.ps) == 0:
            before = f"before starting that of {iteration}"
            self._log(f"waiting for the save of iteration {self.in_flight} {before}")
        earlier = self.maybe_finalize(blocking=True)
        options |= {"log": self._log, "guard": self._guard}
        pending = saving.PendingSave(root, iteration, *content, **options)
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
        if blocking and rank_of(pending.ps) == 0:
            self._log(f"waited {time.monotonic() - started:.2f} s for {directory}")
        return directory


def _all_true(value: bool, ps: ParallelState | None) -> bool:
    if ps is None or ps.world_size == 1:
        return value
    flag = torch.tensor([int(value)], dtype=torch.int32)
    collectives.all_reduce(flag, ps.control_group, "min")
    return bool(flag.item())
