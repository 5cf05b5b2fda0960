"""A module's own parameters: who reads them as attributes, and what others find in their place.

`nn.MultiheadAttention` reads the weights of its `out_proj` without calling it, and anybody reads an `nn.ParameterList`.
Until a unit's module is called for the first time, it and the modules below it keep their parameters in dicts that
report reads. The first call puts plain dicts back, so that reads cost nothing from then on.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from typing import Any, Protocol

from torch import nn

from megatron.core.distributed.units import Unit


class ParameterView(Protocol):
    """What others get when they ask a module for its parameters."""

    def read(self, own: OwnParameters, name: str) -> nn.Parameter | None:
        """A parameter is read as an attribute."""

    def listed(self, own: OwnParameters) -> dict[str, nn.Parameter | None]:
        """All are walked over (`parameters`, `state_dict`, `to`)."""

    def assign(self, own: OwnParameters, name: str, value: nn.Parameter | None) -> None:
        """A parameter, or None, is registered."""

    def copied(self) -> tuple[Any, ...]:
        """The module is copied or pickled."""


class OwnParameters(dict[str, "nn.Parameter | None"]):
    """Takes the place of a module's `_parameters`, and gives what it holds, or what `view` says."""

    view: ParameterView | None = None

    def __getitem__(self, name: str) -> nn.Parameter | None:
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
    """Calls `read(unit)` before a parameter of the unit is read as an attribute, until `called` hears of its module.

    Walking over parameters (`named_parameters`, `state_dict`, `to`) is no read.
    """

    def __init__(self, units: Sequence[Unit], read: Callable[[Unit], None]) -> None:
        self._owners: dict[int, list[nn.Module]] = {}  # id of a unit's module -> those with parameters
        parts = {id(module) for unit in units for module in unit.modules}
        for unit in units:
            for module in unit.modules:
                self._owners[id(module)] = owners = list(_owners(module, parts))
                for owner in owners:
                    owner.__dict__["_parameters"] = _WatchedParameters(owner._parameters, unit, read)

    def called(self, module: nn.Module) -> None:
        """One of the units' modules is called: its parameters need not be watched any more."""
        for owner in self._owners.pop(id(module), ()):
            own = owner._parameters
            assert isinstance(own, _WatchedParameters), f"{type(owner).__name__}: {type(own).__name__}"
            owner.__dict__["_parameters"] = own.unwatched()


class _WatchedParameters(OwnParameters):
    """Tells `read` of the unit whenever one of its parameters is read."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], unit: Unit, read: Callable[[Unit], None]
    ) -> None:
        super().__init__(parameters.items())
        self._unit, self._read = unit, read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._read(self._unit)
        return super().__getitem__(name)

    def unwatched(self) -> dict[str, nn.Parameter | None]:
        if self.view is None:
            return self.plain()
        own = OwnParameters(self.plain())
        own.view = self.view
        return own


def _owners(module: nn.Module, parts: set[int]) -> Iterator[nn.Module]:
    """The modules with parameters of their own at and below one, without `parts` below it, which are units' too."""
    if module._parameters:
        yield module
    for child in module.children():
        if id(child) not in parts:
            yield from _owners(child, parts)
