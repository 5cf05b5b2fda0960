"""Measuring a pipeline while it trains: what computations take, for solving its schedule again, and what a step holds.

The profiler keeps the steps of a window (`--zero-bubble-pipeline-timers-start-iter`, `-end-iter`) and of every log
interval's last iteration in memory, and makes small figures of them (plan/measuring/measured_costs.py). Exchanging
figures and making a plan of them is the trainer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatron.core.device import Device
from megatron.core.machine import heap_bytes
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import (
    NOT_RUN,
    Figures,
    RankStep,
    figures_of,
    median,
)
from megatron.core.pipeline_parallel.runtime.recorder import StepReader

MOST_STEPS = 32  # that are kept; of more, the latest


class Profiler(StepReader):
    """Keeps the steps start <= iteration < end, and of every `interval`th one.

    interval: 0 = only the window, as on devices where measuring makes somebody wait. pipeline: world ranks of this
    rank's pipeline. transient_bytes: what the engine holds of weights and gradients that come and go; these are no
    activations.

    Steps that broke off, or that repeat operations, are not kept.
    """

    def __init__(
        self,
        device: Device,
        pipeline: tuple[int, ...],
        *,
        start: int,
        end: int,
        interval: int = 0,
        transient_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        assert interval >= 0, f"interval {interval}"
        self._device, self._pipeline, self._transient_bytes = device, pipeline, transient_bytes
        self._interval = 0 if device.queues_work else interval
        self.move_window(start, end)
        self._steps: deque[RankStep] = deque(maxlen=MOST_STEPS)
        self._step: RankStep | None = None  # under way, where it is watched
        self._begin_bytes = 0

    def move_window(self, start: int, end: int) -> None:
        """Between steps: the window is start <= iteration < end from now on."""
        assert 0 <= start <= end, f"a window from {start} to {end}"
        self._start, self._end = start, end

    def watches(self, iteration: int) -> bool:
        """Whether this iteration is measured."""
        at_interval = self._interval > 0 and iteration % self._interval == 0
        return at_interval or self._start <= iteration < self._end

    # StepReader ------------------------------------------------------------------------------------

    def begins(self, step: RankStep) -> bool:
        self._step = step if self.watches(step.iteration) else None
        if self._step is not None:
            self._begin_bytes = self.in_use()
        return self._step is not None

    def looks(self) -> None:
        assert self._step is not None, "an operation of no step"
        self._step.peak_bytes = max(self._step.peak_bytes, self.in_use() - self._begin_bytes)

    def reads(self, step: RankStep) -> None:
        """Keep the step if it came to its end."""
        self._step = None
        if not step.repeated and NOT_RUN not in step.spans:
            self._steps.append(step)

    # What was measured -----------------------------------------------------------------------------

    def local_figures(self, until: int | None = None, link_ns: int | None = None) -> Figures | None:
        """What this rank measured since `forget`, small, JSON-able; None where no step was kept. until: the last
        iteration that counts; None: all do. link_ns: of a message; None: as in the last of these."""
        kept = [one for one in self._steps if until is None or one.iteration <= until]
        if not kept:
            return None
        peak = median([one.peak_bytes for one in kept])
        link = kept[-1].link_ns if link_ns is None else link_ns
        return figures_of(kept, self._pipeline, peak, link)

    def figures_of_step(self, iteration: int) -> Figures | None:
        """Of one step; None for a step that is not kept."""
        if (found := self.step_of(iteration)) is None:
            return None
        return figures_of([found], self._pipeline, found.peak_bytes, found.link_ns)

    def step_of(self, iteration: int) -> RankStep | None:
        """As it ran; None for a step that is not kept."""
        return next((one for one in reversed(self._steps) if one.iteration == iteration), None)

    def forget(self, until: int | None = None) -> None:
        """What follows is measured by itself, as after a new plan. until: the last iteration that is forgotten; None:
        all are."""
        while self._steps and (until is None or self._steps[0].iteration <= until):
            self._steps.popleft()

    # Memory ----------------------------------------------------------------------------------------

    def in_use(self) -> int:
        """Bytes of this rank's device now, on CPU of its heap, without those that come and go by the plan."""
        return bytes_in_use(self._device) - self._transient_bytes()


def bytes_in_use(device: Device) -> int:
    """CUDA: what tensors hold. CPU: the heap in use, without a C library that counts it the resident set."""
    heap = heap_bytes() if device.kind == "cpu" else None
    return device.memory().allocated_bytes if heap is None else heap
