"""Fully sharded data parallelism: weights, gradients and optimizer state cut over ranks, whole only where in use.

All rows of the sharding table over the flat buffer of `DistributedDataParallel`, with one bucket a unit of the model
and type of weights. Weights are gathered unit by unit as forward and backward come to them; gradients are reduced unit
by unit as backward leaves them. Source of the rows: ZeRO (Rajbhandari et al. 2020).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import BucketMemory
from megatron.core.distributed.custom_fsdp.drive import Drive
from megatron.core.distributed.custom_fsdp.gather import Gatherer
from megatron.core.distributed.custom_fsdp.hooks import UnitHooks
from megatron.core.distributed.custom_fsdp.ledger import Ledger
from megatron.core.distributed.custom_fsdp.memory import AllocatedMemory, DoubleBuffer, TransientMemory
from megatron.core.distributed.custom_fsdp.reduce import MicrobatchReduction
from megatron.core.distributed.custom_fsdp.reshard_plan import UnitFacts, UnitPolicy, policies
from megatron.core.distributed.custom_fsdp.slots import plan_slots
from megatron.core.distributed.custom_fsdp.traffic import (
    Moved,
    Traffic,
    UnitSize,
    default_bound,
    demand_order,
    gathers_of,
    peak_gathered,
    predict_step,
)
from megatron.core.distributed.custom_fsdp.units import Unit, UnitModule, find_units, forward_order
from megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel,
    Reduction,
    Weights,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import PartialSums
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.gradient_sources import Sinks
from megatron.core.distributed.outer_sums import OuterSums
from megatron.core.distributed.sharding import Cut
from megatron.core.module import MegatronModule, ModelError, ModelUnit
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.core.protocols import Work


class FullyShardedDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` by units, for every `--data-parallel-sharding-strategy`, over any `nn.Module`.

    units: declared by the model (of all chunks); without, a `MegatronModule` says them itself. fsdp_unit_modules: for
    other models, the classes of their modules that are one unit each, or tuples of names of modules that are one
    together. What is in none of them forms units of its own (`custom_fsdp/units.py`).

    A step is that of `DistributedDataParallel`, with `microbatch_done` after each backward. Communicates over dp_gather
    in forward and backward, over dp_reduce in backward, over dp_outer once a step.

    Raises ModelError where units do not fit the model, or where gradients are cut and the model is in several chunks.
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
        fsdp_unit_modules: Sequence[UnitModule] | None = None,
    ) -> None:
        self.ledger = Ledger()
        self._unit_modules = fsdp_unit_modules
        self._policies: dict[int, tuple[UnitPolicy, ...]] = {}  # by microbatches of a step
        super().__init__(chunks, ps, config, param_meta, sinks, stages, units=units)
        cut = self.sharding.main_grads is not Cut.WHOLE  # then every unit books its own
        held = self.buffer.persistent_bytes()
        self.ledger.book(
            {name: size for name, size in held.items() if size and not (cut and name == "main_grads")}
        )

    # What the row of the table decides ----------------------------------------------------------------

    def _find_units(self, declared: Sequence[ModelUnit] | None) -> tuple[Unit, ...]:
        if self.sharding.main_grads is not Cut.WHOLE and len(self.chunks) > 1:
            raise ModelError(
                f"--data-parallel-sharding-strategy {self.config.data_parallel_sharding_strategy}: a rank with "
                f"{len(self.chunks)} model chunks shards no more than its optimizer: use optim"
            )
        if declared is None:
            declared = _declared(self.chunks)
        units = find_units(self.chunks, self._chunks.parameters, declared, self._unit_modules)
        self._memory = self._new_memory(units)
        return units

    def _new_memory(self, units: Sequence[Unit]) -> TransientMemory:
        if not self.config.fsdp_double_buffer or self.sharding.main_grads is Cut.WHOLE:
            return AllocatedMemory(self.ledger)
        lasting = [unit.index for unit in units if unit.lasts]
        keeps = self.config.fsdp_reshard_policy != "memory"
        plan = plan_slots([1] * len(units), lasting=range(len(units)) if keeps else lasting)
        return DoubleBuffer(self.ledger, {unit.name: plan.slot_of[unit.index] for unit in units})

    def _new_buffer(self, param_meta: Mapping[str, ParamMeta]) -> FlatBuffer:
        return FlatBuffer(
            self._chunks.parameters,
            param_meta,
            self.config,
            sharding=self.sharding,
            place=self.place,
            device=self.ps.device.torch_device,
            stages=self._chunks.stage_of,
            units={name: unit.name for unit in self.units for name in unit.names},
            new_full=self._memory.new,
        )

    def _new_reduction(self, outer: OuterSums) -> Reduction:
        if self.sharding.main_grads is Cut.WHOLE:
            return super()._new_reduction(outer)
        self._by_microbatch = MicrobatchReduction(
            self.units,
            self.buffer,
            self.ps.dp_reduce_group,
            outer,
            PartialSums(self.buffer, self.ps.tp_group),
            self._memory,
            self.ledger,
            self.traffic,
            bound=self.bound,
            on_complete=lambda unit: self._weights.passed(unit),
        )
        return self._by_microbatch

    def _new_weights(self) -> Weights:
        if self.sharding.weights is Cut.WHOLE:
            return self._whole_weights()
        groups = self.ps.dp_gather_group, self.ps.dp_outer_group
        self._gatherer = Gatherer(
            self.units,
            self.buffer,
            *groups,
            self._memory,
            self.traffic,
            bound=self.bound,
            last=self._order[-1],
        )
        return self._gatherer

    def _install_hooks(self) -> None:
        cut = self.sharding.main_grads is not Cut.WHOLE
        if cut or self.config.overlap_param_gather:
            drive = Drive(self, self._reduction, self._weights)
            UnitHooks(self.chunks, self.units, drive, backward=cut)

    # Sizes and policies ---------------------------------------------------------------------------------

    @functools.cached_property
    def bound(self) -> int:
        """Elements gathered, and elements of gradients under way, at any time: --suggested-communication-unit-size."""
        given = self.config.suggested_communication_unit_size
        return default_bound(self.unit_sizes) if given is None else given

    @functools.cached_property
    def unit_sizes(self) -> tuple[UnitSize, ...]:
        """What the plans need to know of each unit's buckets."""
        sizes = []
        for unit in self.units:
            buckets = self.buffer.buckets_of_unit(unit.name)
            frozen = [one for one in buckets if not one.trained]
            sizes.append(
                UnitSize(
                    unit.name,
                    weight_bytes=sum(_bytes(one.full_weights) for one in buckets),
                    wire_bytes=sum(_bytes(one.full_grads) for one in buckets if one.full_grads is not None),
                    numel=sum(one.full_weights.numel() for one in buckets),
                    backward_reads=unit.backward_reads,
                    buckets=len(buckets),
                    frozen_bytes=sum(_bytes(one.full_weights) for one in frozen),
                )
            )
        return tuple(sizes)

    def begin_step(
        self, num_microbatches: int | None, *, reduce_gradients: bool = True, accumulate: bool = False
    ) -> None:
        if self.sharding.main_grads is not Cut.WHOLE:
            chosen = self.policies_for(num_microbatches or 1)
            self._by_microbatch.set_late([one.reduce_late for one in chosen])
            if self.sharding.weights is not Cut.WHOLE:
                self._gatherer.set_keep([one.keep for one in chosen])
        super().begin_step(num_microbatches, reduce_gradients=reduce_gradients, accumulate=accumulate)

    def policies_for(self, num_microbatches: int) -> tuple[UnitPolicy, ...]:
        """--fsdp-reshard-policy for steps of so many microbatches."""
        if num_microbatches not in self._policies:
            gathers = gathers_of(self.unit_sizes, self._order, kept_to_last_use=self._lasting)
            facts = [
                UnitFacts(size.name, size.weight_bytes, size.wire_bytes, gathers=max(1, times))
                for size, times in zip(self.unit_sizes, gathers, strict=True)
            ]
            self._policies[num_microbatches] = policies(
                facts,
                self.config.fsdp_reshard_policy,
                num_microbatches=num_microbatches,
                shard_ways=self.place.inner_size,
                weights_cut=self.sharding.weights is not Cut.WHOLE,
                grads_cut=self.sharding.main_grads is not Cut.WHOLE,
                budget_bytes=self.config.fsdp_memory_budget,
            )
        return self._policies[num_microbatches]

    def predicted_traffic(self, num_microbatches: int) -> Traffic:
        """What the collectives of a step move, if units run in the order in which they are registered."""
        cut = self.sharding.main_grads is not Cut.WHOLE
        return predict_step(
            self.unit_sizes,
            self.sharding,
            inner_size=self.place.inner_size,
            outer_size=self.place.outer_size,
            num_microbatches=num_microbatches,
            policies=self.policies_for(num_microbatches) if cut else None,
            kept_to_last_use=self._lasting,
            forward_order=self._order,
            outer_grad_bytes=self._outer_bytes(lambda one: one.optimizer_grads, lambda one: one.main_grads),
            outer_weight_bytes=self._outer_bytes(lambda one: one.weights, lambda one: one.weights),
        )

    def predicted_peak_gathered(self, num_microbatches: int) -> int:
        """The most elements gathered at once, under the same condition; 0 where weights are whole."""
        if self.sharding.weights is Cut.WHOLE:
            return 0
        order = demand_order(self.unit_sizes, self._order)
        chosen = self.policies_for(num_microbatches)
        return peak_gathered(
            self.unit_sizes, order, self.bound, kept_to_last_use=self._lasting, policies=chosen
        )

    @property
    def peak_gathered(self) -> int:
        """The most elements gathered at once so far; 0 where weights are whole."""
        return 0 if self.sharding.weights is Cut.WHOLE else self._gatherer.peak_gathered

    @property
    def _order(self) -> tuple[int, ...]:
        return forward_order(self.chunks, self.units)

    @property
    def _lasting(self) -> frozenset[int]:
        return frozenset(unit.index for unit in self.units if unit.lasts)

    def _outer_bytes(
        self, part: Callable[[BucketMemory], Tensor | None], cut: Callable[[BucketMemory], Tensor | None]
    ) -> list[int]:
        """Bytes by dtype of what outer ranks sum (`part`, HSDP) or cut among them (`cut`, HFSDP)."""
        sizes: dict[torch.dtype, int] = {}
        for bucket in self.buffer.buckets:
            tensor = (cut if self.sharding.optimizer is Cut.FULL else part)(bucket)
            if bucket.trained and tensor is not None:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + _bytes(tensor)
        return list(sizes.values())

    def _check_traffic(self, num_microbatches: int, *, new_weights: bool) -> None:
        """The step has moved what its plan says: all of it, or its reductions where units ran in another order.
        new_weights: without, what is gathered once after a step was not (the first step, one after a skipped one)."""
        expected = self.predicted_traffic(num_microbatches)
        if not new_weights:
            once = {"all_gather"} if self.sharding.weights is Cut.WHOLE else {"outer_all_gather"}
            expected = dataclasses.replace(expected, **dict.fromkeys(once, Moved()))
        counted = self.traffic.as_traffic()
        if self.sharding.weights is not Cut.WHOLE:
            uses = itertools.groupby(demand_order(self.unit_sizes, self._order))
            as_planned = tuple(unit for unit, _ in uses) == self._gatherer.order.demanded
            if not as_planned:
                counted = dataclasses.replace(counted, all_gather=expected.all_gather)
            else:
                peak = self.predicted_peak_gathered(num_microbatches)
                assert self._gatherer.peak_gathered <= peak, (self._gatherer.peak_gathered, peak)
        assert counted == expected, f"the step moved {counted}, its plan says {expected}"

    # GradSync -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last backward: gradients are complete where the optimizer reads them. Raises PeerLostError."""
        step = self._running("finish()")
        super().finish()
        if step.num_microbatches is not None:
            self._check_traffic(step.num_microbatches, new_weights=step.new_weights)

    def microbatch_done(self, chunk: int, microbatch: int) -> None:
        """A chunk has all its gradients of one microbatch."""
        super().microbatch_done(chunk, microbatch)
        left = self._running("microbatch done").chunks_left
        self._weights.end_microbatch(last=left is not None and left[chunk] == 0)

    def unshard(self, chunk: int, unit: int | None = None) -> Work:
        """Begin to gather a unit's weights, or all. Communicates over dp_gather."""
        if self.sharding.weights is Cut.WHOLE:
            return super().unshard(chunk, unit)
        units = range(len(self.units)) if unit is None else (unit,)
        return _Gathers([pending for one in units if (pending := self._gatherer.begin_unshard(one))])

    def wait(self, chunk: int, unit: int | None = None) -> None:
        """Return once the weights are whole."""
        if self.sharding.weights is Cut.WHOLE:
            super().wait(chunk, unit)
            return
        for one in range(len(self.units)) if unit is None else (unit,):
            self._gatherer.need(one)

    def weights_read(self, unit: int) -> None:
        """What `wait` gathered to be read outside of the model is not needed any more."""
        if self.sharding.weights is not Cut.WHOLE:
            self._gatherer.free(unit)

    def reshard(self, chunk: int, unit: int | None = None) -> None:
        """Free the whole weights of a unit, or of all."""
        if self.sharding.weights is not Cut.WHOLE:
            for one in range(len(self.units)) if unit is None else (unit,):
                self._gatherer.passed(one)


class _Gathers:
    """Gathers under way."""

    def __init__(self, pending: Sequence[Work]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


def _declared(chunks: Sequence[nn.Module]) -> list[ModelUnit] | None:
    """What the chunks declare themselves; None where one of them does not."""
    units: list[ModelUnit] = []
    for chunk in chunks:
        own = chunk.units() if isinstance(chunk, MegatronModule) else None
        if own is None:
            return None
        units += own
    return units


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
