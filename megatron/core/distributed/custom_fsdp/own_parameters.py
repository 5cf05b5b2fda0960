"""The dict of a module's own parameters: it may show others in their place (a sharded module its shards), and tell of
reads.

`nn.MultiheadAttention` reads the weights of its `out_proj` without calling it, and anybody reads an `nn.ParameterList`.
So until a unit's module is called for the first time, it and the modules below it tell who reads their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from typing import Any, Protocol

from torch import nn

from megatron.core.units import Unit


class ParameterView(Protocol):
    """What others get when they ask a module for its parameters: one as an attribute, all that are walked over."""

    def read(self, own: OwnParameters, name: str) -> nn.Parameter | None: ...

    def listed(self, own: OwnParameters) -> dict[str, nn.Parameter | None]: ...

    def assign(self, own: OwnParameters, name: str, value: nn.Parameter | None) -> None: ...

    def copied(self) -> tuple[Any, ...]: ...


class OwnParameters(dict[str, "nn.Parameter | None"]):
    """Takes the place of a module's `_parameters`, and gives what it holds, or what `view` says. on_read: called before
    a parameter is read as an attribute; walking over them (`state_dict`, `to`) is no read."""

    view: ParameterView | None = None
    on_read: Callable[[], None] | None = None

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if self.on_read is not None:
            self.on_read()
        return super().__getitem__(name) if self.view is None else self.view.read(self, name)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return super().items() if self.view is None else self.view.listed(self).items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return super().values() if self.view is None else self.view.listed(self).values()

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if self.view is None:
            super().__setitem__(name, value)
        else:
            self.view.assign(self, name, value)

    def __delitem__(self, name: str) -> None:
        self[name] = None
        super().__delitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are plain dicts."""
        return (dict, (self.plain(),)) if self.view is None else self.view.copied()

    def plain(self) -> dict[str, nn.Parameter | None]:
        """The module's own ones."""
        return dict(super().items())


class ParameterReads:
    """Calls `read(unit)` before a parameter of the unit is read as an attribute, until `called` hears of its module."""

    def __init__(self, units: Sequence[Unit], read: Callable[[Unit], None]) -> None:
        self._owners: dict[int, list[nn.Module]] = {}  # id of a unit's module -> those with parameters
        parts = {id(module) for unit in units for module in unit.modules}
        for module, unit in ((module, one) for one in units for module in one.modules):
            self._owners[id(module)] = owners = list(_owners(module, parts))
            for owner in owners:
                own = owner.__dict__["_parameters"] = OwnParameters(owner._parameters.items())
                own.on_read = functools.partial(read, unit)

    def called(self, module: nn.Module) -> None:
        """One of the units' modules is called: reads of its parameters cost nothing from here on."""
        for owner in self._owners.pop(id(module), ()):
            own = owner._parameters
            assert isinstance(own, OwnParameters), f"{type(owner).__name__}: {type(own).__name__}"
            own.on_read = None
            if own.view is None:
                owner.__dict__["_parameters"] = own.plain()


def _owners(module: nn.Module, parts: set[int]) -> Iterator[nn.Module]:
    """The modules with parameters of their own at and below one, without `parts` below it, which are units' too."""
    if module._parameters:
        yield module
    for child in module.children():
        if id(child) not in parts:
            yield from _owners(child, parts)
