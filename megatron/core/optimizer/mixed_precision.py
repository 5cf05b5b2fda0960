"""The optimizer: torch's fused AdamW or SGD over flat main weights, in fp32 or better.

One step of the trainer: `prepare` (how large, is all of it finite; agreed by all ranks before any weight
changes), then `step`, or not. Gradients arrive as sums over microbatches and ranks; the division (tokens or
microbatches, ranks, loss scale) and the clipping are one multiplication here.

For 16-bit weights the main weights are fp32, and are rounded into the model's after each step. For fp32 and
fp64 weights they are the same memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.distributed.flat_buffer import Arena, FlatBuffer
from megatron.core.module import ModelError
from megatron.core.optimizer.clip_grads import norm_of, squared_sums, zero_counts
from megatron.core.optimizer.model_vector import ModelVector
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup, build_param_groups, flat_slices
from megatron.core.parallel_state import ParallelState
from megatron.core.protocols import Stepper


class OptimizerStateError(ValueError):
    """A checkpoint's optimizer state does not belong to this run's optimizer."""


@dataclasses.dataclass(frozen=True)
class GradStats:
    """What `prepare` found, after division by the divisor.

    norm, num_zeros (None unless counted): of the whole model. nonfinite: some rank's gradients have NaN or infinities;
    the same on all ranks. nonfinite_names: this rank's parameters that have them.
    """

    norm: float
    nonfinite: bool
    nonfinite_names: tuple[str, ...]
    num_zeros: int | None


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Copies of everything that a step changes."""

    num_steps: int
    tensors: list[Tensor]


class MixedPrecisionOptimizer(Stepper):
    """See the module. State exists from the start, so that a checkpoint can be read into it in
    place. Building it communicates over mp. Raises ModelError where all parameters are frozen."""

    def __init__(self, config: OptimizerConfig, buffer: FlatBuffer, ps: ParallelState) -> None:
        self.config = config
        self.buffer = buffer
        self.ps = ps
        self.num_steps = 0
        self._kept: _Snapshot | None = None
        self._vector = ModelVector(buffer, ps)
        if not self._vector.size:
            raise ModelError("nothing to train: all parameters are frozen; leave requires_grad on for some")
        self._slices = flat_slices(buffer)
        self._torch: torch.optim.Optimizer | None = None  # of a stage without parameters
        self.param_groups: list[ParamGroup] = []
        if self._slices:
            self._torch = _torch_optimizer(config, build_param_groups(config, buffer, self._slices))
            # torch keeps these very dicts; the scheduler writes lr and weight_decay into them.
            self.param_groups = cast(list[ParamGroup], self._torch.param_groups)
        # moment -> one flat tensor an arena
        self._moments = {
            moment: tuple(torch.zeros_like(arena.main_weights) for arena in buffer.arenas)
            for moment in _moment_names(config)
        }
        self._steps = [
            torch.zeros((), dtype=torch.float32, device=ps.device.torch_device) for _ in self._slices
        ]
        self._bind()

    def prepare(self, divisor: float, *, count_zero_grads: bool = False) -> GradStats:
        """Figures of the summed gradients divided by `divisor`. Communicates over mp and world; changes nothing."""
        divisor /= self.buffer.grads_divided_by
        grads = self._owned(self.buffer.main_grad)
        figures = [squared_sums(grads)]
        if count_zero_grads:
            figures.append(zero_counts(grads))
        sums, *zeros = self._vector.whole(self._vector.place(figures))
        names = self._vector.names_at(index for index, total in enumerate(sums) if not math.isfinite(total))
        flag = torch.tensor([float(not all(map(math.isfinite, sums)))], device=self.ps.device.torch_device)
        collectives.all_reduce(flag, self.ps.world_group, "max")
        return GradStats(
            norm=norm_of(sums) / divisor,
            nonfinite=bool(flag.item()),  # sync: the host decides whether to step
            nonfinite_names=names,
            num_zeros=int(sum(zeros[0])) if zeros else None,
        )

    def local_state(self) -> Tensor:
        """[regions of the whole model] fp64: squared sums of this rank's own gradients, undivided, 0 at all others.

        Summed over mp they are the squared norm; one that is not finite belongs to a gradient that is not.
        """
        return self._vector.place([squared_sums(self._owned(self.buffer.main_grad))])[0]

    def step(self, divisor: float, clip_coefficient: float = 1.0) -> None:
        """Update with gradients * clip_coefficient / divisor, then round main weights into the model's.

        Gradients in the buffer's own dtype are multiplied in place, unless there is a snapshot to go back to;
        16-bit ones are widened into a temporary.
        """
        factor = clip_coefficient * self.buffer.grads_divided_by / divisor
        for arena in self.buffer.arenas:
            grads = arena.main_grads.to(arena.main_weights.dtype)  # itself when the dtypes agree
            if factor != 1.0:
                keep = self._kept is not None and grads is arena.main_grads
                grads = grads * factor if keep else grads.mul_(factor)
            for piece in self._slices:
                if piece.arena is arena:
                    piece.parameter.grad = grads[piece.span.start : piece.span.end]
        if self._torch is not None:
            self._torch.step()
        for piece in self._slices:
            piece.parameter.grad = None  # frees the temporary
        self.num_steps += 1
        self.buffer.copy_main_to_weights()

    def snapshot(self) -> None:
        """Keep copies of weights, main weights, moments and step counts."""
        assert self._kept is None, "a snapshot is kept already: commit() forgets it"
        self._kept = _Snapshot(self.num_steps, [tensor.clone() for tensor in self._mutable()])

    def rollback(self) -> None:
        """Put back what `snapshot` kept, bit for bit. The snapshot stays until `commit`."""
        assert self._kept is not None, "rollback() without snapshot()"
        self.num_steps = self._kept.num_steps
        for tensor, kept in zip(self._mutable(), self._kept.tensors, strict=True):
            tensor.copy_(kept)

    def commit(self) -> None:
        """Forget what `snapshot` kept."""
        assert self._kept is not None, "commit() without snapshot()"
        self._kept = None

    def params_norm(self) -> float:
        """L2 norm of the main weights (--log-params-norm). Communicates over mp."""
        sums = squared_sums(self._owned(self.buffer.main_weight))
        return norm_of(self._vector.whole(self._vector.place([sums]))[0])

    def pieces(self) -> list[LocalPiece]:
        """Main weights (where they are not the model's) and moments, as pieces of global tensors."""
        pieces = []
        for name in self.buffer.names:
            meta = self.buffer.param_meta[name]
            if self.buffer.has_own_main_weight(name):
                pieces += pieces_of("optimizer.main_weight", meta, self.buffer.main_weight(name))
            for moment, flats in self._moments.items():
                flat = flats[self._arena_index(self.buffer.arena_of(name))]
                pieces += pieces_of(f"optimizer.{moment}", meta, self.buffer.view_like(flat, name))
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
        for step in self._steps:
            step.fill_(self.num_steps)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by moment."""
        return {
            name: sum(flat.numel() * flat.element_size() for flat in flats)
            for name, flats in self._moments.items()
        }

    def _owned(self, tensor_of: Callable[[str], Tensor]) -> list[Tensor]:
        """The regions that this rank answers for, of every parameter's gradient or weight."""
        return [region.view(tensor_of(name)) for name, region in self._vector.owned]

    def _mutable(self) -> Iterator[Tensor]:
        """Everything that `step` changes."""
        for arena in self.buffer.arenas:
            yield arena.weights
            if arena.has_main_weights:
                yield arena.main_weights
        for flats in self._moments.values():
            yield from flats
        yield from self._steps

    def _bind(self) -> None:
        """Give torch its state before the first step: views of our moments, and a step count a slice."""
        for piece, step in zip(self._slices, self._steps, strict=True):
            state: dict[str, Any] = {"step": step} if self.config.optimizer == "adam" else {}
            index = self._arena_index(piece.arena)
            for moment, flats in self._moments.items():
                state[moment] = flats[index][piece.span.start : piece.span.end]
            assert self._torch is not None
            self._torch.state[piece.parameter] = state

    def _arena_index(self, arena: Arena) -> int:
        return next(index for index, other in enumerate(self.buffer.arenas) if other is arena)


def build_optimizer(
    config: OptimizerConfig, buffer: FlatBuffer, ps: ParallelState
) -> MixedPrecisionOptimizer:
    """The optimizer of the flags over a flat buffer."""
    return MixedPrecisionOptimizer(config, buffer, ps)


def _torch_optimizer(config: OptimizerConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    """Adam decays decoupled (AdamW); SGD adds the decay to the gradient. The groups hold lr and decay."""
    params = cast(list[dict[str, Any]], groups)
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(params, betas=betas, eps=config.adam_eps, fused=True)
    return torch.optim.SGD(params, momentum=config.sgd_momentum, fused=True)


def _moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """torch's names for the state it keeps, one tensor each as large as the weights."""
    if config.optimizer == "adam":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if config.sgd_momentum else ()
