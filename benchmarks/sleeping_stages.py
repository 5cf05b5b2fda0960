"""What benchmarks of the pipeline's runtime share: plans for stages that sleep, figures of their steps, the load."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine_load import busy_s
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, W
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import LINEAR
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import known
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate

MS = 1e-3


def planned(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    time_f: Sequence[float],
    time_b: Sequence[float],
    time_w: Sequence[float],
    comm: float,
    num_chunks: int | None = None,
) -> Simulation:
    """A registered schedule, made for these costs and with its transfers; times in ms of a whole rank, one for all or
    one a rank. num_chunks: of the schedules that have several; None: 2. Raises PlanError for what cannot be planned."""
    placement = known(schedule).placed(num_ranks, num_chunks)
    costs = CostModel.of_ranks(placement, time_f=time_f, time_b=time_b, time_w=time_w, comm=comm)
    chunks = None if placement.kind == LINEAR else placement.num_chunks
    plan = build_plan(schedule, Request(num_ranks, num_microbatches, chunks, costs=costs))
    return simulate(lower(plan, costs), costs)


class Clock:
    """The time of one rank, less `late_s`: how late the system woke it from its last sleep."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self.late_s

    def sleep_until(self, deadline: float) -> None:
        """Afterwards it is `deadline`, unless it was later already."""
        deadline = max(deadline, self.now())
        left = deadline - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.late_s = time.monotonic() - deadline


class SleepingStage:
    """`protocols.Stage` whose computations take a given time. Its tensors say when they were computed, and how late
    their sender is."""

    splits = True

    def __init__(self, stage: int, costs: CostModel, clock: Clock, log: list[tuple[float, float]]) -> None:
        self.times = {kind: costs.durations()[kind][stage] * MS for kind in (F, B, W, BW)}
        self.clock, self.log = clock, log

    def _compute(self, kind: int) -> Tensor:
        start = self.clock.now()
        end = start + self.times[kind]
        message = np.array(
            [end, 0.0]
        )  # shares its memory with the tensor: little is left to do after the sleep
        tensor = torch.from_numpy(message)
        self.log.append((start, end))
        self.clock.sleep_until(end)
        message[1] = self.clock.late_s
        return tensor

    def forward(self, microbatch: int, hidden: Tensor | None) -> Tensor:
        return self._compute(F)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor:
        return self._compute(BW)

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor:
        return self._compute(B)

    def backward_weight(self, microbatch: int) -> None:
        self._compute(W)

    def check_empty(self) -> None:
        pass


class Load:
    """How much of the machine other processes took inside a `with`. `foreign(own_s)` afterwards."""

    def __enter__(self) -> Load:
        self._before, self._start = _busy_s(), time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._after, self._elapsed_s = _busy_s(), time.monotonic() - self._start

    def foreign(self, own_s: float) -> float | None:
        """The share of all cores; own_s: CPU seconds of the processes that are ours. None where the system does not
        tell. What ours used before and after their steps counts as foreign."""
        if self._before is None or self._after is None:
            return None
        share = (self._after - self._before - own_s) / self._elapsed_s / (os.cpu_count() or 1)
        return max(0.0, share)


def _busy_s() -> float | None:
    try:
        return busy_s()
    except OSError:  # no /proc: not Linux
        return None


def median_and_least(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), min(values)


def share_text(share: float | None) -> str:
    """`12 %`, or that nobody knows."""
    return "unknown" if share is None else f"{100 * share:.0f} %"


def interleaved(names: Sequence[str], repeat: int) -> list[list[str]]:
    """The order of the steps of each round: everybody goes first in turn, so that nobody is always behind the same."""
    return [list(names[at % len(names) :]) + list(names[: at % len(names)]) for at in range(repeat)]


def times(text: str) -> list[float]:
    """`18` or `18,18,20`."""
    values = [float(word) for word in text.split(",")]
    if not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"times are finite and at least 0, not {text}")
    return values


def duration(text: str) -> float:
    """One time."""
    (value,) = times(text)
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {text}")
    return value
