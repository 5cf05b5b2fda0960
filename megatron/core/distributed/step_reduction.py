"""Gradients that every rank accumulates whole, and that are summed over ranks once, after the step's last microbatch.

[Note: complete gradients] A gradient is complete once its key has been reported as often as the step has
microbatches, in whatever order: pipelines have several microbatches under way at once. What is used on no microbatch
is completed by `complete_chunk`, where somebody calls it, else by `finish`. Where reductions are overlapped, further
contributions are refused before they are written: the bucket may be on its way.

[Note: sums in rank order] Up to two ranks a sum has one order. With more, gloo's ring adds each part of the
buffer in another order, and 16-bit sums round at every hop; there a bucket is exchanged, added in rank order in fp32,
and gathered. The result then depends neither on the buckets nor on the run.

[Note: shared parameters first] What another pipeline stage shares (tied embeddings) is summed over the stages before
it is summed over data parallel ranks: a rank's uses are added first, as one process does, and every row of the
sharding table gets the same bits. Its bucket, the last of the backward, waits for the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.core.distributed.finalize_model_grads import PartialSums, SharedSums
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.gradient_sources import late_message
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.outer_sums import OuterSums
from megatron.core.distributed.reduction_queue import ReductionQueue
from megatron.core.module import ModelError
from megatron.core.parallel_state import Group
from megatron.core.protocols import Work


class StepReduction:
    """The reduction of gradients that are whole at rest.

    overlap: reduce buckets as soon as they are complete. Communicates over the group of the queue (dp_reduce), and at
    the end of a step over embedding, tp and dp_outer where gradients have parts there.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        queue: ReductionQueue,
        outer: OuterSums,
        tp: Group,
        embedding: Group,
        *,
        overlap: bool,
        ledger: Ledger | None = None,
    ) -> None:
        self._buffer, self._queue, self._outer = buffer, queue, outer
        self._partial = PartialSums(buffer, tp, ledger=ledger)
        self._shared = SharedSums(buffer, embedding, ledger=ledger)
        self._shared_keys = frozenset(
            key
            for name in buffer.names
            if buffer.param_meta[name].shared
            for key in buffer.param_meta[name].grad_keys
        )
        self._overlap = overlap
        self._reports: Mapping[str, int] = {}
        self._missing: dict[str, int] = {}  # reports still to come, once it is known how many
        self._reduce = True

    def bind(self, reports: Mapping[str, int]) -> None:
        """How often each key is reported in a microbatch."""
        self._reports = reports

    def begin_step(self, num_microbatches: int | None, *, reduce_gradients: bool, accumulate: bool) -> None:
        """num_microbatches: None where `expect` tells it later. accumulate: add to what is there."""
        self._queue.reset(fresh=not accumulate)
        self._reduce = reduce_gradients
        self._missing, self._counts = {}, False
        if num_microbatches is not None:
            self.expect(num_microbatches)

    def release(self) -> None:
        """Whole gradients have their memory."""

    def expect(self, num_microbatches: int) -> None:
        """So many microbatches are still to come."""
        self._missing = {key: num_microbatches * reports for key, reports in self._reports.items()}
        self._counts = self._overlap and self._reduce and bool(self._missing)

    def hold_back(self, held_back: bool) -> None:
        """Nothing is reduced before the last microbatch anyway."""

    def grad_begins(self, key: str) -> bool:
        """Whether the contribution is the first. Raises ModelError where all have come, with overlap."""
        if self._counts and (self._missing[key] == 0 or self._queue.is_launched(key)):
            raise ModelError(
                late_message(key, "its bucket")
                + ", or leave out --overlap-grad-reduce. (Or more microbatches ran than begin_step() was told of.)"
            )
        return self._queue.begins(key)

    def grad_ready(self, key: str) -> None:
        """A contribution is complete. See [Note: complete gradients]."""
        if not self._counts:
            return
        left = self._missing[key] = self._missing[key] - 1
        if left <= 0:
            assert not self._queue.is_launched(key), (
                f"a gradient for {key} arrived after its bucket was reduced"
            )
            assert left == 0, f"more gradients for {key} than the step has microbatches"
            self._complete([key])
            self._queue.launch_complete()

    def forward_reached(self, unit: int) -> None:
        """Buckets have an order of their own."""

    def make_room(self, unit: int) -> None:
        """Whole gradients have their memory."""

    def passed(self, unit: int) -> None:
        """Only the step's last microbatch completes anything."""

    def microbatch_done(self, complete: Iterable[str], *, left: int) -> None:
        """complete: parameters that no further microbatch of the step contributes to. left: microbatches to come."""
        self._complete_all(complete)
        if self._overlap and self._reduce:
            self._queue.launch_complete()
        if left == 0 and not self._reduce:
            self._queue.zero_fresh()

    def launch(self, complete: Iterable[str]) -> Work:
        """Begin to sum what is complete; the result waits for it."""
        self._complete_all(complete)
        if self._reduce:
            self._queue.launch_complete()
        return _Launched(self._queue, self._queue.num_launched)

    def finish(self) -> None:
        """After the last backward: sum what is left, wait for all. Raises PeerLostError."""
        self._queue.zero_fresh(self._shared_keys)
        self._shared.add()
        self._queue.launch_all()  # all without overlap; else those with unused parameters
        self._queue.finish()
        self._outer.add()
        self._partial.add()

    def nonfinite_keys(self) -> tuple[str, ...]:
        """Gradients are there to be looked at."""
        return ()

    def _complete_all(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._reports:  # frozen parameters report nothing
                self._complete(self._buffer.param_meta[name].grad_keys)

    def _complete(self, keys: Iterable[str]) -> None:
        self._queue.complete(key for key in keys if key not in self._shared_keys)


class _Launched:
    """The reductions of the first `end` buckets."""

    def __init__(self, queue: ReductionQueue, end: int) -> None:
        self._queue, self._end = queue, end

    def wait(self) -> None:
        self._queue.wait(self._end)
