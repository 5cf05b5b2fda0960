"""The memory of flat buffers: an arena a layout, a bucket's parts of it, and which dtypes they have.

At rest a rank holds one part of each bucket of a buffer (all of it where the buffer is unsharded); the arena's flat
buffers are these parts, one behind the other. Where a buffer is sharded, its full buckets are *transient*: tensors
whose storage has memory only while somebody gathers or fills them (`transient_memory`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import Bucket, FlatLayout
from megatron.core.distributed.sharding import holds_weights, main_grads_dtype, main_params_dtype
from megatron.core.module import ModelError
from megatron.core.transport.parallel_state import Group

_FLAGS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _FLAGS.items()}


@dataclasses.dataclass(frozen=True)
class ArenaGroups:
    """The ranks that share an arena. gather, reduce: those that each hold a part, on two communicators, so that gathers
    do not wait for reductions; outer: those that hold the same part, one in every instance."""

    gather: Group
    reduce: Group
    outer: Group


@dataclasses.dataclass(frozen=True)
class Arena:
    """The flat buffers at rest of one layout; padding means nothing.

    own_main_weights: None where main weights are (part of) `weights`. Frozen parameters have only weights. groups: None
    where nobody communicates. gathers_from_main: of weights the main ones alone rest, `weights` has memory inside
    `FlatBuffer.resting_weights` only.
    """

    layout: FlatLayout
    weights: Tensor
    own_main_weights: Tensor | None = None
    groups: ArenaGroups | None = None
    gathers_from_main: bool = False

    @property
    def trained(self) -> bool:
        return self.layout.trained

    @property
    def weights_rest(self) -> bool:
        """Whether `weights` has memory now."""
        return not self.gathers_from_main or self.weights.untyped_storage().nbytes() > 0

    @property
    def main_dtype(self) -> torch.dtype:
        """Of what the optimizer updates."""
        return (self.weights if self.own_main_weights is None else self.own_main_weights).dtype


@dataclasses.dataclass(frozen=True)
class BucketMemory:
    """What a rank holds of a bucket, all 1-D. Those that may be None are so for frozen parameters.

    At rest: weights, main_grads: this rank's part, [numel / ways]. optimizer_weights, optimizer_grads: what of these is
    the optimizer's. main_weights: what it updates; the very optimizer_weights where the dtypes agree.
    gathers_from_main: main_weights alone rest; weights, optimizer_weights are this rank's part of full_weights.
    Full: full_weights, full_grads: [numel]; the very tensors at rest where those are unsharded, else transient.
    """

    arena: int
    bucket: Bucket
    trained: bool
    weights: Tensor
    full_weights: Tensor
    gathers_from_main: bool
    main_weights: Tensor | None = None
    main_grads: Tensor | None = None
    full_grads: Tensor | None = None
    optimizer_grads: Tensor | None = None
    optimizer_weights: Tensor | None = None

    @property
    def name(self) -> str:
        return bucket_name(self.arena, self.bucket)

    @property
    def weights_at_rest(self) -> Tensor:
        """This rank's part of the weights as it rests: [numel / ways]."""
        return trained(self.main_weights) if self.gathers_from_main else self.weights

    def updated_weights(self) -> Tensor:
        """What the optimizer has written of the model's weights, in their dtype: a view, or where main weights alone
        rest a rounded copy."""
        if self.gathers_from_main:
            return trained(self.main_weights).to(self.weights.dtype)
        return trained(self.optimizer_weights)


def trained(tensor: Tensor | None) -> Tensor:
    """Of a bucket that is not frozen."""
    assert tensor is not None, "a frozen bucket"
    return tensor


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of their elements, whether they have memory now or not. None: of a frozen bucket."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def bucket_name(arena: int, bucket: Bucket) -> str:
    """Its units; its number where the model has none."""
    return "+".join(unit for unit in bucket.units if unit) or f"bucket {arena}.{bucket.index}"


def main_grad_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """What gradients are accumulated in: `sharding.main_grads_dtype`."""
    return _FLAGS[main_grads_dtype(_NAMES[weights], config)]


def grad_comm_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """What gradients travel in: --megatron-fsdp-grad-comm-dtype, or with auto what they are accumulated in."""
    flag = config.megatron_fsdp_grad_comm_dtype
    return main_grad_dtype(weights, config) if flag == "auto" else _FLAGS[flag]


def main_weight_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """`sharding.main_params_dtype`. Raises ModelError for one that cannot hold the model's weights."""
    name = main_params_dtype(_NAMES[weights], config)
    dtype = _FLAGS[name]
    if not holds_weights(name, _NAMES[weights]):
        raise ModelError(
            f"--megatron-fsdp-main-params-dtype {name}: main weights would be coarser than the model's, which are "
            f"{weights}; use fp32, or auto for the model's own"
        )
    return dtype
