"""Who reads a module's parameters as attributes: dicts in the place of `_parameters`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.units import Unit, owning_modules


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (torch keeps no public word for it)."""
    return torch._C._current_graph_task_id() != -1


class OwnParameters(dict[str, "nn.Parameter | None"]):
    """Takes the place of a module's `_parameters`. on_read: called before a parameter is read as an attribute; walking
    over them (`state_dict`, `to`) is no read. Copies are plain dicts."""

    on_read: Callable[[], None] | None = None

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if self.on_read is not None:
            self.on_read()
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.plain(),)

    def unread(self) -> dict[str, nn.Parameter | None]:
        """What takes its place once nobody listens to reads."""
        return self.plain()

    def plain(self) -> dict[str, nn.Parameter | None]:
        """The module's own ones."""
        return dict(dict.items(self))


class ParameterReads:
    """Calls `read(unit)` before a parameter of the unit is read as an attribute, until `called` hears of its module."""

    def __init__(self, units: Sequence[Unit], read: Callable[[Unit], None]) -> None:
        parts = {id(module) for unit in units for module in unit.modules}
        self._owners: dict[int, list[nn.Module]] = {}  # id of a unit's module -> those with parameters
        for module, unit in ((module, one) for one in units for module in one.modules):
            self._owners[id(module)] = owners = list(owning_modules(module, parts))
            for owner in owners:
                own = owner.__dict__["_parameters"] = OwnParameters(owner._parameters.items())
                own.on_read = functools.partial(read, unit)

    def called(self, module: nn.Module) -> None:
        """One of the units' modules is called: reads of its parameters cost nothing from here on."""
        for owner in self._owners.pop(id(module), ()):
            own = owner._parameters
            assert isinstance(own, OwnParameters), f"{type(owner).__name__}: {type(own).__name__}"
            owner.__dict__["_parameters"] = own.unread()
