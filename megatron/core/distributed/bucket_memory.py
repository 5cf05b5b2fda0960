"""The memory of flat buffers: an arena a layout, a bucket's parts of it, and which dtypes they have.

At rest a rank holds one part of each bucket of a buffer (all of it where the buffer is whole); the arena's flat buffers
are these parts, one behind the other. Where a buffer is cut, its whole buckets are *transient*: tensors whose storage
has memory only while somebody gathers or fills them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import Bucket, FlatLayout
from megatron.core.distributed.sharding import (
    Cut,
    Sharding,
    ShardPlace,
    holds_weights,
    main_grads_dtype,
    main_params_dtype,
)
from megatron.core.module import ModelError
from megatron.core.transport.parallel_state import Group

NewFull = Callable[[str, str, int, torch.dtype, torch.device], Tensor]
"""(role "weights" | "grads" | "extra", name of the unit or bucket, elements, dtype, device) -> a 1-D tensor of so many
elements, whose storage may be empty."""

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

    own_main_weights: None where main weights are (part of) `weights`. main_grads: None where they are cut
    (`BucketMemory` has them). Frozen parameters have only weights. groups: None where nobody communicates. rounds: of
    weights the main ones alone rest, `weights` has memory inside `FlatBuffer.resting_weights` only.
    """

    layout: FlatLayout
    weights: Tensor
    own_main_weights: Tensor | None = None
    main_grads: Tensor | None = None
    groups: ArenaGroups | None = None
    rounds: bool = False

    @property
    def trained(self) -> bool:
        return self.layout.trained

    @property
    def weights_rest(self) -> bool:
        """Whether `weights` has memory now."""
        return not self.rounds or self.weights.untyped_storage().nbytes() > 0

    @property
    def main_dtype(self) -> torch.dtype:
        """Of what the optimizer updates."""
        return (self.weights if self.own_main_weights is None else self.own_main_weights).dtype


@dataclasses.dataclass(frozen=True)
class BucketMemory:
    """What a rank holds of a bucket, all 1-D. Those that may be None are so for frozen parameters.

    At rest: weights, main_grads: this rank's part, [numel / ways]. optimizer_weights, optimizer_grads: what of these is
    the optimizer's. main_weights: what it updates; the very optimizer_weights where the dtypes agree.
    rounds: main_weights alone rest; weights, optimizer_weights are this rank's part of full_weights.
    Whole: full_weights, full_grads: [numel]; the very tensors at rest where those are whole, else transient.
    """

    arena: int
    bucket: Bucket
    trained: bool
    weights: Tensor
    full_weights: Tensor
    main_weights: Tensor | None
    main_grads: Tensor | None
    full_grads: Tensor | None
    optimizer_grads: Tensor | None
    optimizer_weights: Tensor | None
    rounds: bool

    @property
    def name(self) -> str:
        return bucket_name(self.arena, self.bucket)

    @property
    def resting(self) -> Tensor:
        """This rank's part of the weights as it rests: [numel / ways]."""
        if not self.rounds:
            return self.weights
        assert self.main_weights is not None, self.name
        return self.main_weights


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their elements, whether they have memory now or not."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those of buckets that are not frozen."""
    return [tensor for tensor in tensors if tensor is not None]


def bucket_name(arena: int, bucket: Bucket) -> str:
    """Its units; its number where the model has none."""
    return "+".join(unit for unit in bucket.units if unit) or f"bucket {arena}.{bucket.index}"


def own_storage(role: str, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A transient tensor with a storage of its own."""
    tensor = torch.empty(numel, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


@contextlib.contextmanager
def with_memory(tensor: Tensor) -> Iterator[Tensor]:
    """A transient tensor has memory inside; its values are anything. Views can be made only where there is memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        yield tensor
        return
    storage.resize_(int(tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    try:
        yield tensor
    finally:
        storage.resize_(0)


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


class ArenaMaker:
    """Allocates the arenas of a rank's layouts.

    Whole gradients of one dtype are one allocation (`main_grads_flat`). Cut ones are one a bucket, so that a bucket's
    can be without memory while they mean nothing: one allocation for all would be there from the first unit of the
    backward on, when activations are at their most.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        dtypes: Sequence[torch.dtype],
        config: DistributedDataParallelConfig,
        sharding: Sharding,
        place: ShardPlace,
        device: torch.device,
    ) -> None:
        ways = [place.ways(cut) for cut in (sharding.weights, sharding.main_grads, sharding.optimizer)]
        assert ways == sorted(ways), (
            f"{sharding} over {place}: each of weights, gradients, optimizer is cut as its predecessor or finer"
        )
        self._sharding, self._place, self._device = sharding, place, device
        self._config = config
        grads = [
            (main_grad_dtype(dtype, config), layout.numel_at_rest(place, sharding.main_grads))
            for layout, dtype in zip(layouts, dtypes, strict=True)
            if layout.trained and sharding.main_grads is Cut.WHOLE
        ]
        self.main_grads_flat = {
            wanted: torch.zeros(sum(n for dtype, n in grads if dtype == wanted), dtype=wanted, device=device)
            for wanted in dict.fromkeys(dtype for dtype, _ in grads)
        }
        used = dict.fromkeys(self.main_grads_flat, 0)
        self.arenas: list[Arena] = []
        for layout, dtype in zip(layouts, dtypes, strict=True):
            main = main_weight_dtype(dtype, config) if layout.trained else dtype
            rounds = main != dtype and sharding.rounds(place)
            weights = self._zeros(layout, sharding.weights, dtype, empty=rounds)
            if not layout.trained:
                self.arenas.append(Arena(layout, weights))
                continue
            main_weights, main_grads = None, None
            if main != dtype:
                main_weights = self._zeros(layout, sharding.optimizer, main)
            kept = main_grad_dtype(dtype, config)
            if sharding.main_grads is Cut.WHOLE:
                main_grads = self.main_grads_flat[kept].narrow(0, used[kept], layout.numel)
                used[kept] += layout.numel
            self.arenas.append(Arena(layout, weights, main_weights, main_grads, rounds=rounds))

    def bucket(
        self, arena: int, index: int, full_weights: Tensor | None, full_grads: Tensor | None
    ) -> BucketMemory:
        """The bucket's parts. full_weights, full_grads: its transient tensors, None where it is whole at rest."""
        assert (full_weights is None) == (self._sharding.weights is Cut.WHOLE), self._sharding
        memory, sharding = self.arenas[arena], self._sharding
        bucket = memory.layout.buckets[index]
        if memory.rounds:
            assert full_weights is not None, "nothing is gathered"
            start, end = memory.layout.shard(index, self._place, sharding.weights)
            with with_memory(full_weights) as whole:
                weights = whole[start - bucket.start : end - bucket.start]
        else:
            weights = self.at_rest(memory, index, memory.weights, sharding.weights)
        main_weights, main_grads, optimizer_grads, optimizer_weights = None, None, None, None
        if memory.trained:
            main_grads = self._main_grads(memory, index)
            optimizer_grads = self._narrowed(memory, index, main_grads, sharding.main_grads)
            narrowed = weights if memory.rounds else self._narrowed(memory, index, weights, sharding.weights)
            optimizer_weights = main_weights = narrowed
            if memory.own_main_weights is not None:
                main_weights = self.at_rest(memory, index, memory.own_main_weights, sharding.optimizer)
        return BucketMemory(
            arena=arena,
            bucket=bucket,
            trained=memory.trained,
            weights=weights,
            full_weights=weights if full_weights is None else full_weights,
            main_weights=main_weights,
            main_grads=main_grads,
            full_grads=main_grads if full_grads is None else full_grads,
            optimizer_grads=optimizer_grads,
            optimizer_weights=optimizer_weights,
            rounds=memory.rounds,
        )

    def _main_grads(self, arena: Arena, index: int) -> Tensor:
        """A bucket's gradients at rest."""
        if arena.main_grads is not None:
            return self.at_rest(arena, index, arena.main_grads, Cut.WHOLE)
        numel = arena.layout.buckets[index].numel // self._place.ways(self._sharding.main_grads)
        dtype = main_grad_dtype(arena.weights.dtype, self._config)
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def at_rest(self, arena: Arena, index: int, flat: Tensor, cut: Cut) -> Tensor:
        """A bucket's part of a flat buffer at rest."""
        start = arena.layout.rest_start(index, self._place, cut)
        return flat.narrow(0, start, arena.layout.buckets[index].numel // self._place.ways(cut))

    def _narrowed(self, arena: Arena, index: int, part: Tensor, cut: Cut) -> Tensor:
        """The optimizer's part of a bucket's part."""
        outside, _ = arena.layout.shard(index, self._place, cut)
        start, end = arena.layout.shard(index, self._place, self._sharding.optimizer)
        return part[start - outside : end - outside]

    def _zeros(self, layout: FlatLayout, cut: Cut, dtype: torch.dtype, *, empty: bool = False) -> Tensor:
        numel = layout.numel_at_rest(self._place, cut)
        if empty:
            return own_storage("weights", "", numel, dtype, self._device)
        return torch.zeros(numel, dtype=dtype, device=self._device)
