"""Data parallelism driven by hooks, for loops that have no plan.

The engine behind all rows of the table of sharding strategies (`sharding.py`), over all chunks of a rank. One step:

    ddp.begin_step(num_microbatches)
    forwards and backwards, in any order       # gradients arrive in the flat buffer
    ddp.finish()                               # sums over microbatches and ranks, where the optimizer reads them
    optimizer.step(...)
    ddp.weights_changed()                      # all ranks compute with the new weights

Sums only: whoever uses the gradients divides once (`GradStats`, `step` of the optimizer), which costs one
rounding instead of one a microbatch. With `--ddp-average-in-collective` contributions are divided by the number of
ranks as they are added, which `FlatBuffer.grads_divided_by` records and the optimizer takes into account.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.bucket_memory import NewFull, own_storage
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.drive import Drive
from megatron.core.distributed.engine_parts import Reduction, Weights
from megatron.core.distributed.flat_buffer import FlatBuffer, Reading, as_they_are
from megatron.core.distributed.gradient_sources import Sinks, connect
from megatron.core.distributed.hooks import UnitHooks
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.model_chunks import ModelChunks
from megatron.core.distributed.outer_sums import OuterSums
from megatron.core.distributed.reduction_queue import ReductionQueue
from megatron.core.distributed.sharding import Cut, Sharding, ShardPlace, sharding_of
from megatron.core.distributed.step_reduction import StepReduction
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.distributed.units import Unit, find_units
from megatron.core.distributed.whole_weights import WholeWeights
from megatron.core.module import ModelError, ModelUnit
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta, infer_param_meta
from megatron.core.protocols import Work


@dataclasses.dataclass
class _Step:
    """A step under way. new_weights: the first one with them. chunks_left: microbatches left, by chunk; None where
    nobody has said how many."""

    num_microbatches: int | None
    reduce_gradients: bool
    new_weights: bool
    chunks_left: list[int] | None


class HookDrivenDataParallel:
    """Reduces the gradients of any `nn.Module`s over the data parallel ranks: rows `no_shard` and `optim`.

    chunks: this rank's model chunks, or its only one; their parameters' names are those of the whole model.
    param_meta: facts about the parameters; derived for modules that are not ours. sinks: where each chunk's layers put
    their gradients; None for a plain module, whose gradients are taken from autograd's hooks. A chunk may have both.
    stages: the global pipeline stage of each chunk, 0, 1, ... by default. units: of all chunks, so that gathers
    overlapped with the forward are waited for unit by unit; without them the forward begins once all are there.

    Communicates over dp_reduce, and over dp_gather after a step where the optimizer is sharded; over dp_outer where
    there are several instances; over tp and embedding where gradients have parts there (`finalize_model_grads`), and
    there once when built. In a world of one no communication and no copy.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        ps: ParallelState,
        config: DistributedDataParallelConfig,
        param_meta: Mapping[str, ParamMeta] | None = None,
        sinks: Sinks = None,
        stages: Sequence[int] | None = None,
        *,
        units: Sequence[ModelUnit] | None = None,
    ) -> None:
        self._chunks = ModelChunks(
            (chunks,) if isinstance(chunks, nn.Module) else tuple(chunks),
            None if stages is None else tuple(stages),
        )
        self.ps = ps
        self.config = config
        self.place = _place(ps)
        self.sharding = effective_sharding(config, self.place)
        self.traffic = TrafficCounter()
        self.ledger = Ledger()
        if param_meta is None:
            param_meta = {n: fact for chunk in self.chunks for n, fact in infer_param_meta(chunk).items()}
        self._step: _Step | None = None
        self._weights_are_new = False
        # Told inside backwards: of each contribution; of each unit that backward comes to, where hooks tell of it.
        self.on_gradient: Callable[[], None] | None = None
        self.on_backward: Callable[[], None] | None = None
        self.units = self._find_units(units)
        self.buffer = self._new_buffer(param_meta)
        outer = OuterSums(self.buffer, ps.dp_outer_group, self.traffic, self.ledger)
        self._reduction = self._new_reduction(outer)
        self._weights = self._new_weights()
        self._scale = 1.0
        if config.ddp_average_in_collective:
            self._scale = 1.0 / self.place.dp_size
        self._hooks: list[RemovableHandle] = []
        self._reduction.bind(
            connect(self._chunks, self.buffer, sinks, self, scale=self._scale, hooks=self._hooks)
        )
        self._install_hooks()
        self._book_persistent()

    # What the row of the table decides ----------------------------------------------------------------

    def _find_units(self, declared: Sequence[ModelUnit] | None) -> tuple[Unit, ...]:
        """Units whose weights are waited for; () where nobody waits."""
        if not self.config.overlap_param_gather or self.sharding.optimizer is Cut.WHOLE:
            return ()
        whole = [ModelUnit(type(chunk).__name__, (chunk,)) for chunk in self.chunks]
        return find_units(self.chunks, self._chunks.parameters, declared or whole, None)

    def _new_buffer(self, param_meta: Mapping[str, ParamMeta]) -> FlatBuffer:
        return self._flat_buffer(param_meta)

    def _flat_buffer(
        self,
        param_meta: Mapping[str, ParamMeta],
        *,
        unit_of: Mapping[str, str] | None = None,
        new_full: NewFull = own_storage,
        reading: Reading = as_they_are,
    ) -> FlatBuffer:
        return FlatBuffer(
            self._chunks.parameters,
            param_meta,
            self.config,
            sharding=self.sharding,
            place=self.place,
            device=self.ps.device.torch_device,
            stages=self._chunks.stage_of,
            units=unit_of,
            new_full=new_full,
            reading=reading,
        )

    def _new_reduction(self, outer: OuterSums) -> Reduction:
        assert self.sharding.main_grads is Cut.WHOLE, (
            f"{self.sharding}: FullyShardedDataParallel cuts gradients"
        )
        queue = ReductionQueue(self.buffer, self.ps.dp_reduce_group, self.traffic, self.ledger)
        groups = self.ps.tp_group, self.ps.embedding_group
        overlap = self.config.overlap_grad_reduce
        return StepReduction(self.buffer, queue, outer, *groups, overlap=overlap, ledger=self.ledger)

    def _new_weights(self) -> Weights:
        return self._whole_weights()

    def _whole_weights(self) -> WholeWeights:
        place_of = {name: place for place, one in enumerate(self.buffer.buckets) for name in one.bucket.names}
        return WholeWeights(
            self.buffer,
            self.ps.dp_gather_group,
            self.traffic,
            overlap=self.config.overlap_param_gather,
            buckets_of={
                unit.index: sorted({place_of[name] for name in unit.names if name in place_of}, reverse=True)
                for unit in self.units
            },
        )

    def _install_hooks(self) -> None:
        if self.units:
            drive = Drive(self, self._reduction, self._weights)
            self._hooks += UnitHooks(self.chunks, self.units, drive, backward=False).handles

    def _book_persistent(self) -> None:
        """What lasts for the whole run; cut gradients, which do not, are booked unit by unit."""
        held = self.buffer.persistent_bytes()
        if self.sharding.main_grads is not Cut.WHOLE:
            del held["main_grads"]
        self.ledger.book({name: size for name, size in held.items() if size})

    # The model ------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        return self._chunks.modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the only chunk."""
        assert len(self.chunks) == 1, f"one of {len(self.chunks)} chunks is meant: call ddp.chunks[i]"
        return self.chunks[0](*args, **kwargs)

    # A step ---------------------------------------------------------------------------------------------

    def begin_step(
        self, num_microbatches: int | None, *, reduce_gradients: bool = True, accumulate: bool = False
    ) -> None:
        """Start a step: what gradients there are is overwritten, no bucket is reduced yet.

        num_microbatches: None where `expect_last` will say which is the last. reduce_gradients: without, they stay this
        rank's own, and `finish` is not called. accumulate: add to the sums of the step before.
        """
        assert num_microbatches is None or num_microbatches >= 1, f"a step of {num_microbatches} microbatches"
        new_weights = self._weights_are_new
        self._count_from_here(new_weights=False)
        self._reduction.begin_step(num_microbatches, reduce_gradients=reduce_gradients, accumulate=accumulate)
        self.buffer.grads_divided_by = round(1.0 / self._scale)
        left = None if num_microbatches is None else [num_microbatches] * len(self.chunks)
        self._step = _Step(num_microbatches, reduce_gradients, new_weights, left)

    def let_go(self) -> None:
        """Take all hooks off the model, which another engine is to have: this one's weights can still be read."""
        for handle in self._hooks:
            handle.remove()

    def release_gradients(self) -> None:
        """What gradients there are means nothing: cut ones have no memory until their unit's next reduction, unless
        somebody has made views of them since this was first called."""
        self._reduction.release()

    def expect_last(self) -> None:
        """The microbatch whose backward comes next is the last of a step whose length was not told."""
        step = self._running("expect_last()")
        assert step.chunks_left is None, "the step was begun with its number of microbatches"
        step.chunks_left = [1] * len(self.chunks)
        self._reduction.expect(1)

    def hold_back(self, held_back: bool) -> None:
        """From here on, whether nothing is reduced before the step's last microbatch."""
        self._reduction.hold_back(held_back)

    def backward_reached(self) -> None:
        """A backward comes to a unit; it need not contribute a gradient."""
        if self.on_backward is not None:
            self.on_backward()

    def grad_begins(self, key: str) -> bool:
        """A contribution is about to be written; whether it overwrites."""
        if self.on_gradient is not None:
            self.on_gradient()
        assert self._step is not None, f"a gradient for {key} outside of a step: call begin_step() first"
        return self._reduction.grad_begins(key)

    def grad_ready(self, key: str, microbatch: int) -> None:
        """A contribution under `key` is complete."""
        self._reduction.grad_ready(key)

    def microbatch_done(self, chunk: int, microbatch: int) -> None:
        """A chunk has all its gradients of one microbatch; after its last one, all that it will ever have."""
        step = self._running(f"microbatch {microbatch} done")
        if step.chunks_left is None:
            self._reduction.microbatch_done((), left=2)  # at least one more
            return
        assert step.chunks_left[chunk] > 0, (
            f"chunk {chunk}: more microbatches done than the step has (number {microbatch})"
        )
        step.chunks_left[chunk] -= 1
        left = step.chunks_left[chunk]
        self._reduction.microbatch_done(self._complete(chunk) if left == 0 else (), left=left)

    def reduce(self, chunk: int, unit: int | None = None, *, last: bool) -> Work:
        """Begin to sum what is complete, once a chunk's gradients are (`last`). A bucket that it shares with another
        chunk waits for that one, and all for the buckets before them."""
        step = self._running(f"reduce of chunk {chunk}")
        if not last:
            return _Done()  # sums in the middle of a step would be added up again
        if step.chunks_left is not None:
            step.chunks_left[chunk] = 0
        return self._reduction.launch(self._complete(chunk))

    def finish(self) -> None:
        """After the last backward: reduce what is left, wait for all, add what other ranks hold parts of.

        Raises PeerLostError.
        """
        step = self._running("finish()")
        assert step.reduce_gradients, "finish() of a step begun without reduce_gradients"
        self._reduction.finish()
        self._weights.end_step()
        self._step = None

    def nonfinite_keys(self) -> tuple[str, ...]:
        """Of a step without reduction, where gradients are not kept whole: those of this rank that were not finite."""
        return self._reduction.nonfinite_keys()

    # Weights --------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """The optimizer, a load or an initialisation has written this rank's weights at rest; in a step that is under
        way, whose forwards are done again."""
        if self._step is None:
            self._count_from_here(new_weights=True)
        else:
            self.traffic.reset()
            self._step.new_weights = True
        self._weights.weights_changed()

    def settle_weights(self) -> None:
        """On return the weights at rest are up to date: before they are read by anything but the model."""
        self._weights.settle()

    def unshard(self, chunk: int, unit: int | None = None) -> Work:
        """Weights are whole, perhaps once those of the last step have come."""
        return _Done()

    def wait(self, chunk: int, unit: int | None = None) -> None:
        """Return once the weights are those of the last step."""
        self._weights.settle()

    def reshard(self, chunk: int, unit: int | None = None) -> None:
        """Nothing to free."""

    # ---

    def _count_from_here(self, *, new_weights: bool) -> None:
        """A step's traffic begins with the gathers of its weights, which may begin before it does."""
        if new_weights or not self._weights_are_new:
            self.traffic.reset()
        self._weights_are_new = new_weights

    @property
    def is_stepping(self) -> bool:
        """Whether a step was begun and is not finished."""
        return self._step is not None

    @property
    def more_microbatches(self) -> bool:
        """Whether the step has another microbatch after the one under way, as far as is known."""
        return (
            self._step is not None and bool(self._step.chunks_left) and max(self._step.chunks_left or ()) > 1
        )

    def _running(self, what: str) -> _Step:
        assert self._step is not None, f"{what} outside of a step: call begin_step() first"
        return self._step

    def _complete(self, chunk: int) -> Iterator[str]:
        """Parameters of a chunk that no further microbatch contributes to; one of several chunks waits for all."""
        left = self._running("completion").chunks_left
        assert left is not None
        for name in self._chunks.names_of[chunk]:
            if not any(left[holder] for holder in self._chunks.holders[name]):
                yield name


def effective_sharding(config: DistributedDataParallelConfig, place: ShardPlace) -> Sharding:
    """The row of the table; what is cut into one part is whole. Raises ModelError where instances have one rank each
    and the optimizer is to be cut over them."""
    row = sharding_of(config.data_parallel_sharding_strategy, config.outer_dp_sharding_strategy)
    if place.inner_size == 1 and row.optimizer is Cut.FULL and place.outer_size > 1:
        raise ModelError(
            f"--num-distributed-optimizer-instances {place.outer_size}: an instance of one rank has nothing to shard, "
            "and --outer-dp-sharding-strategy optim needs something sharded: use fewer instances"
        )
    return row.at(place)


def _place(ps: ParallelState) -> ShardPlace:
    inner, outer = ps.dp_reduce_group, ps.dp_outer_group
    return ShardPlace(inner.rank, inner.size, outer.rank, outer.size)


class _Done:
    """Work that needs none."""

    def wait(self) -> None:
        pass
