"""A rank's shards as the parameters that a module shows: with their gradients, and with whether they have changed.

[Note: who may have changed them] Gathers are collective, so every rank has to answer alike, whether its own part of the
model changed or not. In-place changes count up autograd's versions, also of an empty shard; optimizers are heard of;
another tensor's memory (`p.data = ...`, `load_state_dict(assign=True)`) is told by its storage, also that of an empty
shard. A write to `p.data` in place leaves no trace, so it is assumed to have happened after each backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, ItemsView, Iterator, Mapping, ValuesView
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.sharded_module.flat_span import FlatSpan
from megatron.core.distributed.sharded_module.parameter_reads import OwnParameters, in_backward
from megatron.core.distributed.sharded_module.sharded_tensor import ShardedTensor, local_part
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver
from megatron.core.transport.parallel_state import Group

UNCOPIED = (
    "a sharded module cannot be copied or pickled: its memory and groups are its own; copy the module before "
    "fully_shard, or load full_state_dict() into another one"
)


class ShownShards(OwnParameters):
    """Shows others the shards in the place of a module's own parameters, one as an attribute, all that are walked
    over; in forwards and backwards of the module its own. `own` are always its own; first: names -> the first names of
    their parameters."""

    def __init__(self, own: Mapping[str, nn.Parameter | None], shards: ShardParameters) -> None:
        super().__init__(dict.items(own) if isinstance(own, OwnParameters) else own)
        self.on_read, self.shards = getattr(own, "on_read", None), shards
        self.own = self.plain()
        self.first = {name: shards.first[id(p)] for name, p in self.own.items() if p is not None}

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter, shards = super().__getitem__(name), self.shards
        if parameter is None or shards.in_forward or shards.readable or in_backward():
            return parameter
        return shards.registered[self.first[name]]

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return self._listed().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return self._listed().values()

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        first = self.first.get(name)
        known = {id(shard): one for one, shard in self.shards.registered.items()}
        if first is None or value is None or known.get(id(value), first) != first:
            raise ModelError(
                f"parameter {name!r} is registered, tied or removed after fully_shard, which has cut what there was: "
                "do it before"
            )
        self.shards.register(first, value)

    def __delitem__(self, name: str) -> None:
        self[name] = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise ModelError(UNCOPIED)

    def unread(self) -> dict[str, nn.Parameter | None]:
        self.on_read = None
        return self.in_use()

    def in_use(self) -> dict[str, nn.Parameter | None]:
        """What the module has now: a plain dict in its forwards where nobody listens, which compilers look into."""
        return self.own if self.shards.in_forward and self.on_read is None else self

    def _listed(self) -> dict[str, nn.Parameter | None]:
        if self.shards.in_forward or in_backward():
            return self.own
        return self.own | {name: self.shards.registered[first] for name, first in self.first.items()}


class ShardParameters:
    """The shards that this rank holds: those that it trains, and frozen ones. Where every rank has all of them they are
    plain parameters, else `ShardedTensor`s.

    tensor_parallel: the ranks that hold other rectangles. taken: shards that there are, by the id of the module's own
    parameter; the first `take_changes` brings their values to where the engine reads them. One that was cut otherwise
    is made whole for that, which communicates. names: of those that are trained. registered: the parameters that are
    registered now: code that loads may put others there. module: shows the shards as its parameters; none by default.
    first: id of a parameter of its own -> its first name. in_forward: the module shows its own parameters, as
    it does in a backward; readable: as attributes. may_have_changed: an optimizer has stepped, or a backward has ended.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        module: nn.Module | None = None,
        tensor_parallel: Group | None = None,
        taken: Mapping[int, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self.names, sharding = buffer.names, buffer.sharding
        self.in_forward = self.may_have_changed = False
        self._whole = self.readable = sharding.weights is ShardOver.NONE
        # `.data` has a version of its own: what the engine writes to the same memory is no change.
        self._parts = {name: buffer.main_weight_part(name).data for name in buffer.names}
        self._parts |= {name: buffer.weight_part(name).data for name in buffer.frozen}
        # Made before the first step begins, so that these views do not keep gradients at rest from being released.
        self.grads = [buffer.main_grad_part(name) for name in self.names]
        cut_of = dict.fromkeys(buffer.frozen, sharding.weights) | dict.fromkeys(
            buffer.names, sharding.optimizer
        )
        self._places = {name: _place(buffer, name, cut_of[name], tensor_parallel) for name in self._parts}
        self.own = {} if module is None else dict(module.named_parameters())
        self.first = {id(parameter): name for name, parameter in self.own.items()}
        self.registered = {
            name: nn.Parameter(self.shown(name, part), requires_grad=name in self.names)
            for name, part in self._parts.items()
        } | {self.first[own]: shard for own, shard in taken.items() if own in self.first}
        for name, shard in self.registered.items():
            if isinstance(shard, ShardedTensor):
                place = self._places[name]
                if not place.agrees(shard.place):
                    shard.local = place.part_of(shard.full_tensor()).clone()
                shard.place = place
        self._versions = self._current_versions()
        self._shown: list[tuple[nn.Module, ShownShards]] = []
        for owner in () if module is None else module.modules():
            if owner is module or owner._parameters:
                self._shown.append((owner, ShownShards(owner._parameters, self)))
        self.set_in_forward(False)
        _LIVE.add(self)
        _watch_optimizers()

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Those that are trained: names, parameters, and their gradients, 1-D."""
        return iter(zip(self.names, self.current(), self.grads, strict=True))

    def current(self) -> list[nn.Parameter]:
        """Those that are trained, as they are registered now."""
        return [self.registered[name] for name in self.names]

    def shown(self, name: str, part: Tensor) -> Tensor:
        """What others see of a part, 1-D, of a parameter or its gradient."""
        place = self._places[name]
        return part.view(place.meta.local_shape) if place.all_have_all else ShardedTensor(part, place)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What others would see of a value in the module's own shape."""
        place = self._places[name]
        return self.shown(name, whole.reshape(-1)[place.start : place.end])

    def register(self, name: str, value: nn.Parameter) -> None:
        """Of a whole parameter in the place of a sharded one, this rank's part."""
        now = self.registered[name]
        if isinstance(now, ShardedTensor) and tuple(value.shape) == tuple(now.shape):
            part = now.part_of(value.detach()).to(now.dtype)
            value = nn.Parameter(now.again(part.clone()), requires_grad=value.requires_grad)
        self.registered[name] = value

    def take_changes(self) -> bool:
        """Whether the shards are to be taken for changed; values with memory of their own are copied to where the
        engine reads them. See [Note: who may have changed them]. Raises ModelError where a shape or type changed."""
        changed = self.may_have_changed
        for name, shard in self.registered.items():
            part, own = self._parts[name], local_part(shard)
            if own is part or (own.data_ptr() == part.data_ptr() and not isinstance(shard, ShardedTensor)):
                continue
            if (own.shape, own.dtype) != (part.shape, part.dtype):
                raise ModelError(
                    f"the parameter {name!r} has shape {tuple(shard.shape)} of {shard.dtype} now, and had "
                    f"{self._places[name].meta.global_shape} of {part.dtype}: write values of that shape, or load "
                    "them with load_full_state_dict()"
                )
            part.copy_(own.detach())
            if isinstance(shard, ShardedTensor):
                shard.local = part
            else:
                shard.data = self.shown(name, part)
            changed = True
        before, self._versions, self.may_have_changed = self._versions, self._current_versions(), False
        return changed or before != self._versions

    def read_whole(self, whole: bool) -> None:
        """Whether attributes give whole weights, which are gathered, outside of a forward too."""
        self.readable = whole or self._whole

    def set_in_forward(self, in_forward: bool) -> None:
        """A forward begins or ends."""
        self.in_forward = in_forward
        for owner, shown in self._shown:
            owner.__dict__["_parameters"] = shown.in_use()

    def release(self) -> dict[int, nn.Parameter]:
        """Give the module its own parameters back: the shards, by the ids of these."""
        for owner, shown in self._shown:
            owner.__dict__["_parameters"] = shown.own
        _LIVE.discard(self)
        return {own: self.registered[name] for own, name in self.first.items()}

    def before_step(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Raises ModelError where it has parameters of the module's own, whose gradients never come."""
        if names := sorted(name for own, name in self.first.items() if own in updated):
            raise ModelError(
                f"{type(optimizer).__name__} has parameters that fully_shard has cut, {names[:3]} for one, and "
                "would train nothing: build the optimizer after the last fully_shard, over what model.parameters() "
                "gives then: the shards"
            )
        if any(id(shard) in updated for shard in self.registered.values()):
            self.may_have_changed = True

    def _current_versions(self) -> list[int]:
        return [
            shard._version + (shard.local._version if isinstance(shard, ShardedTensor) else 0)
            for shard in self.registered.values()
        ]


def _place(buffer: FlatBuffer, name: str, cut: ShardOver, tensor_parallel: Group | None) -> FlatSpan:
    """What this rank holds of a parameter that is cut so, and who holds the rest."""
    meta, arena = buffer.param_meta[name], buffer.arena_of(name)
    ways = 1 if arena is None else arena.place.ways(cut)
    apart = tensor_parallel if meta.regions and tensor_parallel and tensor_parallel.size > 1 else None
    groups: list[Group | None] = [apart]
    if ways > 1 and arena is not None and (of := arena.cut.groups) is not None:
        groups = [of.reduce, of.outer if cut is ShardOver.FULL else None, apart]
    with_others = tuple(group for group in groups if group is not None and group.size > 1)
    return FlatSpan(
        meta, *buffer.part(name, cut), with_others, apart, all_have_all=ways == 1 and apart is None
    )


def cut_by_others(known: Collection[ShardParameters]) -> set[int]:
    """Ids of the parameters that others than the known ones have cut."""
    return {own for shards in _LIVE if shards not in known for own in shards.first}


_LIVE: weakref.WeakSet[ShardParameters] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Fused optimizers write weights without a word to autograd. One hook for all: torch goes through its hooks while
    they run, so none may go when what it is for is collected."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for shards in _LIVE:
        shards.before_step(optimizer, updated)
    if optimizer not in _STEPPED:
        _STEPPED.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_cut_state)
        _cut_state(optimizer)


def _cut_state(optimizer: torch.optim.Optimizer) -> None:
    """Of what was loaded from an optimizer of whole parameters, this rank's part."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, ShardedTensor):
            for key, value in state.items():
                whole = isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and value.dim()
                if whole and value.shape == parameter.shape:
                    state[key] = parameter.again(parameter.part_of(value).clone())


_STEPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
