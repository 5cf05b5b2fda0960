"""Measuring a pipeline while it trains: what computations take, and what they hold, for solving its schedule again.

The profiler keeps the steps of a window (`--zero-bubble-pipeline-timers-start-iter`, `-end-iter`) and of every log
interval's last iteration in memory, and makes small figures of them (plan/rank_figures.py). Exchanging figures and
making a plan of them is the trainer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic

from torch import Tensor

from megatron.core.device import Device, heap_bytes
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.measured import Span
from megatron.core.pipeline_parallel.plan.rank_figures import Figures, RankStep, figures_of, median
from megatron.core.protocols import Stage
from megatron.core.transport.parallel_state import ParallelState

MOST_STEPS = 32  # that are kept; of more, the latest


class Profiler:
    """A `Recorder` (runtime/recorder.py) of the steps start <= iteration < end, and of every `interval`th one.

    interval: 0 = only the window. pipeline: world ranks of this rank's pipeline. transient_bytes: what the engine holds
    of weights and gradients that come and go; these are no activations.

    Steps that are not watched cost two looks at a clock an operation. In a watched one, each operation on CUDA is
    waited for, so that it overlaps less than others do; with gloo and CPU nothing waits. Steps that broke off, or that
    repeat operations, are not kept.
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
        assert 0 <= start <= end, f"a window from {start} to {end}"
        assert interval >= 0, f"interval {interval}"
        self._device, self._pipeline, self._transient_bytes = device, pipeline, transient_bytes
        self._start, self._end, self._interval = start, end, interval
        self._steps: deque[RankStep] = deque(maxlen=MOST_STEPS)
        self._peaks: deque[int] = deque(maxlen=MOST_STEPS)
        self._weighed: dict[int, _Weights] = {}
        self._plan: Plan | None = None
        self._rank = self._iteration = 0
        self._spans: dict[int, Span] = {}  # by place in the row
        self._watching = False
        self._begin_bytes = self._peak_bytes = 0

    @classmethod
    def of_run(
        cls,
        ps: ParallelState,
        window: tuple[int, int],
        log_interval: int,
        transient_bytes: Callable[[], int],
    ) -> Profiler | None:
        """Of pipelines with messages: the window (first iteration, first one behind it), and every log interval's last
        iteration where measuring makes nobody wait."""
        if ps.pp_size == 1:
            return None
        return cls(
            ps.device,
            ps.pp_group.ranks,
            start=window[0],
            end=window[1],
            interval=0 if ps.device.queues_work else log_interval,
            transient_bytes=transient_bytes,
        )

    def move_window(self, start: int, end: int) -> None:
        """Between steps: the window is start <= iteration < end from now on."""
        assert 0 <= start <= end, f"a window from {start} to {end}"
        self._start, self._end = start, end

    def watches(self, iteration: int) -> bool:
        """Whether this iteration is measured."""
        at_interval = self._interval > 0 and iteration % self._interval == 0
        return at_interval or self._start <= iteration < self._end

    @property
    def watching(self) -> bool:
        """Whether the step under way is measured."""
        return self._watching

    # Recorder --------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds of this machine's steady clock."""
        if self._watching:
            self._device.synchronize()  # sync: measured steps
        return monotonic()

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        self._watching = self.watches(iteration)
        if self._watching:
            self._plan, self._rank, self._iteration = plan, rank, iteration
            self._spans = {}
            self._begin_bytes = self._peak_bytes = self.in_use()

    def record(self, place: int, start_s: float, end_s: float, wait_s: float, lane_s: float = 0.0) -> None:
        if not self._watching:
            return
        assert place not in self._spans, f"operation {place} a second time"
        self._spans[place] = Span(start_s, end_s, wait_s, lane_s)
        self._peak_bytes = max(self._peak_bytes, self.in_use())

    def repeated(self) -> None:
        """A step like no other: messages of its first run arrived, or those of its second."""
        self._watching = False

    def end_step(self) -> None:
        """Keep the step if it came to its end."""
        if not self._watching:
            return
        self._watching = False
        assert self._plan is not None, "end_step without begin_step"
        if len(self._spans) == len(self._plan.rows[self._rank]):
            spans = tuple(self._spans[place] for place in range(len(self._spans)))
            self._steps.append(RankStep(self._iteration, self._plan, self._rank, spans))
            self._peaks.append(self._peak_bytes - self._begin_bytes)
        self._spans = {}

    def close(self) -> None:
        """The run is over: what was measured stays."""
        self._watching = False

    # What was measured -----------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """That are kept."""
        return len(self._steps)

    def local_figures(self, until: int | None = None) -> Figures | None:
        """What this rank measured since `forget`, small, JSON-able; None where no step was kept. until: the last
        iteration that counts; None: all do."""
        kept = [place for place, step in enumerate(self._steps) if until is None or step.iteration <= until]
        if not kept:
            return None
        activations = {
            stage: sizes for stage, of in self._weighed.items() if (sizes := of.sizes()) is not None
        }
        # All stages or none: a plan needs every one of them.
        whole = activations if len(activations) == len(self._weighed) else None
        steps = tuple(self._steps[place] for place in kept)
        peak = median(tuple(self._peaks[place] for place in kept))
        return figures_of(steps, self._pipeline, whole, peak)

    def figures_of_step(self, iteration: int) -> Figures | None:
        """How long this rank took for one step, and for its computations; None for a step that is not kept."""
        found = next((step for step in reversed(self._steps) if step.iteration == iteration), None)
        if found is None:
            return None
        return Figures(
            pipeline=list(self._pipeline),
            rank=found.rank,
            times=[],
            sends=[],
            receives=[],
            steps=[[found.iteration, found.span_ns, found.busy_ns]],
            activations=[],
            peak_bytes=0,
        )

    def forget(self, until: int | None = None) -> None:
        """What follows is measured by itself, as after a new plan. until: the last iteration that is forgotten; None:
        all are."""
        while self._steps and (until is None or self._steps[0].iteration <= until):
            self._steps.popleft()
            self._peaks.popleft()
        if not self._steps:
            for one in self._weighed.values():
                one.clear()

    # Memory ----------------------------------------------------------------------------------------

    def weigh(self, stages: Mapping[int, Stage]) -> dict[int, Stage]:
        """The same stages (of this rank, by global stage), weighed while a step is watched."""
        self._weighed = {stage: _Weights() for stage in stages}
        return {stage: _WeighedStage(one, self, self._weighed[stage]) for stage, one in stages.items()}

    def in_use(self) -> int:
        """Bytes of this rank's device now, on CPU of its heap, without those that come and go by the plan."""
        return bytes_in_use(self._device) - self._transient_bytes()


def bytes_in_use(device: Device) -> int:
    """CUDA: what tensors hold. CPU: the heap in use, without a C library that counts it the resident set."""
    heap = heap_bytes() if device.kind == "cpu" else None
    return device.memory().allocated_bytes if heap is None else heap


class _Weights:
    """What backwards of one stage gave back, in bytes. after_b: a W gave back. after_f: a BW, or a B without its W."""

    def __init__(self) -> None:
        self.fused: deque[int] = deque(maxlen=256)
        self.by_b: deque[int] = deque(maxlen=256)
        self.by_w: deque[int] = deque(maxlen=256)

    def clear(self) -> None:
        for one in (self.fused, self.by_b, self.by_w):
            one.clear()

    def sizes(self) -> tuple[int, int] | None:
        """(what F leaves, what is held of it between B and W). Where no B was seen, all is held until W."""
        if self.by_b and self.by_w:
            by_w = max(0, median(self.by_w))
            return max(0, median(self.by_b) + by_w), by_w
        if self.fused:
            whole = max(0, median(self.fused))
            return whole, whole
        return None


class _WeighedStage:
    """A `protocols.Stage` that hands everything on, and compares the bytes in use before and after a backward.

    [Note: weighed by what is given back] What a backward gives back is what F left: the graph's saved tensors and the
    input. The memory that an F takes is something else: its output belongs to the message that carries it away, unless
    the graph holds it too. What a backward returns is new, and belongs to the next message.
    """

    def __init__(self, stage: Stage, profiler: Profiler, weights: _Weights) -> None:
        self._stage, self._profiler, self._weights = stage, profiler, weights

    @property
    def splits(self) -> bool:
        return self._stage.splits

    def forward(self, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        return self._stage.forward(microbatch, hidden)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        if not self._profiler.watching:
            return self._stage.backward(microbatch, grad)
        before = self._profiler.in_use()
        answer = self._stage.backward(microbatch, grad)
        self._weights.fused.append(before - self._profiler.in_use() + _bytes(answer))
        return answer

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        if not self._profiler.watching:
            return self._stage.backward_input(microbatch, grad)
        before = self._profiler.in_use()
        answer = self._stage.backward_input(microbatch, grad)
        self._weights.by_b.append(before - self._profiler.in_use() + _bytes(answer))
        return answer

    def backward_weight(self, microbatch: int, units: tuple[int, int] | None = None) -> None:
        if not self._profiler.watching or units is not None:  # parts of a W are not weighed
            self._stage.backward_weight(microbatch, units)
            return
        before = self._profiler.in_use()
        self._stage.backward_weight(microbatch)
        self._weights.by_w.append(before - self._profiler.in_use())

    def check_empty(self) -> None:
        self._stage.check_empty()


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
