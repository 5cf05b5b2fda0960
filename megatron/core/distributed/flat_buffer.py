"""The one buffer behind all data parallelism: weights, main weights and main gradients, each flat and cut as a row of
`sharding` says.

Per dtype of the model's weights there is one `Arena`, laid out by `shard_layout` (and one of frozen parameters, where
weights are cut):

    weights       the model's dtype
    main_weights  what the optimizer updates: fp32 for 16-bit weights, else the very memory of the weights
    main_grads    what gradients are accumulated in

Parameters are views of their bucket's *full weights*, gradient accumulators of its *full gradients*, from construction
on: where a buffer is whole these are the buffer at rest, where it is cut they are transient (`bucket_memory`), and
whoever gathers or frees them gives their storage memory or takes it away.

A parameter with several uses (tied embeddings) has one accumulator a use: the first is its slot in the full gradients,
the others live outside the layout, and whoever reduces adds them to it. Where weights are whole, frozen parameters
keep a storage of their own: nothing is ever reduced or updated there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import (
    Arena,
    ArenaGroups,
    ArenaMaker,
    BucketMemory,
    NewFull,
    bucket_name,
    grad_comm_dtype,
    num_bytes,
    own_storage,
    with_memory,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import Bucket, ParamSpec, Placement, plan_layouts
from megatron.core.distributed.sharding import Cut, Sharding, ShardPlace
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta

# Makes parameters' values readable inside, where they lie in memory that comes and goes.
Reading = Callable[[Sequence[nn.Parameter]], contextlib.AbstractContextManager[None]]

_TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_they_are(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class FlatBuffer:
    """Allocates the arenas and makes parameters views of them.

    parameters: by global name, in the order of the model. stages: name -> global pipeline stage (0 where left out);
    with its place in `names` it says where in the whole model a parameter stands. Shapes are this rank's
    (`ParamMeta.local_shape`). units: name -> the unit that it is gathered and reduced with, which is a bucket
    (config's sizes of buckets have no effect); None: buckets by size.
    new_full: makes transient tensors. reading: a bucket's parameters are read inside it. groups: who gathers and
    reduces; None where nobody does.

    Values of the parameters are kept; no more than one bucket is whole besides what the caller brought. Parameters on
    the meta device get memory here and no value: the caller fills them (`write_weight`).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        param_meta: Mapping[str, ParamMeta],
        config: DistributedDataParallelConfig,
        *,
        sharding: Sharding,
        place: ShardPlace,
        device: torch.device,
        stages: Mapping[str, int] | None = None,
        units: Mapping[str, str] | None = None,
        new_full: NewFull = own_storage,
        reading: Reading = as_they_are,
        placement: Placement = "flat",
        groups: ArenaGroups | None = None,
    ) -> None:
        _check(parameters, param_meta, units)
        self.config, self.sharding, self.place = config, sharding, place
        self.param_meta = dict(param_meta)
        self._stages = dict(stages or {})
        self.frozen = tuple(name for name, p in parameters.items() if not p.requires_grad)
        self.names = tuple(name for name, p in parameters.items() if p.requires_grad)
        self._device, self._new_full, self._reading = device, new_full, reading
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._param_of_key = {key: name for name in self.names for key in param_meta[name].grad_keys}

        weights_cut = sharding.weights is not Cut.WHOLE
        layouts = plan_layouts(
            [
                _spec(name, p, param_meta[name], "" if units is None else units[name])
                for name, p in parameters.items()
                if p.requires_grad or weights_cut
            ],
            place.dp_size,
            bucket_size=config.ddp_bucket_size if units is None else None,
            num_buckets=config.ddp_num_buckets if units is None else None,
            by_unit=units is not None,
            placement=placement,
        )
        dtypes = {str(p.dtype): p.dtype for p in parameters.values()}
        maker = ArenaMaker(
            layouts, [dtypes[layout.dtype] for layout in layouts], config, sharding, place, device
        )
        self.arenas = tuple(dataclasses.replace(arena, groups=groups) for arena in maker.arenas)
        self._main_grads_flat: Mapping[torch.dtype, Tensor] = maker.main_grads_flat
        self._weights: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}  # by key
        self.extra_grads: dict[str, Tensor] = {}  # key of a further use -> its accumulator, 1-D
        self.buckets: tuple[BucketMemory, ...] = tuple(
            self._build(maker, index, bucket, parameters)
            for index, arena in enumerate(self.arenas)
            for bucket in arena.layout.buckets
        )
        self._bucket_of = {name: memory for memory in self.buckets for name in memory.bucket.names}
        for name, parameter in parameters.items():
            if name not in self._bucket_of:
                if parameter.device != device:
                    _repoint(parameter, torch.empty_like(parameter, device=device))
                self._weights[name] = parameter.detach()
        self.grads_divided_by = 1  # main_grads * this = the sum over microbatches and ranks
        self.copy_weights_to_main()

    def buckets_of_unit(self, unit: str) -> tuple[BucketMemory, ...]:
        """The buckets that hold parameters of a unit, trained and frozen."""
        return tuple(memory for memory in self.buckets if unit in memory.bucket.units)

    def by_groups(self, buckets: Iterable[BucketMemory]) -> list[tuple[ArenaGroups, list[BucketMemory]]]:
        """Buckets by who communicates about them."""
        found: list[tuple[ArenaGroups, list[BucketMemory]]] = []
        for bucket in buckets:
            groups = self.arenas[bucket.arena].groups
            assert groups is not None, f"nobody communicates about {bucket.name}"
            if not found or found[-1][0] is not groups:
                found.append((groups, []))
            found[-1][1].append(bucket)
        return found

    def bucket_of(self, name: str) -> BucketMemory | None:
        """None for a frozen parameter with a storage of its own."""
        return self._bucket_of.get(name)

    def weight(self, name: str) -> Tensor:
        """The model's weight, a view without autograd. Readable where weights are whole, or gathered."""
        return self._weights[name]

    def main_grad(self, key: str) -> Tensor:
        """Where contributions filed under `key` are added (`ParamMeta.grad_keys`), of the parameter's shape. Where
        gradients are cut, it has memory only while its bucket's full gradients have."""
        return self._grads[key]

    def main_weight(self, name: str) -> Tensor:
        """What the optimizer updates, in the parameter's shape; only where the optimizer is whole."""
        assert self.place.ways(self.sharding.optimizer) == 1, (
            f"main weight of {name}: this rank holds a part only ({self.sharding} at {self.place})"
        )
        return self.main_weight_part(name).view(self._shapes[name])

    def part(self, name: str, cut: Cut) -> tuple[int, int]:
        """Elements [start, end) of a parameter that this rank holds of a buffer that is cut so; may be empty."""
        arena = self.arena_of(name)
        if arena is None:  # a frozen parameter with a storage of its own
            return 0, self._weights[name].numel()
        return arena.layout.part_of(name, self.place, cut)

    def weight_part(self, name: str) -> Tensor:
        """1-D: what this rank holds of a weight at rest. As `main_grad_part` and `main_weight_part`, memory in use."""
        arena = self.arena_of(name)
        if arena is None:
            return self._weights[name].view(-1)
        return self._part(arena, arena.weights, self.sharding.weights, name, self.sharding.weights)

    def main_weight_part(self, name: str, cut: Cut | None = None) -> Tensor:
        """1-D: what of a main weight this rank's optimizer updates. cut: a part of that."""
        arena = self._trained_arena_of(name)
        cut = cut or self.sharding.optimizer
        if arena.own_main_weights is None:
            return self._part(arena, arena.weights, self.sharding.weights, name, cut)
        return self._part(arena, arena.own_main_weights, self.sharding.optimizer, name, cut)

    def main_grad_part(self, name: str, cut: Cut | None = None) -> Tensor:
        """1-D: the gradient at rest of `main_weight_part`. cut: a part of that."""
        layout, memory = self._trained_arena_of(name).layout, self._bucket_of[name]
        assert memory.main_grads is not None
        held = self.sharding.main_grads
        outer, _ = layout.part_of(name, self.place, held)
        low, high = layout.part_of(name, self.place, cut or self.sharding.optimizer)
        start = layout.part_at_rest(name, self.place, held)[0]
        start -= layout.rest_start(memory.bucket.index, self.place, held)
        return (
            memory.main_grads[start + low - outer : start + high - outer]
            if high > low
            else memory.main_grads[:0]
        )

    def grads_at_rest(self) -> tuple[Tensor, ...]:
        """All gradients at rest, one allocation each: one a dtype where they are whole, one a bucket where cut."""
        if self.sharding.main_grads is Cut.WHOLE:
            return tuple(self._main_grads_flat.values())
        return tuple(memory.main_grads for memory in self.buckets if memory.main_grads is not None)

    def view_part(self, flat: Tensor, name: str) -> Tensor:
        """1-D: what belongs to a parameter in any flat tensor that is cut as its arena's optimizer (a moment)."""
        cut = self.sharding.optimizer
        return self._part(self._trained_arena_of(name), flat, cut, name, cut)

    def optimizer_numel(self, arena: Arena) -> int:
        """Elements of an arena that this rank's optimizer updates, padding included."""
        return arena.layout.numel_at_rest(self.place, self.sharding.optimizer)

    def stage_of(self, name: str) -> int:
        """The global pipeline stage whose chunk holds the parameter; of several, the first."""
        return self._stages.get(name, 0)

    def has_own_main_weight(self, name: str) -> bool:
        return self._trained_arena_of(name).own_main_weights is not None

    def param_of_key(self, key: str) -> str:
        return self._param_of_key[key]

    def arena_of(self, name: str) -> Arena | None:
        """None for a frozen parameter with a storage of its own."""
        memory = self._bucket_of.get(name)
        return None if memory is None else self.arenas[memory.arena]

    def write_weight(self, name: str, whole: Tensor) -> None:
        """Copy a value, in this rank's shape, into what this rank holds at rest of weight and main weight."""
        assert tuple(whole.shape) == self._shapes[name], (
            f"{name}: a value of shape {tuple(whole.shape)}, the parameter has {self._shapes[name]}"
        )
        if name not in self._bucket_of:
            self._weights[name].copy_(whole)
            return
        start, end = self.part(name, self.sharding.weights)
        held = self.weight_part(name)
        held.copy_(whole.reshape(-1)[start:end])
        if name in self.names and self.has_own_main_weight(name):
            first, last = self.part(name, self.sharding.optimizer)  # inside [start, end), or empty
            self.main_weight_part(name).copy_(
                held[first - start : last - start] if last > first else held[:0]
            )

    def copy_main_to_weights(self) -> None:
        """Round main weights into this rank's part of the weights at rest; others' parts are for engines to gather."""
        self._copy_main(to_weights=True)

    def copy_weights_to_main(self) -> None:
        """From this rank's part of the weights at rest."""
        self._copy_main(to_weights=False)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by what they are for (the optimizer's moments come on top)."""
        alone = [self._weights[name] for name in self.frozen if name not in self._bucket_of]
        extra = self.extra_grads.values() if self.sharding.main_grads is Cut.WHOLE else ()
        own = [arena.own_main_weights for arena in self.arenas]
        return {
            "weights": num_bytes(arena.weights for arena in self.arenas) + num_bytes(alone),
            "main_weights": num_bytes(tensor for tensor in own if tensor is not None),
            "main_grads": num_bytes(self.grads_at_rest()),
            "extra_grads": num_bytes(extra),
        }

    def _build(
        self, maker: ArenaMaker, arena: int, bucket: Bucket, parameters: Mapping[str, nn.Parameter]
    ) -> BucketMemory:
        """Parameters and accumulators become views of the bucket's full tensors; weights come to rest."""
        layout, dtype = maker.arenas[arena].layout, maker.arenas[arena].weights.dtype
        cut, name = self.sharding.weights is not Cut.WHOLE, bucket_name(arena, bucket)
        full = self._new_full("weights", name, bucket.numel, dtype, self._device) if cut else None
        grads = None
        if layout.trained and self.sharding.main_grads is not Cut.WHOLE:
            wire = grad_comm_dtype(dtype, self.config)
            grads = self._new_full("grads", name, bucket.numel, wire, self._device)
        memory = maker.bucket(arena, bucket.index, full, grads)
        values = [parameters[param] for param in bucket.names]
        with with_memory(memory.full_weights) as whole, self._reading(values):
            if cut:
                whole.zero_()
            for param in bucket.names:
                slot = layout.by_name[param]
                view = whole[slot.start - bucket.start : slot.end - bucket.start].view(self._shapes[param])
                self._weights[param] = view
                _repoint(parameters[param], view)
            if cut:
                start, end = layout.shard(bucket.index, self.place, self.sharding.weights)
                memory.weights.copy_(whole[start - bucket.start : end - bucket.start])
        if memory.full_grads is not None:
            with with_memory(memory.full_grads) as whole:
                for param in bucket.names:
                    slot = layout.by_name[param]
                    view = whole[slot.start - bucket.start : slot.end - bucket.start]
                    self._grads[param] = view.view(self._shapes[param])
            for param in bucket.names:
                for key in self.param_meta[param].grad_keys[1:]:
                    self._add_extra(key, param, name, memory.full_grads.dtype)
        return memory

    def _add_extra(self, key: str, param: str, bucket: str, dtype: torch.dtype) -> None:
        """The accumulator of a further use."""
        numel = math.prod(self._shapes[param])
        if self.sharding.main_grads is Cut.WHOLE:
            extra = torch.zeros(numel, dtype=dtype, device=self._device)
        else:
            extra = self._new_full("extra", bucket, numel, dtype, self._device)
        self.extra_grads[key] = extra
        with with_memory(extra) as whole:
            self._grads[key] = whole.view(self._shapes[param])

    def _copy_main(self, *, to_weights: bool) -> None:
        at_once = self.place.ways(self.sharding.weights) == self.place.ways(self.sharding.optimizer)
        for index, arena in enumerate(self.arenas):
            if arena.own_main_weights is None:
                continue
            pairs = [(arena.weights, arena.own_main_weights)]
            if not at_once:
                pairs = [
                    (memory.optimizer_weights, memory.main_weights)
                    for memory in self.buckets
                    if memory.arena == index
                    and memory.optimizer_weights is not None
                    and memory.main_weights is not None
                ]
            for weights, main in pairs:
                if to_weights:
                    weights.copy_(main)
                else:
                    main.copy_(weights)

    def _part(self, arena: Arena, flat: Tensor, flat_cut: Cut, name: str, wanted: Cut) -> Tensor:
        """What of a parameter belongs to `wanted` in a flat buffer at rest that is cut by the coarser `flat_cut`."""
        outer, _ = arena.layout.part_of(name, self.place, flat_cut)
        low, high = arena.layout.part_of(name, self.place, wanted)
        if low == high:
            return flat[:0]
        start = arena.layout.part_at_rest(name, self.place, flat_cut)[0] + low - outer
        return flat[start : start + high - low]

    def _trained_arena_of(self, name: str) -> Arena:
        arena = self.arena_of(name)
        assert arena is not None, f"{name} is frozen"
        assert arena.trained, f"{name} is frozen"
        return arena


def group_of(meta: ParamMeta) -> str:
    """The layout group: parameters that the optimizer treats alike (see optimizer/param_groups)."""
    return ("decay" if meta.decay else "no_decay") + ("+embedding_or_output" * meta.embedding_or_output)


def _check(
    parameters: Mapping[str, nn.Parameter],
    param_meta: Mapping[str, ParamMeta],
    units: Mapping[str, str] | None,
) -> None:
    unknown = sorted(parameters.keys() - param_meta.keys())
    assert not unknown, f"parameters without ParamMeta: {unknown}"
    homeless = sorted(parameters.keys() - units.keys()) if units is not None else []
    assert not homeless, f"parameters without a unit: {homeless}"
    for name, parameter in parameters.items():
        expected = param_meta[name].local_shape
        assert tuple(parameter.shape) == expected, (
            f"{name}: shape {tuple(parameter.shape)}, by its ParamMeta {expected}"
        )


def _spec(name: str, parameter: nn.Parameter, meta: ParamMeta, unit: str) -> ParamSpec:
    if parameter.requires_grad and parameter.dtype not in _TRAINED:
        known = sorted(map(str, _TRAINED))
        raise ModelError(f"parameter {name} is {parameter.dtype}: trained parameters are one of {known}")
    assert meta.grad_keys[0] == name, f"parameter {name}: its first use is {meta.grad_keys[0]!r}"
    trained = parameter.requires_grad
    return ParamSpec(
        name, parameter.numel(), str(parameter.dtype), group_of(meta), unit, trained, meta.expert, meta.shared
    )


def _repoint(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter this storage and keep its value and its identity: others hold references to it. Writing to the
    storage later is no modification to autograd: `.data` has a version of its own."""
    if parameter.is_meta:  # no value, and `.data` cannot change the kind of device
        made = nn.Parameter(storage.data, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
        return
    storage.copy_(parameter.detach())
    parameter.data = storage
