"""Writing when each operation ran: `--log-pipeline-timeline`, in the format of plan/measuring/timeline_files.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.plan.held.lanes import Lanes
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import NOT_RUN, RankStep
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import file_name, header_line, op_lines
from megatron.core.pipeline_parallel.runtime.recorder import StepReader
from megatron.core.safe_files import SHARED_MODE, open_for_append
from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import ParallelState


class TimelineWriter(StepReader):
    """Writes one file a rank under `directory`, anew for each run.

    What an earlier run (also the one that is resumed) wrote there is moved to its subdirectory `old-1`, or the next
    number that is free, a timeline of its own. Communicates over the world: every rank makes one. Raises OSError, on
    every rank where it is the first one that cannot move files.

    lanes: of the run's plans, in ns. at_rest: bytes that this rank holds between steps. Both are to be set before the
    first step, where plans have operations of data parallelism.
    A step's lines are written at its end, in one piece, of one in which forwards ran again those of their first run:
    VALIDATE lasts as long as the second. On CUDA every operation is waited for, so a run that is measured overlaps less
    than one that is not.
    """

    def __init__(self, directory: Path, ps: ParallelState) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _set_earlier_aside(directory, ps)
        self._pipeline = ps.pp_group.ranks
        self._file = os.fdopen(open_for_append(directory / file_name(ps.rank), mode=SHARED_MODE), "w")
        # Both clocks at once: what is written counts from here.
        self._clock_unix_s, self._zero_s = time.time(), round(time.monotonic(), 9)
        self.lanes: Lanes | None = None
        self.at_rest = 0
        self._last: RankStep | None = None
        self._templates: list[str] = []

    def reads(self, step: RankStep) -> None:
        """Write what ran, in the order of the row, and a header where what it says has changed."""
        lines, last, self._last = [""], self._last, step
        if last is None or last.plan is not step.plan or last.link_ns != step.link_ns:
            self._templates = op_lines(step.plan.rows[step.rank])
            clock, of_run = self._clock_unix_s, (self.lanes, self.at_rest)
            lines = [header_line(step.plan, step.rank, self._pipeline, clock, *of_run, step.link_ns)]
        for template, one in zip(self._templates, step.spans, strict=True):
            if one is not NOT_RUN:
                start, end = one.start_s - self._zero_s, one.end_s - self._zero_s
                times = step.iteration, start, end, one.wait_s, one.lane_s
                lines.append(template % times[: template.count("%")])
        self._file.write("".join(lines))
        self._file.flush()

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
    failed = host_data.all_gather_json(failed, ps.control_group)[0]
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
