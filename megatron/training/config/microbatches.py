"""Global batch size and number of microbatches as a function of the samples consumed (floor 0)."""

from __future__ import annotations

import dataclasses

MAX_SIZES = 4096  # of a ramp: the run makes a pipeline plan for each


class BatchScheduleError(ValueError):
    """A global batch that does not divide into microbatches."""


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """Constant or ramped-up global batch.

    target: global batch size after the ramp, in samples.
    rampup: (start, increment, samples): the batch grows from start by increments, over this many samples.
    decrease_if_needed: round each batch down to a multiple of micro_batch_size x data_parallel_size.
    """

    micro_batch_size: int
    data_parallel_size: int
    target: int
    rampup: tuple[int, int, int] | None = None
    decrease_if_needed: bool = False

    def __post_init__(self) -> None:
        if self.rampup is not None:
            start, increment, samples = self.rampup
            if start < 1 or increment < 1 or samples < 0 or start > self.target:
                raise BatchScheduleError(
                    f"--rampup-batch-size {start} {increment} {samples}: no ramp to {self.target}"
                )
            if (self.target - start) % increment:
                raise BatchScheduleError(
                    f"--rampup-batch-size {start} {increment} {samples}: {self.target} - {start} is not "
                    f"divisible by the increment {increment}"
                )
            if (count := len(self.batch_sizes())) > MAX_SIZES:
                raise BatchScheduleError(
                    f"--rampup-batch-size {start} {increment} {samples}: {count} batch sizes up to {self.target}, at "
                    f"most {MAX_SIZES} are possible: take a larger increment"
                )
        for batch in self.batch_sizes():
            if batch < self._step or (batch % self._step and not self.decrease_if_needed):
                raise BatchScheduleError(
                    f"a global batch of {batch} samples does not divide into microbatches: micro batch size "
                    f"{self.micro_batch_size} x data parallel size {self.data_parallel_size} = {self._step}"
                )

    @property
    def _step(self) -> int:
        return self.micro_batch_size * self.data_parallel_size

    def batch_sizes(self) -> range:
        """Every global batch size that the run goes through, before rounding down."""
        if self.rampup is None:
            return range(self.target, self.target + 1)
        start, increment, _ = self.rampup
        return range(start, self.target + 1, increment)

    def _scheduled(self, consumed_samples: int) -> int:
        if self.rampup is None:
            return self.target
        start, increment, samples = self.rampup
        increments = (self.target - start) // increment
        if increments == 0 or consumed_samples > samples or samples == 0:
            return self.target
        # In floating point, as Megatron does, so that both change the batch at the same sample.
        return min(start + int(consumed_samples / (samples / increments)) * increment, self.target)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the next optimizer step once `consumed_samples` were trained on."""
        batch = self._scheduled(consumed_samples)
        return batch // self._step * self._step if self.decrease_if_needed else batch

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of the next step on each data parallel rank."""
        return self.global_batch_size(consumed_samples) // self._step

    def iterations_for(self, samples: int) -> int:
        """Whole optimizer steps in a run of `samples` samples, the ramp included."""
        consumed = iterations = 0
        while True:
            batch, steps = self._steps_alike(consumed)
            fit = (samples - consumed) // batch
            if steps is None or fit < steps:
                return iterations + fit
            consumed, iterations = consumed + steps * batch, iterations + steps

    def samples_of(self, iterations: int) -> int:
        """Samples of a run of so many optimizer steps, the ramp included."""
        consumed = done = 0
        while True:
            batch, steps = self._steps_alike(consumed)
            if steps is None or iterations - done <= steps:
                return consumed + (iterations - done) * batch
            consumed, done = consumed + steps * batch, done + steps

    def _steps_alike(self, consumed: int) -> tuple[int, int | None]:
        """The next step's batch, and how many steps in a row have it; None: all that follow."""
        batch, scheduled = self.global_batch_size(consumed), self._scheduled(consumed)
        if scheduled == self.target:
            return batch, None
        # The batch never shrinks, so the first step of another one is found by halving.
        few, many = 0, 1
        while self._scheduled(consumed + many * batch) == scheduled:
            few, many = many, 2 * many
        while many - few > 1:
            middle = (few + many) // 2
            alike = self._scheduled(consumed + middle * batch) == scheduled
            few, many = (middle, many) if alike else (few, middle)
        return batch, many


def ends_at(iteration: int, interval: int | None) -> bool:
    """Whether an interval of iterations ends here; None and 0: it never does."""
    return bool(interval) and iteration % (interval or 1) == 0
