"""A rank's shards as the parameters that a module shows: with their gradients, and with whether they have changed.

[Note: who may have changed them] Gathers are collective, so every rank has to answer alike, whether its own part of the
model changed or not. In-place changes count up autograd's versions, also of an empty shard; optimizers are heard of;
another tensor's memory (`p.data = ...`, `load_state_dict(assign=True)`) is told by its storage, also that of an empty
shard. A write to `p.data` in place leaves no trace, so it is assumed to have happened after each backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.core.dist_checkpointing import state_pieces
from megatron.core.dist_checkpointing.state_pieces import FlatSpan, StatePiece
from megatron.core.distributed.custom_fsdp.hooks import OwnParameters, in_backward
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver

BUILD_IT_AFTERWARDS = (
    "build the optimizer after the last fully_shard, over what model.parameters() gives then: the shards"
)
UNCOPIED = (
    "a sharded module cannot be copied or pickled: its memory and groups are its own; copy the module before "
    "fully_shard, or load full_state_dict() into another one"
)


class ShownShards(OwnParameters):
    """Shows others the shards in the place of a module's own parameters, one as an attribute, all that are walked
    over; in forwards and backwards of the module its own. `plain` are always its own."""

    def __init__(self, own: Mapping[str, nn.Parameter | None], shards: ShardParameters) -> None:
        super().__init__(dict.items(own) if isinstance(own, OwnParameters) else own)
        self.on_read, self.shards = getattr(own, "on_read", None), shards

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter, shards = super().__getitem__(name), self.shards
        if parameter is None or shards.in_forward or shards.readable or in_backward():
            return parameter
        return shards.registered[shards.first[id(parameter)]]

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return self._listed().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return self._listed().values()

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        first = self._names().get(name)
        known = {id(shard): one for one, shard in self.shards.registered.items()}
        if first is None or value is None or known.get(id(value), first) != first:
            raise ModelError(
                f"parameter {name!r} is registered, tied or removed after fully_shard, which has cut what there was: "
                "do it before"
            )
        self.shards.registered[first] = value

    def __delitem__(self, name: str) -> None:
        self[name] = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise ModelError(UNCOPIED)

    def pieces(self) -> Iterator[tuple[str, Tensor, FlatSpan]]:
        """The module's names, their shards and what they are of."""
        for name, first in self._names().items():
            if first is not None:
                yield name, self.shards.registered[first].detach(), self.shards.places[first]

    def _names(self) -> dict[str, str | None]:
        """The module's names -> the parameter's first name."""
        return {name: p if p is None else self.shards.first[id(p)] for name, p in self.plain().items()}

    def _listed(self) -> dict[str, nn.Parameter | None]:
        if self.shards.in_forward or in_backward():
            return self.plain()
        return {
            name: self.shards.registered[first] if first else None for name, first in self._names().items()
        }


class ShardParameters:
    """The shards that this rank holds: those that it trains, and frozen ones.

    names: of those that are trained. registered: the parameters that are registered now: code that loads may put others
    there. places: what each is of. module: shows the shards as its parameters; none by default. first: id of a
    parameter of its own -> its first name. in_forward: the module shows its own parameters, as it does in a backward;
    readable: as attributes. may_have_changed: an optimizer has stepped, or a backward has ended.
    """

    def __init__(self, buffer: FlatBuffer, module: nn.Module | None = None) -> None:
        self.names, sharding = buffer.names, buffer.sharding
        self.in_forward = self.may_have_changed = False
        self._whole = self.readable = sharding.weights is ShardOver.NONE
        self._parts = {name: buffer.main_weight_part(name) for name in buffer.names}
        self._parts |= {name: buffer.weight_part(name) for name in buffer.frozen}
        # Made before the first step begins, so that these views do not keep gradients at rest from being released.
        self.grads = [buffer.main_grad_part(name) for name in self.names]
        # `.data` has a version of its own: what the engine writes to the same memory is no change.
        self.registered = {
            name: nn.Parameter(part.data, requires_grad=name in self.names)
            for name, part in self._parts.items()
        }
        cut_of = dict.fromkeys(buffer.frozen, sharding.weights) | dict.fromkeys(
            buffer.names, sharding.optimizer
        )
        self.places = {
            name: FlatSpan(buffer.param_meta[name], *buffer.part(name, cut_of[name])) for name in self._parts
        }
        self._storages = {name: _storage(part) for name, part in self._parts.items()}
        self._versions = self._current_versions()
        self.first: dict[int, str] = {}
        self._owners: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        if module is not None:
            self._take_places(module)
        _LIVE.add(self)
        _watch_optimizers()

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Those that are trained, and their gradients."""
        return iter(zip(self.current(), self.grads, strict=True))

    def current(self) -> list[nn.Parameter]:
        """Those that are trained, as they are registered now."""
        return [self.registered[name] for name in self.names]

    def take_changes(self) -> bool:
        """Whether the shards are to be taken for changed; values with memory of their own are copied to where the
        engine reads them. See [Note: who may have changed them]. Raises ModelError where a shape or type changed."""
        changed = self.may_have_changed
        for name, shard in self.registered.items():
            if _storage(shard) == self._storages[name]:
                continue
            part = self._parts[name]
            found, expected = (f"{tuple(one.shape)} of {one.dtype}" for one in (shard, part))
            if found != expected:
                raise ModelError(
                    f"the shard of {name!r} has shape {found} now, its part of the parameter {expected}: write values "
                    "of this rank's part, or whole ones with load_full_state_dict()"
                )
            part.copy_(shard.detach())
            shard.data = part
            changed = True
        before, self._versions, self.may_have_changed = self._versions, self._current_versions(), False
        return changed or before != self._versions

    def read_whole(self, whole: bool) -> None:
        """Whether attributes give whole weights, which are gathered, outside of a forward too."""
        self.readable = whole or self._whole

    def release(self) -> None:
        """Give the module its own parameters back."""
        for owner in self._owners:
            owner.__dict__["_parameters"] = owner.__dict__["_parameters"].plain()
        for handle in self._handles:
            handle.remove()
        _LIVE.discard(self)

    def _take_places(self, module: nn.Module) -> None:
        self.first = {id(parameter): name for name, parameter in module.named_parameters()}
        self._own = list(module.parameters())  # so that no other gets one of these ids
        self._owners = [one for one in module.modules() if one is module or one._parameters]
        for owner in self._owners:
            owner.__dict__["_parameters"] = ShownShards(owner.__dict__["_parameters"], self)
            self._handles.append(owner.register_state_dict_post_hook(_give_pieces))
            self._handles.append(owner.register_load_state_dict_pre_hook(_take_pieces))

    def before_step(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        """Raises ModelError where it has parameters of the module's own, whose gradients never come."""
        if names := sorted(name for own, name in self.first.items() if own in updated):
            raise ModelError(
                f"{type(optimizer).__name__} has parameters that fully_shard has cut, {names[:3]} for one, and "
                f"would train nothing: {BUILD_IT_AFTERWARDS}"
            )
        if not any(id(shard) in updated for shard in self.registered.values()):
            return
        self.may_have_changed = True
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            optimizer.register_state_dict_post_hook(_give_optimizer_pieces)
            optimizer.register_load_state_dict_pre_hook(_take_optimizer_pieces)
            places = _places()
            for shard, state in optimizer.state.items():  # that was loaded before its first step
                if id(shard) in places:
                    optimizer.state[shard] = state_pieces.own_parts(state, places[id(shard)])

    def _current_versions(self) -> list[int]:
        return [shard._version for shard in self.registered.values()]


def _storage(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.untyped_storage().data_ptr()


def _give_pieces(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, shard, place in module.__dict__["_parameters"].pieces():
        if not isinstance(state.get(prefix + name), nn.Parameter | None):  # keep_vars=True
            state[prefix + name] = StatePiece(shard, place)


def _take_pieces(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _shard, place in module.__dict__["_parameters"].pieces():
        if prefix + name in state:
            state[prefix + name] = state_pieces.taken(state[prefix + name], place)


def _give_optimizer_pieces(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    as_pieces = functools.partial(state_pieces.as_pieces, optimizer=type(optimizer).__name__)
    return state_pieces.repacked(optimizer, packed, _places(), as_pieces)


def _take_optimizer_pieces(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    return state_pieces.repacked(optimizer, packed, _places(), state_pieces.own_parts)


def _places() -> dict[int, FlatSpan]:
    """Id of a shard -> what it is of."""
    return {id(shard): shards.places[name] for shards in _LIVE for name, shard in shards.registered.items()}


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
