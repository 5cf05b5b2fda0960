"""The optimizer: torch's fused AdamW or SGD over flat main weights, in fp32 or better.

One step of the trainer: `prepare` (how large, is all of it finite; agreed by all ranks before any weight
changes), then `step`, or not. Gradients arrive as sums over microbatches and ranks; the division (tokens or
microbatches, ranks, loss scale) and the clipping are one multiplication here.

For 16-bit weights the main weights are fp32, and are rounded into the model's after each step. For fp32 and
fp64 weights they are the same memory. Where the optimizer is sharded, a rank keeps moments for its part and updates it;
the engine gathers what others have updated.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.state import LocalPiece, part_pieces
from megatron.core.distributed.custom_fsdp.bucket_memory import num_bytes
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.squared_sums import SquaredSums, all_finite, squared_sums_of_parts
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError
from megatron.core.optimizer.clip_grads import norm_of, zero_counts_of_parts
from megatron.core.optimizer.converted_grads import ConvertedGrads
from megatron.core.optimizer.flat_update import FlatUpdate, ParamGroup
from megatron.core.optimizer.global_norm_index import GlobalNormIndex
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.optimizer.step_bytes import changed_by_step, figure_bytes, update_bytes, validated_bytes
from megatron.core.param_meta import region_slices
from megatron.core.pipeline_parallel.post_validation.state import ValidationState
from megatron.core.protocols import Stepper
from megatron.core.schema import Schema, integer, text
from megatron.core.sharding_table import ShardOver
from megatron.core.transport import collectives
from megatron.core.transport.gloo_pairs import add_in_rank_order
from megatron.core.transport.host_data import host_values
from megatron.core.transport.parallel_state import ParallelState

OPTIMIZER_SCHEMA: Schema = {"optimizer": text(), "num_steps": integer()}  # `MixedPrecisionOptimizer.state`


class OptimizerStateError(ValueError):
    """A checkpoint's optimizer state does not belong to this run's optimizer."""


@dataclasses.dataclass(frozen=True)
class GradStats:
    """What `prepare` found, after division by the divisor.

    norm, num_zeros (None unless counted): of the whole model. nonfinite: some rank's gradients have NaN or infinities;
    the same on all ranks.
    """

    norm: float
    nonfinite: bool
    num_zeros: int | None


class RollbackBy(enum.Enum):
    """`--post-validation-rollback`. SNAPSHOT: copies, exact. INVERSE: arithmetic, approximate, without copies."""

    SNAPSHOT = "snapshot"
    INVERSE = "inverse"


@dataclasses.dataclass
class _Kept:
    """What `rollback` goes back to. copies: of everything that a step changes, but what is rounded from it; None: no
    copies, what steps since then multiplied gradients with (`factors`) is enough to take them back."""

    num_steps: int
    copies: list[Tensor] | None
    factors: list[float] = dataclasses.field(default_factory=list)


class MixedPrecisionOptimizer(Stepper):
    """See the module. State exists from the start, so that a checkpoint can be read into it in place. tracker: is told
    of converted gradients and snapshots. rollback_by: how `rollback` comes back; SNAPSHOT unless somebody writes
    another. Building it communicates over mp. Raises ModelError where all parameters are frozen."""

    def __init__(
        self,
        config: OptimizerConfig,
        buffer: FlatBuffer,
        ps: ParallelState,
        tracker: MemoryTracker | None = None,
    ) -> None:
        self._tracker = MemoryTracker() if tracker is None else tracker
        self.config = config
        self.buffer = buffer
        self.ps = ps
        self.num_steps = 0
        self.rollback_by = RollbackBy.SNAPSHOT
        self.followers: list[Stepper] = []  # whose steps are taken, and taken back, with these
        self._kept: _Kept | None = None
        self._index = GlobalNormIndex(buffer, ps)
        if not self._index.size:
            raise ModelError("nothing to train: all parameters are frozen; leave requires_grad on for some")
        self._update = FlatUpdate(config, buffer, ps.device.torch_device)
        # Of memory that lasts, so found once.
        self._grads = self._owned(buffer.main_grad_part)
        self._squared_sums = SquaredSums(self._grads)
        self._conversion = ConvertedGrads(buffer, self._tracker)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Rates by kind of parameter, which the scheduler writes; none where this rank has nothing to update."""
        return self._update.param_groups

    def prepare(self, divisor: float, *, count_zero_grads: bool = False) -> GradStats:
        """Figures of the summed gradients divided by `divisor`. Communicates over mp and, where that is more, world, or
        over dp and world where the optimizer is sharded; changes nothing. See [Note: the norm's bits] in clip_grads."""
        with self._tracker.holding("figures", self.figure_bytes(count_zero_grads=count_zero_grads)):
            full = self._figures(count_zero_grads)
            if self._sums_in_order:
                # In rank order, and told by the first: the sum of two is the same in any order, that of three is not.
                full = self._summed_over_stage(full)
                if self.ps.stage_group.rank > 0:
                    full.zero_()
            sums, *zeros = self._index.whole(full)
        nonfinite = not all(map(math.isfinite, sums))
        if not self._index.same_everywhere:
            flag = torch.tensor([float(nonfinite)], device=self.ps.device.torch_device)
            collectives.all_reduce(flag, self.ps.world_group, "max")
            nonfinite = any(host_values(flag))  # sync: the host decides whether to step
        return GradStats(self.norm(sums, divisor), nonfinite, int(sum(zeros[0])) if zeros else None)

    def norm(self, sums: Sequence[float], divisor: float) -> float:
        """Of the whole model, or of a part, from squared sums in the model's order."""
        return norm_of(sums) / (divisor / self.buffer.grads_divided_by)

    def stage_state(
        self, nonfinite: bool, *, count_zero_grads: bool = False, extras: Sequence[float] = ()
    ) -> ValidationState:
        """What this pipeline stage knows of a step, summed over its ranks and the same on all of them. nonfinite:
        this rank has seen a loss that is not finite. extras: this rank's, to be added up over all. Communicates over
        tp and dp.

        Added up over the pipeline it is what `prepare` goes by, bit for bit.
        """
        taken = self.figure_bytes(count_zero_grads=count_zero_grads, of_stage=True)
        with self._tracker.holding("figures", taken):
            full = self._figures(count_zero_grads)
            if self._index.over_world:
                full = self._summed_over_stage(full)
            elif self.ps.experts is not None:
                collectives.all_reduce(full, self.ps.stage_group)
            if self.ps.experts is None:
                collectives.all_reduce(full, self.ps.tp_group)
            rows = host_values(full)  # sync: figures that the host decides on
            del full
        seen = nonfinite or not all(map(math.isfinite, rows[0]))
        told = torch.tensor([seen, *extras], dtype=torch.float64, device=self.ps.device.torch_device)
        collectives.all_reduce(told, self.ps.dp_group)
        collectives.all_reduce(told, self.ps.tp_group)
        num_seen, *totals = host_values(told)  # sync: as above
        num_zeros = sum(rows[1]) if count_zero_grads else 0.0
        return ValidationState(tuple(rows[0]), num_zeros, num_seen > 0.0, tuple(totals))

    def step(self, divisor: float, clip_coefficient: float = 1.0) -> None:
        """Update with gradients * clip_coefficient / divisor, then round main weights into the model's.

        Gradients in the main weights' dtype are multiplied in place, unless there is a snapshot to go back to;
        others are converted into temporaries, a few buckets at a time. Updates this rank's parts only.
        """
        factor = clip_coefficient * self.buffer.grads_divided_by / divisor
        if self._kept is not None:
            self._kept.factors.append(factor)
        with self._tracker.holding("tails", self._update.tail_bytes):
            self._update.step(self._converted(factor))
        self.num_steps += 1
        self.buffer.copy_main_to_weights()
        for one in self.followers:
            one.step(divisor, clip_coefficient)

    def weights_finite(self) -> Tensor:
        """Whether this rank's part of the model's weights is finite: 0-d bool. Main weights are finite then, too, as
        they are what is rounded into them. Meant for right after `step`: one reading pass over that part."""
        return all_finite(memory.updated_weights() for memory in self.buffer.buckets if memory.trained)

    def snapshot(self) -> None:
        """Keep copies of this rank's part of main weights, moments and step counts; nothing with
        `RollbackBy.INVERSE`."""
        assert self._kept is None, "a snapshot is kept already: commit() forgets it"
        changed = None if self.rollback_by is RollbackBy.INVERSE else list(self._mutable())
        self._tracker.hold("snapshot", "", num_bytes(changed or ()))
        self._kept = _Kept(self.num_steps, changed and [one.clone() for one in changed])
        for one in self.followers:
            one.snapshot()

    def rollback(self) -> None:
        """Put back what `snapshot` kept, bit for bit, and this rank's part of the model's weights, which are rounded
        main weights; others' parts are for the engine to gather. The snapshot stays until `commit`.

        With `RollbackBy.INVERSE` about what it was: see inverse_update, [Note: what is lost]. Gradients and the groups'
        rates have to be those of the step.
        """
        assert self._kept is not None, "rollback() without snapshot()"
        if self._kept.copies is None:
            while self._kept.factors:
                self._update.undo(self._converted(self._kept.factors.pop()), self.num_steps)
                self.num_steps -= 1
        else:
            for tensor, kept in zip(self._mutable(), self._kept.copies, strict=True):
                tensor.copy_(kept)
        self.buffer.copy_main_to_weights()
        self.num_steps = self._kept.num_steps
        for one in self.followers:
            one.rollback()

    def commit(self) -> None:
        """Forget what `snapshot` kept."""
        assert self._kept is not None, "commit() without snapshot()"
        self._tracker.free("snapshot", "", num_bytes(self._kept.copies or ()))
        self._kept = None
        for one in self.followers:
            one.commit()

    def step_bytes(
        self, *, count_zero_grads: bool = False, snapshot: bool = False
    ) -> dict[str, dict[str, int]]:
        """What `prepare` and `step` take at most beside what lasts, by the timers' names of these parts of a step and
        the tracker's categories. Gradients are multiplied with anything but 1. snapshot: what `stage_state`, `snapshot`
        and `step` take, and, once copies are gone, a step that is taken back and taken again ("rollback")."""
        figures = {"figures": self.figure_bytes(count_zero_grads=count_zero_grads, of_stage=snapshot)}
        update = functools.partial(update_bytes, self._update, self._conversion)
        if not snapshot:
            return {"grad-norm": figures, "optimizer": update(in_place=True)}
        kept, inverse = self.snapshot_bytes(), self.rollback_by is RollbackBy.INVERSE
        return validated_bytes(figures, update, kept, inverse=inverse)

    def figure_bytes(self, *, count_zero_grads: bool, of_stage: bool = False) -> int:
        """What `prepare` takes; of_stage: `stage_state`."""
        summed = self._index.over_world if of_stage else self._sums_in_order
        ranks, own, device = self.ps.stage_group.size * summed, len(self._grads), self.ps.device.torch_device
        return figure_bytes(own, self._index.size, 1 + count_zero_grads, ranks, device)

    @property
    def _sums_in_order(self) -> bool:
        return self._index.over_world and self.ps.stage_group.size > 2

    def snapshot_bytes(self) -> int:
        """What `snapshot` takes."""
        own = 0 if self.rollback_by is RollbackBy.INVERSE else num_bytes(self._mutable())
        return own + sum(one.snapshot_bytes() for one in self.followers)

    def params_norm(self) -> float:
        """L2 norm of the main weights (--log-params-norm). Communicates over mp; over world where the optimizer is
        sharded."""
        sums = squared_sums_of_parts(self._owned(self.buffer.main_weight_part))
        return norm_of(self._index.whole(self._index.place([sums]))[0])

    def pieces(self) -> list[LocalPiece]:
        """What this rank holds of main weights (where they are not the model's) and moments, as pieces of global
        tensors."""
        buffer, pieces = self.buffer, []
        for name in buffer.names:
            start, end = buffer.updated_part(name)
            parts = {"main_weight": buffer.main_weight_part(name)} if buffer.has_own_main_weight(name) else {}
            memory = buffer.bucket_of(name)
            assert memory is not None, f"{name} is frozen"
            for moment, flats in self._update.moments.items():
                parts[moment] = buffer.view_part(flats[memory.arena], name)
            written = name not in self._index.of_earlier_stages  # which cut it at other places
            for what, part in parts.items():
                held = part_pieces(f"optimizer.{what}", buffer.param_meta[name], part, start, end)
                pieces += [dataclasses.replace(piece, written=written) for piece in held]
        return pieces

    def state(self) -> dict[str, Any]:
        """What is not tensors."""
        return {"optimizer": self.config.optimizer, "num_steps": self.num_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Call once the pieces have been read. Raises OptimizerStateError."""
        if state["optimizer"] != self.config.optimizer:
            raise OptimizerStateError(
                f"the checkpoint is of --optimizer {state['optimizer']}, this run uses "
                f"{self.config.optimizer}: use the same, or --no-load-optim"
            )
        self.num_steps = int(state["num_steps"])
        self._update.set_num_steps(self.num_steps)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by moment."""
        return self._update.persistent_bytes()

    def _figures(self, count_zero_grads: bool) -> Tensor:
        """[1 or 2, regions] fp64, this rank's own: squared sums, and how many elements are zero."""
        figures = [self._squared_sums()]
        if count_zero_grads:
            figures.append(zero_counts_of_parts(self._grads))
        return self._index.place(figures)

    def _summed_over_stage(self, full: Tensor) -> Tensor:
        """The sum over a stage's ranks that have parts of one region, in their order: the same bits on all of them, and
        for every transport."""
        group, total = self.ps.stage_group, torch.empty_like(full)
        everyone = full.new_empty(group.size * full.numel())
        collectives.all_gather(everyone, full.view(-1), group)
        add_in_rank_order(everyone.view(group.size, -1).unbind(), total.view(-1))
        return total

    def _owned(self, part_of: Callable[[str, ShardOver], Tensor]) -> list[list[Tensor]]:
        """What this rank answers for of the regions that it owns, of every parameter's gradient or weight: all of them
        where the optimizer is unsharded, else a part as small as all data parallel ranks together can make it."""
        cut = ShardOver.FULL if self._index.over_world else ShardOver.NONE
        found = []
        for name, region in self._index.owned:
            start, end = self.buffer.part(name, cut)
            shape = self.buffer.param_meta[name].local_shape
            found.append(region_slices(region, shape, part_of(name, cut), start, end))
        return found

    def _converted(self, factor: float) -> Iterator[tuple[dict[int, Tensor], bool]]:
        return self._conversion.batches(factor, in_place=self._kept is None)

    def _mutable(self) -> Iterator[Tensor]:
        return changed_by_step(self.buffer, self._update)


build_optimizer = MixedPrecisionOptimizer  # the optimizer of the flags over a flat buffer
