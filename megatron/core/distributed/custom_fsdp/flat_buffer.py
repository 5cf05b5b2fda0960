"""The one buffer behind all data parallelism: weights, main weights and main gradients, each flat and sharded as a row
of `sharding` says.

Per dtype of the model's weights there is one `Arena`, laid out by `shard_layout` (and one of frozen parameters, where
weights are sharded):

    weights       the model's dtype
    main_weights  what the optimizer updates: fp32 for 16-bit weights, else the very memory of the weights; where both
                  are cut into the same parts, gathers round them, and no weights rest beside them
    main_grads    what gradients are accumulated in

Parameters are views of their bucket's *full weights*, gradient accumulators of its *full gradients*, from construction
on (`bucket_memory`): where a buffer is sharded, whoever gathers or frees these gives their storage memory or takes it
away.

A parameter with several uses (tied embeddings) has one accumulator a use: the first is its slot in the full gradients,
the others live outside the layout, and whoever reduces adds them to it. Where weights are unsharded, frozen
parameters keep a storage of their own: nothing is ever reduced or updated there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp import bucket_memory
from megatron.core.distributed.custom_fsdp.bucket_memory import (
    Arena,
    ArenaGroups,
    ArenaSharding,
    BucketMemory,
    num_bytes,
    trained,
)
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.shard_layout import ParamSpec, Placement, plan_layouts
from megatron.core.distributed.custom_fsdp.transient_memory import own_storage, with_memory
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta
from megatron.core.sharding_table import Sharding, ShardOver, ShardPlace

_TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class FlatBuffer:
    """Allocates the arenas and makes parameters views of them.

    parameters: by global name, in the order of the model. stages: name -> global pipeline stage (0 where left out);
    with its place in `names` it says where in the whole model a parameter stands. Shapes are this rank's
    (`ParamMeta.local_shape`). units: name -> the unit that it is gathered and reduced with, which is a bucket (config's
    sizes of buckets have no effect); None: all are one.
    new_full: makes transient tensors. sharding, place, groups: how all but experts are cut, and who gathers and
    reduces; None where nobody does. experts: how theirs are; None: in the same way. tracker: is told of weights that
    are rounded for checkpoints.

    `sharding` of the buffer is what is cut of either.

    Values of the parameters are kept; no more than one bucket is whole besides what the caller brought. Parameters on
    the meta device, and those of another buffer that have no memory now, get memory here and no value: the caller fills
    them (`write_weight`).
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
        new_full: bucket_memory.NewFull = own_storage,
        placement: Placement = "flat",
        groups: ArenaGroups | None = None,
        experts: ArenaSharding | None = None,
        tracker: MemoryTracker | None = None,
    ) -> None:
        _check(parameters, param_meta, units)
        dense = ArenaSharding(sharding, place, groups)
        experts = experts or dense
        self.config, self.place = config, place
        self.sharding = sharding.joined(experts.sharding)
        self.param_meta = dict(param_meta)
        self._stages, self._tracker = dict(stages or {}), tracker or MemoryTracker()
        self.frozen = tuple(name for name, p in parameters.items() if not p.requires_grad)
        self.names = tuple(name for name, p in parameters.items() if p.requires_grad)
        self._param_of_key = {key: name for name in self.names for key in param_meta[name].grad_keys}
        layouts = plan_layouts(
            [
                _spec(name, p, param_meta[name], "" if units is None else units[name])
                for name, p in parameters.items()
                if p.requires_grad or self.sharding.weights is not ShardOver.NONE
            ],
            place.dp_size,
            placement=placement,
            expert_dp_size=experts.place.dp_size,
        )
        made = bucket_memory.BufferMaker(parameters, self.param_meta, config, device, new_full)
        made.make([(layout, experts if layout.expert else dense) for layout in layouts])
        self.arenas, self.buckets = tuple(made.arenas), tuple(made.buckets)
        self._bucket_of = {name: memory for memory in self.buckets for name in memory.bucket.names}
        self._flat_grads, self._shapes = made.flat_grads, made.shapes
        self._weights, self._grads = made.weights, made.grads
        self.extra_grads = made.extra_grads  # key of a further use -> its accumulator, 1-D
        self.grads_divided_by = 1  # main_grads * this = the sum over microbatches and ranks
        self.copy_weights_to_main()

    def buckets_of_unit(self, unit: str) -> tuple[BucketMemory, ...]:
        """The buckets that hold parameters of a unit, trained and frozen."""
        return tuple(memory for memory in self.buckets if memory.bucket.unit == unit)

    def is_cut(self, buckets: Sequence[BucketMemory], what: Literal["weights", "main_grads"]) -> bool:
        """Whether these of a unit are sharded at rest: all of its buckets are, or none."""
        rows = [self.arenas[bucket.arena].sharding for bucket in buckets]
        cut = {getattr(row, what) is not ShardOver.NONE for row in rows}
        assert len(cut) <= 1, f"buckets of one unit, of which some are cut: {[one.name for one in buckets]}"
        return True in cut

    def by_groups(self, buckets: Iterable[BucketMemory]) -> list[tuple[ArenaGroups, list[BucketMemory]]]:
        """Buckets by who communicates about them."""
        found: dict[int, tuple[ArenaGroups, list[BucketMemory]]] = {}
        for bucket in buckets:
            groups = self.arenas[bucket.arena].cut.groups
            assert groups is not None, f"nobody communicates about {bucket.name}"
            found.setdefault(id(groups), (groups, []))[1].append(bucket)
        return list(found.values())

    def bucket_of(self, name: str) -> BucketMemory | None:
        """None for a frozen parameter with a storage of its own."""
        return self._bucket_of.get(name)

    def weight(self, name: str) -> Tensor:
        """The model's weight, a view without autograd. Readable where weights are unsharded, or gathered."""
        return self._weights[name]

    def main_grad(self, key: str) -> Tensor:
        """Where contributions filed under `key` are added (`ParamMeta.grad_keys`), of the parameter's shape. Where
        gradients are sharded, it has memory only while its bucket's full gradients have."""
        return self._grads[key]

    def main_weight(self, name: str) -> Tensor:
        """What the optimizer updates, in the parameter's shape; only where the optimizer is unsharded."""
        cut = self.arenas[self._trained(name).arena].cut
        assert cut.place.ways(cut.sharding.optimizer) == 1, (
            f"main weight of {name}: this rank holds a part only ({cut.sharding} at {cut.place})"
        )
        return self.main_weight_part(name).view(self._shapes[name])

    def part(self, name: str, cut: ShardOver) -> tuple[int, int]:
        """Elements [start, end) of a parameter that this rank holds of a buffer that is cut so; may be empty."""
        arena = self.arena_of(name)
        if arena is None:  # a frozen parameter with a storage of its own
            return 0, self._weights[name].numel()
        return arena.layout.part_of(name, arena.place, cut)

    def updated_part(self, name: str) -> tuple[int, int]:
        """Elements [start, end) of a trained parameter that this rank's optimizer updates: `main_weight_part`'s."""
        arena = self.arena_of(name)
        assert arena is not None, f"{name} is frozen"
        return self.part(name, arena.sharding.optimizer)

    def weight_part(self, name: str) -> Tensor:
        """1-D: what this rank holds of a weight at rest. As `main_grad_part` and `main_weight_part`, memory in use; but
        where main weights alone rest, outside of `resting_weights`, a rounded copy, which torch refuses to write."""
        arena = self.arena_of(name)
        if arena is None:
            return self._weights[name].view(-1)
        if not arena.weights_rest:
            with torch.inference_mode():  # its tensors are read-only outside
                return self.main_weight_part(name).to(arena.weights.dtype)
        cut, bucket = arena.sharding.weights, self._bucket_of[name].bucket
        return self._within(
            arena.weights[arena.layout.bucket_at_rest(bucket, arena.place, cut)], cut, name, cut
        )

    def main_weight_part(self, name: str, cut: ShardOver | None = None) -> Tensor:
        """1-D: what of a main weight this rank's optimizer updates. cut: a part of that."""
        memory = self._trained(name)
        held = self.arenas[memory.arena].sharding.optimizer
        return self._within(trained(memory.main_weights), held, name, cut or held)

    def main_grad_part(self, name: str, cut: ShardOver | None = None) -> Tensor:
        """1-D: the gradient at rest of `main_weight_part`. cut: a part of that."""
        memory = self._trained(name)
        row = self.arenas[memory.arena].sharding
        return self._within(trained(memory.main_grads), row.main_grads, name, cut or row.optimizer)

    def grads_at_rest(self) -> tuple[Tensor, ...]:
        """All gradients at rest, one allocation each: one a dtype where they are unsharded, one a bucket where cut."""
        return tuple(self._flat_grads.values()) + self.cut_grads()

    def cut_grads(self) -> tuple[Tensor, ...]:
        """Gradients at rest that are cut: one a bucket."""
        return tuple(
            trained(memory.main_grads)
            for memory in self.buckets
            if memory.trained and self.arenas[memory.arena].sharding.main_grads is not ShardOver.NONE
        )

    def view_part(self, flat: Tensor, name: str) -> Tensor:
        """1-D: what belongs to a parameter in any flat tensor that is cut as its arena's optimizer (a moment)."""
        memory = self._trained(name)
        arena = self.arenas[memory.arena]
        cut = arena.sharding.optimizer
        rest = arena.layout.bucket_at_rest(memory.bucket, arena.place, cut)
        return self._within(flat[rest], cut, name, cut)

    def optimizer_numel(self, arena: Arena) -> int:
        """Elements of an arena that this rank's optimizer updates, padding included."""
        return arena.layout.numel_at_rest(arena.place, arena.sharding.optimizer)

    def stage_of(self, name: str) -> int:
        """The global pipeline stage whose chunk holds the parameter; of several, the first."""
        return self._stages.get(name, 0)

    def has_own_main_weight(self, name: str) -> bool:
        return self.arenas[self._trained(name).arena].own_main_weights is not None

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
        arena, flat = self.arena_of(name), whole.reshape(-1)
        if arena is None or arena.weights_rest:
            start, end = self.part(name, ShardOver.NONE if arena is None else arena.sharding.weights)
            self.weight_part(name).copy_(flat[start:end])
        if arena is not None and arena.own_main_weights is not None:
            start, end = self.part(name, arena.sharding.optimizer)
            self.main_weight_part(name).copy_(flat[start:end].to(arena.weights.dtype))

    def rounded_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the memory tracker counts the copies that `weight_part` makes of all weights, where it makes some."""
        return self._tracker.holding("casts", self.rounded_bytes)

    @property
    def rounded_bytes(self) -> int:
        """Of weights of which the main ones alone rest."""
        return num_bytes(arena.weights for arena in self.arenas if not arena.weights_rest)

    @contextlib.contextmanager
    def resting_weights(self) -> Iterator[None]:
        """Inside, all weights at rest have memory: to be read, or to be written before `copy_weights_to_main`."""
        with contextlib.ExitStack() as held:
            held.enter_context(self.rounded_weights())
            for arena in self.arenas:
                held.enter_context(with_memory(arena.weights))
            self.copy_main_to_weights()
            yield

    def copy_main_to_weights(self) -> None:
        """Round main weights into this rank's part of the weights at rest, where these have memory; others' parts are
        for engines to gather."""
        for weights, main in self._main_weights():
            weights.copy_(main)

    def copy_weights_to_main(self) -> None:
        """From this rank's part of the weights at rest."""
        for weights, main in self._main_weights():
            main.copy_(weights)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by what they are for (the optimizer's moments come on top)."""
        alone = [self._weights[name] for name in self.frozen if name not in self._bucket_of]
        extra = [
            grad
            for key, grad in self.extra_grads.items()
            if self.arenas[self._trained(self.param_of_key(key)).arena].sharding.main_grads is ShardOver.NONE
        ]
        weights = [arena.weights for arena in self.arenas if not arena.gathers_from_main]
        return {
            "weights": num_bytes(weights + alone),
            "main_weights": num_bytes(arena.own_main_weights for arena in self.arenas),
            "main_grads": num_bytes(self.grads_at_rest()),
            "extra_grads": num_bytes(extra),
        }

    def _main_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(weights at rest, main weights) where these have memory of their own."""
        for index, arena in enumerate(self.arenas):
            if arena.own_main_weights is None or not arena.weights_rest:
                continue
            if arena.place.ways(arena.sharding.weights) == arena.place.ways(arena.sharding.optimizer):
                yield arena.weights, arena.own_main_weights
                continue
            for memory in self.buckets:
                if memory.arena == index:
                    yield trained(memory.optimizer_weights), trained(memory.main_weights)

    def _within(self, part: Tensor, cut: ShardOver, name: str, wanted: ShardOver) -> Tensor:
        """What of a parameter belongs to `wanted`, in this rank's part of its bucket by the coarser `cut`."""
        memory = self._bucket_of[name]
        layout, place = self.arenas[memory.arena].layout, self.arenas[memory.arena].place
        low, high = layout.part_of(name, place, wanted)
        first = layout.by_name[name].start + low - layout.shard(memory.bucket.index, place, cut)[0]
        return part[first : first + high - low] if low < high else part[:0]

    def _trained(self, name: str) -> BucketMemory:
        memory = self._bucket_of.get(name)
        assert memory is not None, f"{name} is frozen"
        assert memory.trained, f"{name} is frozen"
        return memory


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
        name, parameter.numel(), str(parameter.dtype), meta.group, unit, trained, meta.expert, meta.shared
    )
