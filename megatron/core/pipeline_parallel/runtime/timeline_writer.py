"""Writing when each operation ran: `--log-pipeline-timeline`, in the format of plan/measuring/timeline_files.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.plan.held.lanes import Lanes
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import file_name, header_line, op_lines
from megatron.core.safe_files import SHARED_MODE, open_for_append
from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import ParallelState


class TimelineWriter:
    """A `Recorder` (runtime/recorder.py) that writes one file a rank under `directory`, anew for each run.

    What an earlier run (also the one that is resumed) wrote there is moved to its subdirectory `old-1`, or the next
    number that is free, a timeline of its own. Communicates over the world: every rank makes one. Raises OSError, on
    every rank where it is the first one that cannot move files.

    lanes: of the run's plans, in ns. at_rest: bytes that this rank holds between steps. Both are to be set before the
    first step, where plans have operations of data parallelism.
    A step's lines are written at its end, in one piece. On CUDA every operation is waited for, so a run that is
    measured overlaps less than one that is not.
    """

    def __init__(self, directory: Path, ps: ParallelState) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _set_earlier_aside(directory, ps)
        self._pipeline, self._device = ps.pp_group.ranks, ps.device
        self._file = os.fdopen(open_for_append(directory / file_name(ps.rank), mode=SHARED_MODE), "w")
        # Both clocks at once: what is written counts from here.
        self._clock_unix_s, self._zero_s = time.time(), time.monotonic()
        self.lanes: Lanes | None = None
        self.at_rest = self._link_ns = 0
        self._plan: Plan | None = None
        self._templates: list[str] = []
        self._iteration, self._header = 0, ""
        self._lines: dict[int, str] = {}  # by place in the row

    def now(self) -> float:
        """Seconds since this writer was made."""
        self._device.synchronize()  # sync: measured timeline
        return time.monotonic() - self._zero_s

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        """A pipeline rank begins its row; a header where what it says has changed."""
        if plan is not self._plan:
            self._plan, self._templates = plan, op_lines(plan.rows[rank])
            clock = self._clock_unix_s
            self._header = header_line(
                plan, rank, self._pipeline, clock, self.lanes, self.at_rest, self._link_ns
            )
        self._iteration = iteration

    def record(self, place: int, start_s: float, end_s: float, wait_s: float, lane_s: float = 0.0) -> None:
        """Keep one operation's times until the step ends."""
        template = self._templates[place]
        times = (self._iteration, start_s, end_s, wait_s, lane_s)
        self._lines[place] = template % times[: template.count("%")]

    def repeated(self) -> None:
        """Their first run is what is written; VALIDATE lasts as long as the second."""

    def end_step(self) -> None:
        """Write what is kept, in the order of the row."""
        self._file.write(self._header + "".join(self._lines[place] for place in sorted(self._lines)))
        self._file.flush()
        self._header = ""
        self._lines.clear()

    def message_takes(self, link_ns: int) -> None:
        self._link_ns, self._plan = link_ns, None  # another header

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()


def _set_earlier_aside(directory: Path, ps: ParallelState) -> None:
    """Move an earlier run's files away before any rank opens its own. Communicates over the world."""
    failed: str | None = None
    if ps.is_first_rank:
        # All of them: an earlier run may have had more ranks.
        try:
            _move_aside(directory, sorted(directory.glob("rank-*.jsonl")))
        except OSError as error:
            failed = str(error)
    failed = host_data.broadcast_json(failed, ps.control_group)
    if failed is not None:
        raise OSError(failed)
    mine = directory / file_name(ps.rank)
    if mine.exists():  # in a folder of this machine's own, which the first rank does not see
        with contextlib.suppress(FileNotFoundError):  # a network file system may show what is gone
            _move_aside(directory, [mine])


def _move_aside(directory: Path, files: Sequence[Path]) -> None:
    folders = (directory / f"old-{number}" for number in itertools.count(1))
    target = next(folder for folder in folders if not any((folder / file.name).exists() for file in files))
    for file in files:
        target.mkdir(exist_ok=True)
        file.rename(target / file.name)
