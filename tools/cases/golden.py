"""What a run's logs say of a case, and golden values: Megatron-LM's JSON, metric -> start, end, interval, values.

Beside the metrics, golden values of ours have what a bit depends on: `image` (torch, processor, threads, device), and
`case`, a digest of what the case runs. Values are whole floats, where Megatron has 5 decimals.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core import optional, safe_files
from megatron.training.report.metrics_file import read_metrics
from tools.cases.case import MOST_BYTES, Case, CaseError

Values = dict[str, dict[int, float]]  # metric -> step -> value
_FIELDS = ("start_step", "end_step", "step_interval", "values")
_ABOUT = ("image", "launcher", "case")
_OF_PLAN = {
    "estimated-bubble": lambda plan: plan["estimated_bubble"] or 0.0,
    "persistent-bytes": lambda plan: max(plan["persistent_bytes_per_rank"]),
}


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """Of all runs of a case; metrics of its second run are named `lm loss (run 2)`. image: None where the logs do not
    say; launcher, case: "" so."""

    values: Values
    image: Mapping[str, Any] | None = None
    launcher: str = ""
    case: str = ""


def digest(case: Case) -> str:
    """Of ranks and command lines, the variables not filled in."""
    runs = [
        [
            run.ranks,
            run.convert and run.convert.words,
            sorted((flag, *line.words) for flag, line in run.flags.items()),
        ]
        for run in case.runs
    ]
    return hashlib.sha256(json.dumps([case.type, case.script, runs]).encode()).hexdigest()[:16]


def read_logs(folder: Path, *, newest_start: bool = False) -> tuple[Values, Mapping[str, Any] | None]:
    """Of metrics.jsonl in a run's folder, else of TensorBoard's files; and the image. newest_start: without what was
    before the run's last start. Raises CaseError."""
    path = folder if folder.is_file() else folder / "metrics.jsonl"
    if not path.is_file():
        return _of_tensorboard(folder), None
    values: Values = {}
    image = None
    try:
        for record in read_metrics(path):
            if record.get("event") == "start":
                if newest_start:
                    values.clear()
                image, plan = record.get("image"), record.get("plan", {})
                values |= {name: {0: float(read(plan))} for name, read in _OF_PLAN.items() if plan}
            elif "event" not in record:
                step = record["iteration"]
                for name in record.keys() - {"iteration", "time", "consumed_samples"}:
                    values.setdefault(name, {})[step] = record[name]
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: {error}") from None
    except (TypeError, KeyError, AttributeError):
        raise CaseError(f"{path}: what it says of the plan is not this release's") from None
    return values, image


def _of_tensorboard(folder: Path) -> Values:
    if not any(folder.glob("events.out.tfevents.*")):
        raise CaseError(f"{folder}: neither metrics.jsonl nor TensorBoard's files")
    reader = optional.require("tensorboard.backend.event_processing.event_accumulator", "tb")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(" vs samples")]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def write_golden(path: Path, figures: RunFigures, metrics: Iterable[str]) -> None:
    """Raises OSError."""
    table: dict[str, Any] = {name: getattr(figures, name) for name in _ABOUT}
    for name in metrics:
        points = figures.values[name]
        steps = sorted(points)
        every = steps[1] - steps[0] if len(steps) > 1 else 1
        shown = {str(step): points[step] for step in steps}
        table[name] = dict(zip(_FIELDS, (steps[0], steps[-1], every, shown), strict=True))
    safe_files.publish_text(path, json.dumps(table, indent=1) + "\n")


def read_golden(path: Path) -> RunFigures:
    """Raises CaseError, naming file and metric."""
    try:
        table = json.loads(safe_files.read_text(path, max_bytes=MOST_BYTES))
    except FileNotFoundError:
        raise CaseError(f"{path}: no golden values: `tools/functional_tests.py record` writes them") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{path}: {error}") from None
    values: Values = {}
    for name, metric in table.items() if isinstance(table, dict) else ():
        if name in _ABOUT:
            continue
        try:
            values[name] = {int(step): float(value) for step, value in metric["values"].items()}
        except (TypeError, KeyError, ValueError, AttributeError):
            raise CaseError(
                f"{path}: {name!r:.60} has no values by steps, as Megatron's golden files"
            ) from None
    if not values:
        raise CaseError(f"{path}: no metrics")
    return RunFigures(values, **{name: table[name] for name in _ABOUT if name in table})
