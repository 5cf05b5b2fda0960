"""The memory of flat buffers: an arena a layout, a bucket's parts of it, and a model's parameters as views of them.

At rest a rank holds one part of each bucket of a buffer (all of it where the buffer is unsharded); the arena's flat
buffers are these parts, one behind the other. Where a buffer is sharded, its full buckets are *transient*: tensors
whose storage has memory only while somebody gathers or fills them (`transient_memory`). Parameters become views of
their buckets' full weights, accumulators of full gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp import sharding as flags
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.shard_layout import Bucket, FlatLayout
from megatron.core.distributed.custom_fsdp.transient_memory import own_storage, with_memory
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta
from megatron.core.sharding_table import RankGroup, Sharding, ShardOver, ShardPlace, rank_groups
from megatron.core.transport.parallel_state import Group
from megatron.core.transport.traffic import Traffic, traffic_of

_FLAGS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _FLAGS.items()}

# (role "weights" | "grads" | "extra", name of the unit or bucket, elements, dtype, device) -> a 1-D tensor of so many
# elements, whose storage may be empty.
NewFull = Callable[[str, str, int, torch.dtype, torch.device], Tensor]


@dataclasses.dataclass(frozen=True)
class ArenaGroups:
    """The ranks that share an arena. gather, reduce: those that each hold a part, on two communicators, so that gathers
    do not wait for reductions; outer: those that hold the same part, one in every instance."""

    gather: Group
    reduce: Group
    outer: Group
    names: tuple[str, str] = ("dp", "outer")  # as plans call the ranks that cut states, and the instances

    @property
    def place(self) -> ShardPlace:
        """Of this rank in them."""
        inner, outer = self.reduce, self.outer
        return ShardPlace(inner.rank, inner.size, outer.rank, outer.size)

    @property
    def rank_groups(self) -> tuple[RankGroup, RankGroup]:
        """The ranks that cut states, and the instances that repeat them."""
        return rank_groups(self.place, self.names)

    def moved(self) -> Traffic:
        """Since they were made."""
        inner, outer = (self.gather.traffic, self.reduce.traffic), self.outer
        return traffic_of(*inner, outer.traffic, (self.reduce.size, outer.size))


@dataclasses.dataclass(frozen=True)
class ArenaSharding:
    """How arenas are cut. sharding: the effective row at `place`. groups: None where nobody communicates."""

    sharding: Sharding
    place: ShardPlace
    groups: ArenaGroups | None = None

    def __post_init__(self) -> None:
        row = self.sharding
        ways = [self.place.ways(cut) for cut in (row.weights, row.main_grads, row.optimizer)]
        assert ways == sorted(ways), (
            f"{row} over {self.place}: each of weights, gradients, optimizer is cut as its predecessor or finer"
        )


@dataclasses.dataclass(frozen=True)
class Arena:
    """The flat buffers at rest of one layout; padding means nothing.

    cut: over whom. own_main_weights: None where main weights are (part of) `weights`. Frozen parameters have only
    weights. gathers_from_main: of weights the main ones alone rest, `weights` has memory inside
    `FlatBuffer.resting_weights` only.
    """

    layout: FlatLayout
    cut: ArenaSharding
    weights: Tensor
    own_main_weights: Tensor | None = None
    gathers_from_main: bool = False

    @property
    def sharding(self) -> Sharding:
        return self.cut.sharding

    @property
    def place(self) -> ShardPlace:
        return self.cut.place

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
    """Its unit; its number where the model has none."""
    return bucket.unit or f"bucket {arena}.{bucket.index}"


def main_grad_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """What gradients are accumulated in: `sharding.main_grads_dtype`."""
    return _FLAGS[flags.main_grads_dtype(_NAMES[weights], config)]


def grad_comm_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """What gradients travel in: --megatron-fsdp-grad-comm-dtype, or with auto what they are accumulated in."""
    flag = config.megatron_fsdp_grad_comm_dtype
    return main_grad_dtype(weights, config) if flag == "auto" else _FLAGS[flag]


def main_weight_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """`sharding.main_params_dtype`. Raises ModelError for one that cannot hold the model's weights."""
    name = flags.main_params_dtype(_NAMES[weights], config)
    if not flags.holds_weights(name, _NAMES[weights]):
        raise ModelError(
            f"--megatron-fsdp-main-params-dtype {name}: main weights would be coarser than the model's, which are "
            f"{weights}; use fp32, or auto for the model's own"
        )
    return _FLAGS[name]


@dataclasses.dataclass
class BufferMaker:
    """arenas, buckets: of layouts. weights: parameter -> its view, without autograd. grads: key -> accumulator, in the
    parameter's shape. extra_grads: key of a further use -> its accumulator, 1-D, outside of the layout.

    Unsharded gradients of one dtype are one allocation (`flat_grads`). Sharded ones are one a bucket, so that a
    bucket's can be without memory while they mean nothing: one allocation for all would be there from the first unit of
    the backward on, when activations are at their most.

    new_full: makes transient tensors.
    """

    parameters: Mapping[str, nn.Parameter]
    param_meta: Mapping[str, ParamMeta]
    config: DistributedDataParallelConfig
    device: torch.device
    new_full: NewFull

    def make(self, layouts: Sequence[tuple[FlatLayout, ArenaSharding]]) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.weights: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.extra_grads: dict[str, Tensor] = {}
        self.arenas: list[Arena] = []
        self.buckets: list[BucketMemory] = []
        dtypes = {str(p.dtype): p.dtype for p in self.parameters.values()}
        numel: dict[torch.dtype, int] = {}
        for layout, cut in layouts:
            if layout.trained and cut.sharding.main_grads is ShardOver.NONE:
                dtype = main_grad_dtype(dtypes[layout.dtype], self.config)
                numel[dtype] = numel.get(dtype, 0) + layout.numel
        self.flat_grads = {dtype: self._zeros(size, dtype) for dtype, size in numel.items()}
        self._grads_left = dict(self.flat_grads)
        for index, (layout, cut) in enumerate(layouts):
            self.arenas.append(self._arena(layout, cut, dtypes[layout.dtype]))
            self.buckets += [self._bucket(index, bucket) for bucket in layout.buckets]
        for name, parameter in self.parameters.items():
            if name not in self.weights:  # a frozen one that keeps a storage of its own
                if parameter.device != self.device:
                    _repoint(parameter, torch.empty_like(parameter, device=self.device))
                self.weights[name] = parameter.detach()

    def _arena(self, layout: FlatLayout, cut: ArenaSharding, dtype: torch.dtype) -> Arena:
        main, row, place = dtype, cut.sharding, cut.place
        if layout.trained:
            main = main_weight_dtype(dtype, self.config)
        numel = layout.numel_at_rest(place, row.weights)
        if main == dtype:
            return Arena(layout, cut, self._zeros(numel, dtype))
        from_main = row.gathers_from_main(place)
        weights = (
            own_storage("weights", "", numel, dtype, self.device) if from_main else self._zeros(numel, dtype)
        )
        main_weights = self._zeros(layout.numel_at_rest(place, row.optimizer), main)
        return Arena(layout, cut, weights, main_weights, from_main)

    def _bucket(self, index: int, bucket: Bucket) -> BucketMemory:
        """The bucket's memory, with its parameters and accumulators in it; weights come to rest."""
        arena = self.arenas[index]
        cut, place = arena.sharding.weights, arena.place
        layout, dtype, name = arena.layout, arena.weights.dtype, bucket_name(index, bucket)
        is_sharded, mine = cut is not ShardOver.NONE, layout.inner_part(bucket, place, ShardOver.NONE, cut)
        rest = None if arena.gathers_from_main else arena.weights[layout.bucket_at_rest(bucket, place, cut)]
        whole = self.new_full("weights", name, bucket.numel, dtype, self.device) if is_sharded else rest
        assert whole is not None, "nothing is gathered"
        with with_memory(whole):
            weights = whole[mine] if rest is None else rest
        trained = self._trained(arena, bucket, name, weights) if arena.trained else {}
        memory = BucketMemory(
            index, bucket, arena.trained, weights, whole, arena.gathers_from_main, **trained
        )
        with with_memory(whole):
            if is_sharded:
                whole.zero_()
            views = self._views(arena, bucket, whole)
            for param, view in views.items():
                _repoint(self.parameters[param], view)
            self.weights |= views
            if is_sharded:
                memory.weights_at_rest.copy_(whole[mine])
        return memory

    def _trained(self, arena: Arena, bucket: Bucket, name: str, weights: Tensor) -> dict[str, Tensor]:
        """What only a trained bucket has, with its accumulators. weights: its part at rest, or of the full ones."""
        layout, cuts, place, config = arena.layout, arena.sharding, arena.place, self.config
        main_grads = full_grads = self._main_grads(arena, main_grad_dtype(weights.dtype, config), bucket)
        if cuts.main_grads is not ShardOver.NONE:
            wire = grad_comm_dtype(weights.dtype, config)
            full_grads = self.new_full("grads", name, bucket.numel, wire, self.device)
        with with_memory(full_grads):
            self.grads |= self._views(arena, bucket, full_grads)
        for param in bucket.names:
            for key in self.param_meta[param].grad_keys[1:]:
                self._add_extra(arena, key, param, name, full_grads.dtype)
        optimizer_weights = weights  # where the main ones alone rest, both are cut alike
        if not arena.gathers_from_main:
            optimizer_weights = weights[layout.inner_part(bucket, place, cuts.weights, cuts.optimizer)]
        own, rest = arena.own_main_weights, layout.bucket_at_rest(bucket, place, cuts.optimizer)
        return {
            "main_weights": optimizer_weights if own is None else own[rest],
            "main_grads": main_grads,
            "full_grads": full_grads,
            "optimizer_grads": main_grads[layout.inner_part(bucket, place, cuts.main_grads, cuts.optimizer)],
            "optimizer_weights": optimizer_weights,
        }

    def _views(self, arena: Arena, bucket: Bucket, full: Tensor) -> dict[str, Tensor]:
        slots = [arena.layout.by_name[param] for param in bucket.names]
        return {
            slot.name: full[slot.start - bucket.start : slot.end - bucket.start].view(self.shapes[slot.name])
            for slot in slots
        }

    def _main_grads(self, arena: Arena, dtype: torch.dtype, bucket: Bucket) -> Tensor:
        """A bucket's gradients at rest."""
        cut = arena.sharding.main_grads
        if cut is not ShardOver.NONE:
            return self._zeros(bucket.numel // arena.place.ways(cut), dtype)
        left = self._grads_left[dtype]
        self._grads_left[dtype] = left[bucket.numel :]
        return left[: bucket.numel]

    def _add_extra(self, arena: Arena, key: str, param: str, bucket: str, dtype: torch.dtype) -> None:
        """The accumulator of a further use."""
        numel = math.prod(self.shapes[param])
        if arena.sharding.main_grads is ShardOver.NONE:
            extra = self._zeros(numel, dtype)
        else:
            extra = self.new_full("extra", bucket, numel, dtype, self.device)
        self.extra_grads[key] = extra
        with with_memory(extra):
            self.grads[key] = extra.view(self.shapes[param])

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


def _repoint(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter this storage and keep its value and its identity: others hold references to it. Writing to the
    storage later is no modification to autograd: `.data` has a version of its own."""
    if parameter.is_meta:  # no value, and `.data` cannot change the kind of device
        made = nn.Parameter(storage.data, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
        return
    if parameter.untyped_storage().nbytes():
        storage.copy_(parameter.detach())
    parameter.data = storage
