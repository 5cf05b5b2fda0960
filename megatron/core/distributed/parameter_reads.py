"""A module's own parameters: who reads them as attributes, and what others find in their place.

`nn.MultiheadAttention` reads the weights of its `out_proj` without calling it, and anybody reads an `nn.ParameterList`.
While a unit's module has not been called, it and what is below it keep their parameters in a dict that tells of reads.
With the first call the dicts tell of nothing again, so that what is called costs nothing after that.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from typing import Any, Protocol

from torch import nn

from megatron.core.distributed.units import Unit


class Shown(Protocol):
    """What a module's parameters are to others."""

    def read(self, own: OwnParameters, name: str) -> nn.Parameter | None:
        """As an attribute."""

    def walked(self, own: OwnParameters) -> dict[str, nn.Parameter | None]:
        """To who walks over them (`parameters`, `state_dict`, `to`)."""

    def put(self, own: OwnParameters, name: str, value: nn.Parameter | None) -> None:
        """Somebody registers a parameter, or None."""

    def copied(self) -> tuple[Any, ...]:
        """Somebody copies or pickles the module."""


class OwnParameters(dict[str, "nn.Parameter | None"]):
    """In the place of a module's `_parameters`: what is in here, or what `shown` says."""

    shown: Shown | None = None

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return super().__getitem__(name) if self.shown is None else self.shown.read(self, name)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return super().items() if self.shown is None else self.shown.walked(self).items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return super().values() if self.shown is None else self.shown.walked(self).values()

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if self.shown is None:
            super().__setitem__(name, value)
        else:
            self.shown.put(self, name, value)

    def __delitem__(self, name: str) -> None:
        self[name] = None
        super().__delitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are plain dicts."""
        return (dict, (self.plain(),)) if self.shown is None else self.shown.copied()

    def plain(self) -> dict[str, nn.Parameter | None]:
        """The module's own ones."""
        return dict(super().items())


class ParameterReads:
    """Tells `read` of a unit before one of its parameters is read as a module's attribute, until that is `called`.

    Walking over parameters (`named_parameters`, `state_dict`, `to`) is no read.
    """

    def __init__(self, units: Sequence[Unit], read: Callable[[Unit], None]) -> None:
        self._owners: dict[int, list[nn.Module]] = {}  # id of a unit's module -> those with parameters
        parts = {id(module) for unit in units for module in unit.modules}
        for unit in units:
            for module in unit.modules:
                self._owners[id(module)] = owners = list(_owners(module, parts))
                for owner in owners:
                    owner.__dict__["_parameters"] = _Heard(owner._parameters, unit, read)

    def called(self, module: nn.Module) -> None:
        """One of the units' modules is."""
        for owner in self._owners.pop(id(module), ()):
            heard = owner._parameters
            assert isinstance(heard, _Heard), f"{type(owner).__name__}: {type(heard).__name__}"
            owner.__dict__["_parameters"] = heard.unheard()


class _Heard(OwnParameters):
    """Tells of reads."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], unit: Unit, read: Callable[[Unit], None]
    ) -> None:
        super().__init__(parameters.items())
        self._unit, self._read = unit, read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._read(self._unit)
        return super().__getitem__(name)

    def unheard(self) -> dict[str, nn.Parameter | None]:
        if self.shown is None:
            return self.plain()
        own = OwnParameters(self.plain())
        own.shown = self.shown
        return own


def _owners(module: nn.Module, parts: set[int]) -> Iterator[nn.Module]:
    """The modules with parameters of their own at and below one, without `parts` below it, which are units' too."""
    if module._parameters:
        yield module
    for child in module.children():
        if id(child) not in parts:
            yield from _owners(child, parts)
