"""One rank's model chunks with their data parallel engine, optimizer, learning rate schedule and loss scaler, as
`run/build.py` builds them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from torch import Tensor, nn

from megatron.core.dist_checkpointing.state import LocalPiece, part_pieces, pieces_of
from megatron.core.distributed.custom_fsdp.bucket_memory import num_bytes
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import MegatronModule, ModelContext
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.plan.spec import StageSpec
from megatron.core.sharding_table import ShardOver
from megatron.core.transformer.experts.expert_bias import ExpertBiases
from megatron.core.units import declared_units
from megatron.core.weight_grad import WeightGradAccumulator


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A model chunk: what one of this rank's pipeline stages holds. sink: None for a model that is not ours.
    is_described: it is the GPT that the flags describe, so that they say what it holds."""

    stage: int
    spec: StageSpec
    module: nn.Module
    context: ModelContext
    sink: WeightGradAccumulator | None
    is_described: bool = False

    def set_input(self, hidden: Tensor | None) -> None:
        """Megatron's way to hand a stage what the one before has computed. Nothing on a stage that embeds."""
        if not self.spec.embedding:
            cast(MegatronModule, self.module).set_input_tensor(hidden)


@dataclasses.dataclass
class Engine:
    """Everything that one training step touches on this rank. provider: of its modules."""

    chunks: tuple[Chunk, ...]
    model: DistributedDataParallel
    param_meta: dict[str, ParamMeta]
    optimizer: MixedPrecisionOptimizer
    scheduler: OptimizerParamScheduler
    scaler: GradScaler
    biases: ExpertBiases
    provider: Callable[..., nn.Module]

    @property
    def memory_tracker(self) -> MemoryTracker:
        """What this rank's engine holds."""
        return self.model.memory_tracker

    @property
    def is_described(self) -> bool:
        """Whether flags say what all its chunks hold."""
        return all(chunk.is_described for chunk in self.chunks)

    @property
    def declares_units(self) -> bool:
        """Whether the model itself names what is gathered together, so that --fsdp-unit-modules has no effect."""
        return declared_units([chunk.module for chunk in self.chunks]) is not None

    def persistent_bytes(self) -> int:
        """What this rank holds when a step ends: weights, gradients, optimizer state, slots of the double buffer."""
        flat = sum(self.model.buffer.persistent_bytes().values())
        return flat + self.memory_tracker.live("moments") + self.memory_tracker.live("slots")

    def model_pieces(self) -> list[LocalPiece]:
        """The model's weights, under `model.<name>`, as a checkpoint holds them, up to date.

        Communicates over data parallel ranks where those of the last step are not gathered yet.
        """
        self.model.settle_weights()
        return weight_pieces(self.model.buffer) + bias_pieces(self.biases.named())


def bias_pieces(named: Mapping[str, Tensor]) -> list[LocalPiece]:
    """Biases of routers, which each rank has whole, as `weight_pieces`."""
    return [
        LocalPiece(f"model.{name}", tuple(one.shape), (0,) * one.dim(), one) for name, one in named.items()
    ]


def written_bytes(buffer: FlatBuffer, moments: int) -> int:
    """What a rank writes of a checkpoint at most, padding included: ranks that hold the same write as much of it each,
    to a tensor. moments: bytes of all of them here; 0: without the optimizer."""
    elements = sum(buffer.optimizer_numel(arena) for arena in buffer.arenas if arena.trained)
    total, share = 0.0, 1.0
    for arena in buffer.arenas:
        place, row = arena.place, arena.sharding
        share = min(share, part := place.ways(row.weights) / place.dp_size)
        total += arena.weights.nbytes * part
        if moments and arena.trained:
            own = moments * buffer.optimizer_numel(arena) / elements + num_bytes([arena.own_main_weights])
            total += own * place.ways(row.optimizer) / place.dp_size
    return math.ceil(total) + (share < 1.0) * largest_bytes(buffer)


def largest_bytes(buffer: FlatBuffer) -> int:
    """Of a tensor of a checkpoint, as a rank writes or reads it."""
    width = max(arena.main_dtype.itemsize for arena in buffer.arenas)
    return width * max(math.prod(meta.local_shape) for meta in buffer.param_meta.values())


def weight_pieces(buffer: FlatBuffer, names: Iterable[str] | None = None) -> list[LocalPiece]:
    """This rank's part of the model's weights, frozen ones too, under `model.<name>`: regions of the parameter where
    weights are not sharded, else rectangles of this rank's shard. Loading writes into them; weights of other ranks are
    gathered afterwards. names: all by default, in this order."""
    whole = buffer.sharding.weights is ShardOver.NONE
    pieces: list[LocalPiece] = []
    for name in buffer.param_meta if names is None else names:
        meta = buffer.param_meta[name]
        if whole or buffer.bucket_of(name) is None:
            pieces += pieces_of("model", meta, buffer.weight(name))
        else:
            start, end = buffer.part(name, buffer.sharding.weights)
            pieces += part_pieces("model", meta, buffer.weight_part(name), start, end)
    return pieces
