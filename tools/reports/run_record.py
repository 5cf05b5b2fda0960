"""A run's metrics.jsonl, read: curves by tag, what happened, and totals."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.report.metrics import MEMORY_TAGS, TAGS
from megatron.training.report.metrics_file import read_metrics

NOT_LOSSES = {*TAGS.values(), *MEMORY_TAGS, "world-size"}
MAX_CURVES = 1000
MAX_METRICS_BYTES = 1 << 32
HELD_OUT = re.compile(r" (validation|test)(-\S+)?( ppl)?$")
_NO_LOSS = re.compile(rf"-time$|^(planned|measured)-|^moe/|(load_balancing|^z)_loss$|{HELD_OUT.pattern}")
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


class Curve(Sequence[tuple[int, float]]):
    """(iteration, value), 16 bytes a pair: a long run has millions."""

    def __init__(self) -> None:
        self.iterations, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: Any) -> Any:
        return self.iterations[i], self.values[i]

    def append(self, iteration: int, value: float) -> None:
        self.iterations.append(iteration)
        self.values.append(value)


@dataclasses.dataclass
class RunRecord:
    """A metrics file, read. samples: consumed, by iteration."""

    curves: dict[str, Curve]
    events: list[dict[str, Any]]
    samples: Curve = dataclasses.field(default_factory=Curve)
    first_time: float = math.nan
    last_time: float = math.nan
    consumed_samples: int = 0

    @property
    def last_iteration(self) -> int:
        return max((points[-1][0] for points in self.curves.values()), default=0)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "start"]

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the last start."""
        return self.starts[-1].get("config", {}) if self.starts else {}

    @property
    def layouts(self) -> str:
        """Over which ranks it was spread, one start after the other: "PP 2, zbv -> TP 2"."""
        return " -> ".join(dict.fromkeys(map(layout, self.starts)))

    @property
    def losses(self) -> list[str]:
        """Tags of training losses."""
        return [tag for tag in self.curves if not (tag in NOT_LOSSES or _NO_LOSS.search(tag))]

    @property
    def validation_losses(self) -> list[str]:
        """Tags of losses on validation and test sets, without their perplexities."""
        return [tag for tag in self.curves if HELD_OUT.search(tag) and not tag.endswith(" ppl")]

    def finite(self, tag: str) -> list[float]:
        """Values of a curve that are numbers."""
        return [value for _, value in self.curves.get(tag, ()) if math.isfinite(value)]

    def last_mean(self, tag: str, until: float = math.inf) -> tuple[float, int, int]:
        """Mean of what is finite over the last --log-interval, as the console's lines have it, and from which
        iteration to which; NaN where nothing is finite. until: an iteration."""
        points = [(at, y) for at, y in self.curves.get(tag, ()) if at <= until and math.isfinite(y)]
        if not points:
            return math.nan, 0, 0
        last = max(at for at, _ in points)
        # A record is a mean since the one before it.
        interval = max(at_least_1(self.config.get(f"{name}log_interval")) for name in ("", "tensorboard_"))
        first = max(last - interval, 0) + 1
        values = [y for at, y in points if at >= first]
        return sum(values) / len(values), first, last

    @property
    def parameters(self) -> int | None:
        """Of the model, as the run has counted them; None in records of runs that have not."""
        counts = [count for start in self.starts if type(count := start.get("parameters")) is int]
        return counts[-1] if counts else None

    @property
    def tokens(self) -> int | None:
        """Consumed; None where the sequence length is not known."""
        length = self.config.get("seq_length")
        return self.consumed_samples * length if type(length) is int else None

    def seconds(self) -> Curve:
        """Seconds of training up to an iteration, without start-up, evaluations and checkpoints."""
        made, total, before = Curve(), 0.0, 0
        for iteration, value in self.curves.get("iteration-time", ()):
            total += value * max(iteration - before, 0) if math.isfinite(value) else 0.0
            before = iteration
            made.append(iteration, total)
        return made


def read_run(metrics_path: str | Path) -> RunRecord:
    """Read a metrics file. Raises ValueError for a damaged one, OSError for one that cannot be read."""
    run = RunRecord({}, [])
    if (size := os.stat(metrics_path).st_size) > MAX_METRICS_BYTES:
        raise ValueError(f"{metrics_path}: {size} bytes; at most {MAX_METRICS_BYTES} are read: give a part")
    for record in read_metrics(metrics_path):
        if (moment := record.get("time")) is not None:
            run.first_time = moment if math.isnan(run.first_time) else run.first_time
            run.last_time = moment
        if "event" in record:
            run.events.append(record)
            continue
        run.consumed_samples = record.get("consumed_samples", run.consumed_samples)
        run.samples.append(record["iteration"], run.consumed_samples)
        for tag, value in record.items():
            if tag in ("iteration", "time", "consumed_samples"):
                continue
            if tag not in run.curves and len(run.curves) == MAX_CURVES:
                raise ValueError(
                    f"{metrics_path}: more than {MAX_CURVES} names of numbers: are these metrics?"
                )
            run.curves.setdefault(tag, Curve()).append(record["iteration"], value)
    return run


def layout(start: Mapping[str, Any]) -> str:
    """How a start spread the run over ranks: "PP 2, DP 2, zbv, optim_grads_params"."""
    config = start.get("config", {})
    sizes = [at_least_1(config.get(name)) for name in SIZES]
    sizes.append(at_least_1(start.get("world_size")) // math.prod(sizes))
    named = [f"{name} {size}" for name, size in zip(("TP", "PP", "CP", "DP"), sizes, strict=True) if size > 1]
    if sizes[1] > 1 and (schedule := config.get("pipeline_schedule")):
        named.append(str(schedule))
    sharding = config.get("data_parallel_sharding_strategy", "no_shard")
    if sizes[3] > 1 and config.get("use_distributed_optimizer"):
        named.append("distributed optimizer")
    elif sizes[3] > 1 and sharding != "no_shard":
        named.append(str(sharding))
    return ", ".join(named) or "1 rank"


def at_least_1(value: Any) -> int:
    """A size of a record, 1 where it is none."""
    return value if type(value) is int and value > 0 else 1
