"""Data parallelism: every rank holds all weights of its stages, gradients are summed over ranks, bucket by bucket.

The first row (`no_shard`) of the table of sharding strategies over `FlatBuffer`, over all model chunks of a rank.
One step:

    ddp.begin_step(num_microbatches)
    forwards and backwards, in any order       # gradients arrive in the flat buffer
    ddp.finish()                               # after it: the sum over microbatches and ranks, the same on all ranks

Sums only: whoever uses the gradients divides once (`GradStats`, `step` of the optimizer), which costs one
rounding instead of one a microbatch. With `--ddp-average-in-collective` they come out divided by the number
of ranks, which `FlatBuffer.grads_divided_by` records and the optimizer takes into account.

[Note: complete gradients] A gradient is complete once its key has been reported as often as the step has
microbatches, in whatever order: pipelines have several microbatches under way at once. What is used on no microbatch
is completed by `microbatch_done`, where somebody calls it, else by `finish`.

[Note: sums in rank order] Up to two ranks a sum has one order. With more, gloo's ring adds each part of the
buffer in another order, and 16-bit sums round at every hop; there a bucket is exchanged (all-to-all), added
in rank order in fp32, and gathered. The result then depends neither on the buckets nor on the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import PartialSums, SharedSums
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.model_chunks import ModelChunks
from megatron.core.distributed.reduction_queue import ReductionQueue
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import GradRoute, ParamMeta, infer_param_meta
from megatron.core.protocols import GradSync, Work
from megatron.core.weight_grad import WeightGradAccumulator


@dataclasses.dataclass
class _Step:
    """A step under way. missing: reports still to come, by key. chunks_left: microbatches left, by chunk."""

    reduce_gradients: bool
    missing: dict[str, int]
    chunks_left: list[int]


class DistributedDataParallel(GradSync):
    """Reduces the gradients of any `nn.Module`s over the data parallel ranks.

    chunks: this rank's model chunks, or its only one; their parameters' names are those of the whole model.
    param_meta: facts about the parameters; derived for modules that are not ours. sinks: where each chunk's layers put
    their gradients; None for a plain module, whose gradients are taken from autograd's hooks. A chunk may have both.
    stages: the global pipeline stage of each chunk, 0, 1, ... by default.

    Communicates over dp_reduce; over tp and embedding where gradients have parts there (`finalize_model_grads`), and
    there once when built. In a world of one no communication and no copy.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        ps: ParallelState,
        config: DistributedDataParallelConfig,
        param_meta: Mapping[str, ParamMeta] | None = None,
        sinks: Sequence[WeightGradAccumulator | None] | WeightGradAccumulator | None = None,
        stages: Sequence[int] | None = None,
    ) -> None:
        self._chunks = ModelChunks(
            (chunks,) if isinstance(chunks, nn.Module) else tuple(chunks),
            None if stages is None else tuple(stages),
        )
        self.ps = ps
        self.config = config
        self._group = ps.dp_reduce_group
        if param_meta is None:
            param_meta = {n: fact for chunk in self.chunks for n, fact in infer_param_meta(chunk).items()}
        self.buffer = FlatBuffer(
            self._chunks.parameters,
            param_meta,
            config,
            dp_size=self._group.size,
            device=ps.device.torch_device,
            stages=self._chunks.stage_of,
        )
        self._queue = ReductionQueue(self.buffer, self._group, average=config.ddp_average_in_collective)
        self._step: _Step | None = None
        self._partial = PartialSums(self.buffer, ps.tp_group)
        self._shared = SharedSums(self.buffer, ps.embedding_group)
        self._reports: dict[str, int] = {}  # key -> reports a microbatch
        self._listen(self._sink_of_each_chunk(sinks))

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        return self._chunks.modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the only chunk."""
        assert len(self.chunks) == 1, f"one of {len(self.chunks)} chunks is meant: call ddp.chunks[i]"
        return self.chunks[0](*args, **kwargs)

    def broadcast_weights(self) -> None:
        """All ranks take data parallel rank 0's weights: for modules initialised from the rank's own generator."""
        for arena in self.buffer.arenas:
            collectives.broadcast(arena.weights, self._group)
        for name in self.buffer.frozen:
            collectives.broadcast(self.buffer.weight(name), self._group)
        self.buffer.copy_weights_to_main()

    def begin_step(self, num_microbatches: int, *, reduce_gradients: bool = True) -> None:
        """Start a step: gradients are zero, no bucket is reduced yet.

        reduce_gradients: without, they stay this rank's own, and `finish` is not called.
        """
        assert num_microbatches >= 1, f"a step of {num_microbatches} microbatches"
        self._queue.reset()
        self.buffer.zero_grads()
        self._step = _Step(
            reduce_gradients,
            {key: num_microbatches * reports for key, reports in self._reports.items()},
            [num_microbatches] * len(self.chunks),
        )

    def grad_ready(self, key: str, microbatch: int) -> None:
        """A contribution under `key` is complete (from the sinks). See [Note: complete gradients]."""
        self._count(key)

    def unshard(self, chunk: int, unit: int | None = None) -> Work:
        """Weights are always whole."""
        return _Done()

    def wait(self, chunk: int, unit: int | None = None) -> None:
        """Nothing to wait for."""

    def reshard(self, chunk: int, unit: int | None = None) -> None:
        """Nothing to free."""

    def microbatch_done(self, chunk: int, microbatch: int) -> None:
        """A chunk has all its gradients of one microbatch; after its last one, all that it will ever have."""
        assert self._step is not None, (
            f"microbatch {microbatch} done outside of a step: call begin_step() first"
        )
        left = self._step.chunks_left
        assert left[chunk] > 0, (
            f"chunk {chunk}: more microbatches done than the step has (number {microbatch})"
        )
        left[chunk] -= 1
        if left[chunk] == 0:
            self._complete_chunk(chunk)
            if self.config.overlap_grad_reduce:
                self._launch_complete()

    def reduce(self, chunk: int, unit: int | None = None, *, last: bool) -> Work:
        """Begin to sum what is complete, once a chunk's gradients are (`last`). A bucket that it shares with another
        chunk waits for that one, and all for the buckets before them."""
        assert self._step is not None, f"reduce of chunk {chunk} outside of a step: call begin_step() first"
        if not last:
            return _Done()  # sums in the middle of a step would be added up again
        self._step.chunks_left[chunk] = 0
        self._complete_chunk(chunk)
        self._launch_complete()
        return _Reduction(self._queue, self._queue.num_launched)

    def finish(self) -> None:
        """After the last backward: reduce what is left, wait for all, add what other ranks hold parts of.

        Raises PeerLostError.
        """
        assert self._step is not None, "finish() outside of a step: call begin_step() first"
        assert self._step.reduce_gradients, "finish() of a step begun without reduce_gradients"
        self._queue.launch_all()  # all without overlap; else those with unused parameters
        self._queue.wait()
        self._partial.add()
        self._shared.add()
        self._step = None

    def _sink_of_each_chunk(
        self, sinks: Sequence[WeightGradAccumulator | None] | WeightGradAccumulator | None
    ) -> tuple[WeightGradAccumulator | None, ...]:
        if sinks is None or isinstance(sinks, WeightGradAccumulator):
            return (sinks,) * len(self.chunks)
        assert len(sinks) == len(self.chunks), f"{len(sinks)} sinks for {len(self.chunks)} chunks"
        return tuple(sinks)

    def _listen(self, sinks: tuple[WeightGradAccumulator | None, ...]) -> None:
        """Bind every sink to the accumulators of its chunks' parameters; hooks for what autograd accumulates."""
        buffer = self.buffer
        keys_of: dict[int, tuple[WeightGradAccumulator, dict[str, Tensor]]] = {}
        for name in buffer.names:
            meta, holders = buffer.param_meta[name], self._chunks.holders[name]
            here = [sink for chunk in holders if (sink := sinks[chunk]) is not None]
            assert len(here) in (0, len(holders)), f"{name}: of chunks {holders} only some have a sink"
            self._reports |= dict.fromkeys(meta.grad_keys, 1)
            for sink in here:
                grads = keys_of.setdefault(id(sink), (sink, {}))[1]
                grads |= {key: buffer.main_grad(key) for key in meta.grad_keys}
            if not here or meta.route is GradRoute.AUTOGRAD:
                self._reports[name] = len(holders)  # each chunk's backward reports what it has accumulated
                self._chunks.parameters[name].register_post_accumulate_grad_hook(self._autograd_hook(name))
        for sink, grads in keys_of.values():
            sink.bind(grads, listener=self)

    def _autograd_hook(self, name: str) -> Callable[[Tensor], None]:
        main_grad = self.buffer.main_grad(name)

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            main_grad.add_(parameter.grad)
            parameter.grad = None
            self._count(name)

        return take

    def _count(self, key: str) -> None:
        step = self._step
        assert step is not None, f"a gradient for {key} outside of a step: call begin_step() first"
        if not step.reduce_gradients or not self.config.overlap_grad_reduce or self._group.size == 1:
            return
        assert not self._queue.is_launched(key), f"a gradient for {key} arrived after its bucket was reduced"
        step.missing[key] -= 1
        assert step.missing[key] >= 0, f"more gradients for {key} than the step has microbatches"
        if step.missing[key] == 0:
            self._queue.complete([key])
            self._launch_complete()

    def _complete_chunk(self, chunk: int) -> None:
        """No gradient of the chunk is still to come; one that another chunk holds too waits for both."""
        assert self._step is not None
        for name in self._chunks.names_of[chunk]:
            left = any(self._step.chunks_left[holder] for holder in self._chunks.holders[name])
            if name in self._reports and not left:  # frozen parameters report nothing
                self._queue.complete(self.buffer.param_meta[name].grad_keys)

    def _launch_complete(self) -> None:
        if self._step is not None and self._step.reduce_gradients:
            self._queue.launch_complete()


class _Done:
    """Work that needs none."""

    def wait(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """The reductions of the first `end` buckets."""

    queue: ReductionQueue
    end: int

    def wait(self) -> None:
        self.queue.wait(self.end)
