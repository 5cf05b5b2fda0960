"""metrics.jsonl: the run's own record, one JSON object a line, readable while the run goes on.

    {"iteration": 10, "consumed_samples": 80, "time": 1767225600.5, "lm loss": 9.87, ...}
    {"event": "checkpoint", "iteration": 10, "time": 1767225601.0, "path": "out/iter_0000010", "seconds": 0.4}

Numbers that JSON cannot write are the strings "nan", "inf", "-inf". A line is written whole and flushed at
once, so a killed run loses at most the line it was in.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron.core import safe_files

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
LARGEST_COUNT = 2**48  # of iterations and samples: beyond any run, and exact in a float
LATEST_TIME = 2**37  # in the year 6325
LONGEST_LINE_BYTES = 1 << 24


class MetricsFile:
    """Opens the record for a run that starts at `resumed_iteration` (0: from scratch) and appends to it.

    From scratch: an earlier run's file is kept under the next free name `metrics.old-1.jsonl`. Resumed: lines
    after the resumed iteration, and a line that a kill cut short, are dropped. `note` says which.

    Raises OSError, also where the path is a link.
    """

    def __init__(self, path: str | Path, *, resumed_iteration: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.note = f"metrics: {self.path}" + self._prepare(resumed_iteration)
        fd = safe_files.open_for_append(self.path, mode=safe_files.SHARED_MODE)
        self._file: TextIO = os.fdopen(fd, "a", encoding="utf-8")

    def _prepare(self, resumed_iteration: int) -> str:
        try:
            with safe_files.open_regular(self.path) as fd:
                size = os.fstat(fd).st_size
        except FileNotFoundError:
            size = 0
        if size == 0:
            return ""
        if resumed_iteration == 0:
            names = (f"{self.path.stem}.old-{n}{self.path.suffix}" for n in itertools.count(1))
            kept = next(name for name in names if not os.path.lexists(self.path.with_name(name)))
            self.path.rename(self.path.with_name(kept))
            return f" (an earlier run's is kept as {kept})"
        num_kept = num_dropped = 0
        with safe_files.published(self.path, mode=safe_files.SHARED_MODE) as out:
            for line, record in _lines(self.path, follow=False):
                if record is not None and record["iteration"] <= resumed_iteration:
                    out.write(line.encode())
                    num_kept += 1
                else:
                    num_dropped += 1
        dropped = f", {num_dropped} after iteration {resumed_iteration} dropped" if num_dropped else ""
        return f" ({num_kept} lines kept{dropped})"

    def record(self, scalars: Mapping[str, float], step: int, samples: int | None = None) -> None:
        """Write the line of some numbers, if any. Those that are not finite become keys of NOT_FINITE."""
        if not scalars:
            return
        count = {} if samples is None else {"consumed_samples": samples}
        numbers = {tag: value if isinstance(value, int) else float(value) for tag, value in scalars.items()}
        shown = {tag: value if math.isfinite(value) else str(value) for tag, value in numbers.items()}
        self._write({"iteration": step, "time": round(time.time(), 3), **count, **shown})

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Write an event's line."""
        self._write({"event": name, "iteration": step, "time": round(time.time(), 3), **fields})

    def close(self) -> None:
        """The content is on disk afterwards."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, default=str) + "\n")
        self._file.flush()


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, with NaN and infinities as floats; a last line cut short is left out.

    Numbers of an iteration are floats, but for "iteration" and "consumed_samples"; "time" is finite. Raises OSError for
    what is no file, and ValueError naming file and line for anything else that is no record.
    """
    broken = 0
    for number, (_, record) in enumerate(_lines(Path(path)), start=1):
        if broken:
            raise ValueError(f"{path}, line {broken}: not a JSON object with an integer 'iteration'")
        if record is None:
            broken = number
            continue
        try:
            yield _checked(record)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, or OverflowError, for a field that does not hold what its name says."""
    seconds, samples = record.get("time", 0), record.get("consumed_samples", 0)
    if not _is_number(seconds) or not 0 <= seconds <= LATEST_TIME:
        raise ValueError(f"'time' is {seconds!r:.80}, not seconds since 1970")
    if type(samples) is not int or not 0 <= samples <= LARGEST_COUNT:
        raise ValueError(f"'consumed_samples' is {samples!r:.80}, not a number of samples")
    if "event" in record:
        if not isinstance(record["event"], str) or not isinstance(record.get("config", {}), dict):
            raise ValueError("an event has a name, and perhaps a configuration by names")
        return record
    for key in record.keys() - {"iteration", "consumed_samples"}:
        value = record[key]
        value = NOT_FINITE.get(value, value) if isinstance(value, str) else value
        if not _is_number(value):
            raise ValueError(f"{key!r:.80} is {value!r:.80}, not a number")
        record[key] = float(value)
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(path: Path, *, follow: bool = True) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each line with its record, None where it is none."""
    with safe_files.opened(path, follow=follow) as file:
        while data := file.readline(LONGEST_LINE_BYTES):
            line = data.decode(errors="replace")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            iteration = record.get("iteration") if isinstance(record, dict) else None
            known = type(iteration) is int and 0 <= iteration <= LARGEST_COUNT
            yield line, record if known and line.endswith("\n") else None
