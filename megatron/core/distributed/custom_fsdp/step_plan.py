"""What the steps of an engine will move and hold, from its units and flags; and that they did."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import BucketMemory, num_bytes
from megatron.core.distributed.custom_fsdp.reshard_plan import UnitFacts, UnitPolicy, policies
from megatron.core.distributed.custom_fsdp.traffic import (
    UnitSize,
    default_bound,
    demand_order,
    gathers_of,
    peak_gathered,
    predict_step,
)
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.traffic import Traffic
from megatron.core.distributed.units import Unit, forward_order
from megatron.core.traffic_counter import Moved


class StepPlan:
    """Built once. Everything in it holds for units that run in the order in which they are registered.

    sizes: of each unit. order: of the forward. bound: elements gathered, and elements of gradients under way, at any
    time.
    """

    def __init__(self, chunks: Sequence[nn.Module], units: Sequence[Unit], buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self.sizes = tuple(_size(unit, buffer) for unit in units)
        self.order = forward_order(chunks, units)
        given = buffer.config.suggested_communication_unit_size
        self.bound = default_bound(self.sizes) if given is None else given
        self._lasting = frozenset(unit.index for unit in units if unit.lasts)
        self._demands = demand_order(self.sizes, self.order)
        self._demands_without_repeats = tuple(unit for unit, _ in itertools.groupby(self._demands))
        self._policies: dict[int, tuple[UnitPolicy, ...]] = {}  # by microbatches of a step
        self._traffic: dict[int, Traffic] = {}
        self._peaks: dict[int, int] = {}

    @property
    def demands(self) -> tuple[int, ...]:
        """The units that a microbatch needs, in order; of one demand after the other of a unit, one."""
        return self._demands_without_repeats

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered by microbatches."""
        return self._buffer.sharding.weights is not Cut.WHOLE

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced by microbatches."""
        return self._buffer.sharding.main_grads is not Cut.WHOLE

    def policies(self, num_microbatches: int) -> tuple[UnitPolicy, ...]:
        """--fsdp-reshard-policy for steps of so many microbatches. Raises ReshardPlanError."""
        if num_microbatches not in self._policies:
            times = gathers_of(self.sizes, self.order, kept_to_last_use=self._lasting)
            facts = [
                UnitFacts(size.name, size.weight_bytes, size.wire_bytes, gathers=max(1, gathers))
                for size, gathers in zip(self.sizes, times, strict=True)
            ]
            config = self._buffer.config
            self._policies[num_microbatches] = policies(
                facts,
                config.fsdp_reshard_policy,
                num_microbatches=num_microbatches,
                shard_ways=self._buffer.place.inner_size,
                weights_cut=self.gathers,
                grads_cut=self.reduces,
                budget_bytes=config.fsdp_memory_budget,
            )
        return self._policies[num_microbatches]

    def traffic(self, num_microbatches: int) -> Traffic:
        """What the collectives of a step move."""
        if num_microbatches not in self._traffic:
            place, sharding, trained = self._buffer.place, self._buffer.sharding, self._trained()
            part = "main_grads" if sharding.optimizer is Cut.FULL else "optimizer_grads"
            self._traffic[num_microbatches] = predict_step(
                self.sizes,
                sharding,
                inner_size=place.inner_size,
                outer_size=place.outer_size,
                num_microbatches=num_microbatches,
                policies=self.policies(num_microbatches) if self.reduces else None,
                kept_to_last_use=self._lasting,
                forward_order=self.order,
                outer_grad_bytes=_by_dtype(getattr(bucket, part) for bucket in trained),
                outer_weight_bytes=_by_dtype(bucket.weights for bucket in trained),
            )
        return self._traffic[num_microbatches]

    def peak_gathered(self, num_microbatches: int) -> int:
        """The most elements gathered at once; 0 where weights are whole."""
        if not self.gathers:
            return 0
        if num_microbatches not in self._peaks:
            self._peaks[num_microbatches] = peak_gathered(
                self.sizes,
                self._demands,
                self.bound,
                kept_to_last_use=self._lasting,
                policies=self.policies(num_microbatches),
            )
        return self._peaks[num_microbatches]

    def check(
        self,
        num_microbatches: int,
        counted: Traffic,
        *,
        new_weights: bool,
        as_planned: bool,
        peak: int,
    ) -> None:
        """Assert that a step has moved what its plan says: all, or all but gathers where units ran in another order.

        new_weights: without, what is gathered once after a step was not (the first step, one after a skipped one).
        as_planned: whether all microbatches needed units in the planned order (gather.py). peak: the most elements
        gathered at once in the step.
        """
        expected = self.traffic(num_microbatches)
        if not new_weights:
            once = "outer_all_gather" if self.gathers else "all_gather"
            expected = dataclasses.replace(expected, **{once: Moved()})
        if self.gathers and not as_planned:
            counted = dataclasses.replace(counted, all_gather=expected.all_gather)
        elif self.gathers:
            most = self.peak_gathered(num_microbatches)
            assert peak <= most, f"{peak} elements were gathered at once, the plan says {most}"
        assert counted == expected, f"the step moved {counted}, its plan says {expected}"

    def _trained(self) -> list[BucketMemory]:
        return [bucket for bucket in self._buffer.buckets if bucket.trained]


def _size(unit: Unit, buffer: FlatBuffer) -> UnitSize:
    buckets = buffer.buckets_of_unit(unit.name)
    frozen = [one for one in buckets if not one.trained]
    return UnitSize(
        unit.name,
        weight_bytes=num_bytes(one.full_weights for one in buckets),
        wire_bytes=num_bytes(one.full_grads for one in buckets if one.full_grads is not None),
        numel=sum(one.full_weights.numel() for one in buckets),
        backward_reads=unit.backward_reads,
        buckets=len(buckets),
        frozen_bytes=num_bytes(one.full_weights for one in frozen),
    )


def _by_dtype(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + num_bytes([tensor])
    return list(sizes.values())
