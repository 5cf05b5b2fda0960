"""Profiling a window of iterations (`--profile`), and the history of a GPU's memory.

The loop tells the profiler of iterations; while the window lasts, the pipeline's executor names each operation of the
plan to it. Whatever fails here is a warning: a trace is never worth a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron.core.safe_files import publish_by
from megatron.training.guard.console import torch_quiet
from megatron.training.guard.run_folder import DIRECTORY_MODE
from megatron.training.report.writers import warn
from megatron.training.run.parts import RunParts

TRACES = "profile"  # in the folder of the run
SNAPSHOT = "snapshot.pickle"


class RunProfiler:
    """Records the iterations start < i <= end on --profile-ranks, as a trace of torch.profiler or for nsys. Every rank
    has one. first_iteration: the first that this start of the run trains on."""

    def __init__(self, parts: RunParts, first_iteration: int) -> None:
        session = self._session = parts.session
        flags = self._flags = session.config.profiling
        self._parts, self._pipeline = parts, parts.pipeline
        assert session.folder.path is not None, "a run without a folder"
        self._folder = session.folder.path
        self._first, self._last = max(flags.profile_step_start + 1, first_iteration), flags.profile_step_end
        self._is_due = flags.profile and first_iteration <= self._last  # the window, on all ranks alike
        self._is_mine = self._is_due and session.ps.rank in flags.profile_ranks
        self._capture: contextlib.ExitStack | None = None  # under way
        self._trace: torch.profiler.profile | None = None
        self._path: Path | None = None  # of this rank's trace
        self._snapshot: Path | None = None
        if flags.record_memory_history and session.device.record_memory_history():
            self._snapshot = Path(flags.memory_snapshot_path or self._folder / SNAPSHOT)
        if flags.profile and not self._is_due:
            behind = f"it ends before iteration {first_iteration}, with which this run goes on"
            session.print_rank_last(
                f"WARNING: the window of --profile-step-end {self._last} has no iteration: {behind}"
            )

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """One iteration runs inside of it. Communicates over the world behind the window's last one."""
        if self._is_mine and not self._succeeds("is not profiled", self._begin, number):
            self._is_mine = False
            self.close()
        with contextlib.ExitStack() as named:
            if self._is_mine and self._first <= number:
                nsys = self._session.device.nvtx_range
                self._pipeline.region = nsys if self._trace is None else torch.profiler.record_function
                named.callback(setattr, self._pipeline, "region", None)
                named.enter_context(self._pipeline.region(f"iteration {number}"))
            yield
        with self._parts.clock.paused():
            if self._is_due and number >= self._last:
                self.finish(number)
            if number % self._session.config.logging.log_interval == 0 and self._session.ps.is_last_rank:
                self._write_snapshot()

    def finish(self, last: int) -> None:
        """The window is over, or the run, with this iteration: write the trace. Communicates over the world where there
        is a window."""
        if not self._is_due:
            return
        self._is_due = False
        session = self._session
        if last < self._first:
            window = f"iterations {self._first} to {self._last}"
            session.print_rank_last(f"WARNING: --profile: {window} were not reached: the last was {last}")
            return
        name = f"iterations {self._first} to {min(last, self._last)}"
        if self._is_mine:
            self._is_mine = False
            self._succeeds("has no trace", self._end, name.replace(" ", "-"))
        paths = list(filter(None, session.gather(str(self._path or ""))))
        if paths:
            files = f"{paths[0]}{f' and those of {len(paths) - 1} more ranks' if len(paths) > 1 else ''}"
            session.print_rank_last(f" > profile of {name}: {files} (for ui.perfetto.dev, or TensorBoard)")
            self._parts.reporter.writers.event("profile", last, traces=paths)
        elif not self._flags.use_pytorch_profiler and session.device.kind == "cuda":
            session.print_rank_last(f" > profile: nsys was given {name}")

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, in whatever way. error: that ended it."""
        capture, self._capture = self._capture, None
        if capture is not None:
            self._succeeds("has no trace", capture.close)
        if isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot(f"oom_rank-{self._session.ps.rank}_")

    def _begin(self, number: int) -> None:
        """torch's profiler begins one iteration before the window, which it does not keep: setting up takes time."""
        flags = self._flags
        if number < self._first - 1 or (number < self._first and not flags.use_pytorch_profiler):
            return
        with torch_quiet():  # it says when it starts
            if self._trace is not None:
                self._trace.step()
            elif self._capture is None:
                self._capture = contextlib.ExitStack()
                if flags.use_pytorch_profiler:
                    self._trace = self._capture.enter_context(self._torch_profiler(number))
                else:
                    self._capture.enter_context(self._session.device.captured())

    def _torch_profiler(self, number: int) -> torch.profiler.profile:
        flags = self._flags
        warmup, active = self._first - number, self._last - self._first + 1
        return torch.profiler.profile(
            activities=self._session.device.activities(),
            schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
            record_shapes=flags.pytorch_profiler_collect_shapes,
            with_stack=flags.pytorch_profiler_collect_callstack,
        )

    def _end(self, name: str) -> None:
        """The window is over: what torch has recorded goes into a file."""
        assert self._capture is not None, "a window that has not begun"
        capture, self._capture = self._capture, None
        with torch_quiet():  # and when it stops
            capture.close()
        if self._trace is None:
            return
        # TensorBoard's plugin looks for such names.
        path = self._folder / TRACES / f"rank-{self._session.ps.rank}-{name}.pt.trace.json"
        self._publish(path, self._trace.export_chrome_trace)
        self._path = path

    def _write_snapshot(self, prefix: str = "") -> None:
        if self._snapshot is not None:
            path = self._snapshot.with_name(prefix + self._snapshot.name)
            write = self._session.device.write_memory_snapshot
            if not self._succeeds("writes no snapshot of its memory", self._publish, path, write):
                self._snapshot = None

    @staticmethod
    def _publish(path: Path, write: Callable[[str], object]) -> None:
        path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        publish_by(path, write)

    def _succeeds(self, otherwise: str, call: Callable[..., object], *values: object) -> bool:
        """Whether a call of torch's profilers went well; a warning where it did not."""
        try:
            call(*values)
        except (
            Exception
        ) as error:  # a folder that cannot be written, another profiler: nothing that is worth the run
            warn(f"rank {self._session.ps.rank} {otherwise}: {error}")
            return False
        return True
