"""Who reads a module's parameters as attributes.

`nn.MultiheadAttention` reads the weights of its `out_proj` without calling it, and anybody reads an `nn.ParameterList`.
Until a unit's module is called for the first time, it and the modules below it keep their parameters in dicts that
report reads. The first call puts plain dicts back, so that reads cost nothing from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from megatron.core.own_parameters import OwnParameters
from megatron.core.units import Unit


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
