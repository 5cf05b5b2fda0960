"""A rank's shards as parameters of a module: their names, the gradients beside them, and whether they have changed.

[Note: who may have changed them] Gathers are collective, so every rank has to answer alike, whether its own part of the
model changed or not. In-place changes count up autograd's versions, also of an empty shard; optimizers are heard of;
another tensor's memory (`p.data = ...`, `load_state_dict(assign=True)`) is told by its storage, also that of an empty
shard. What writes to `p.data` in place is told by nothing: it is taken for granted after a backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.module import ModelError


class ShardParameters:
    """The shards that this rank updates. taken: names that none of them may have.

    made: to be registered with a module; names: registered name -> the parameter's, with `/` for `.`, and a `/` behind
    it where it is taken.
    """

    def __init__(self, buffer: FlatBuffer, taken: Collection[str]) -> None:
        self.names: dict[str, str] = {}
        for name in buffer.names:
            registered = name.replace(".", "/")
            self.names[registered + "/" * (registered in taken)] = name
        self._parts = [buffer.main_weight_part(name) for name in self.names.values()]
        # Made before the first step begins, so that these views do not keep gradients at rest from being released.
        self.grads = [buffer.main_grad_part(name) for name in self.names.values()]
        self.made = {name: nn.Parameter(part) for name, part in zip(self.names, self._parts, strict=True)}
        self.stepped = False  # an optimizer has
        self.may_have_changed = False  # a backward has ended, so that anybody may have stepped
        self._places = [_place(part) for part in self._parts]
        self.watch(self.made)
        _LIVE.add(self)
        _hear_of_optimizers()

    def watch(self, registered: Mapping[str, nn.Parameter | None]) -> None:
        """Where the shards are registered: code that loads may put others there."""
        self._registered = registered
        self._versions = self._current_versions()

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return iter(zip(self.current(), self.grads, strict=True))

    def current(self) -> list[nn.Parameter]:
        """The parameters that are registered now."""
        found = [shard for shard in self._registered.values() if shard is not None]
        assert len(found) == len(self.names), f"{len(found)} shards of {len(self.names)} are registered"
        return found

    def take_changes(self) -> bool:
        """Whether the shards are to be taken for changed; values with memory of their own are copied to where the
        engine reads them. See [Note: who may have changed them]. Raises ModelError where a shape changed."""
        changed = self.stepped or self.may_have_changed
        for shard, part, place, name in zip(
            self.current(), self._parts, self._places, self.names.values(), strict=True
        ):
            if _place(shard) == place:
                continue
            if shard.shape != part.shape:
                raise ModelError(
                    f"the shard of {name!r} has shape {tuple(shard.shape)} now, its part of the parameter "
                    f"{tuple(part.shape)}: write values of this rank's part, or whole ones with load_full_state_dict()"
                )
            part.copy_(shard.detach())
            shard.data = part
            changed = True
        versions = self._current_versions()
        changed = changed or versions != self._versions
        self._versions, self.stepped, self.may_have_changed = versions, False, False
        return changed

    def _current_versions(self) -> list[int]:
        return [shard._version for shard in self.current()]


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.untyped_storage().data_ptr()


_LIVE: weakref.WeakSet[ShardParameters] = weakref.WeakSet()


@functools.cache
def _hear_of_optimizers() -> None:
    """Fused optimizers write weights without a word to autograd. One hook for all: torch goes through its hooks while
    they run, so none may go when what it is for is collected."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for shards in _LIVE:
        shards.stepped = shards.stepped or any(id(shard) in updated for shard in shards.current())
