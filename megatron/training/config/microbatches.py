"""Global batch size and number of microbatches as a function of the samples consumed (floor 0)."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

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
            wrong = None
            if start < 1 or increment < 1 or samples < 0 or start > self.target:
                wrong = f"no ramp to {self.target}"
            elif (self.target - start) % increment:
                wrong = f"{self.target} - {start} is not divisible by the increment {increment}"
            elif (count := len(self.batch_sizes())) > MAX_SIZES:
                most = f"at most {MAX_SIZES} are possible: take a larger increment"
                wrong = f"{count} batch sizes up to {self.target}, {most}"
            if wrong is not None:
                raise BatchScheduleError(f"--rampup-batch-size {start} {increment} {samples}: {wrong}")
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
        iterations = 0
        for batch, steps in self._stretches():
            fit = samples // batch
            if steps is None or fit < steps:
                return iterations + fit
            samples, iterations = samples - steps * batch, iterations + steps
        raise AssertionError("the last stretch has no end")

    def samples_of(self, iterations: int) -> int:
        """Samples of a run of so many optimizer steps, the ramp included."""
        samples = 0
        for batch, steps in self._stretches():
            taken = iterations if steps is None else min(steps, iterations)
            samples, iterations = samples + taken * batch, iterations - taken
        return samples

    def _stretches(self) -> Iterator[tuple[int, int | None]]:
        """Batches, and how many steps in a row have them; None: all that follow."""
        consumed = 0
        while (scheduled := self._scheduled(consumed)) != self.target:
            assert self.rampup is not None, "a constant batch is its own target"
            batch, at = self.global_batch_size(consumed), range(consumed, self.rampup[2] + 1)
            # The batch never shrinks, so the first step of another one is found by halving.
            steps = bisect.bisect_right(at[::batch], scheduled, key=self._scheduled)
            yield batch, steps
            consumed += steps * batch
        yield self.global_batch_size(consumed), None


def ends_at(iteration: int, interval: int | None) -> bool:
    """Whether an interval of iterations ends here; None and 0: it never does."""
    return bool(interval) and iteration % (interval or 1) == 0
