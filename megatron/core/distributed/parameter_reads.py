"""Who reads parameters of modules whose own forward never runs.

`nn.MultiheadAttention` reads the weights of its `out_proj` without calling it, and anybody reads an `nn.ParameterList`.
While a unit's module has not been called, it and what is below it keep their parameters in a dict that tells of reads.
With the first call the dicts are plain again, so that what is called costs nothing after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.units import Unit


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
            owner.__dict__["_parameters"] = dict(owner._parameters.items())


class _Heard(dict[str, "nn.Parameter | None"]):
    """A module's own parameters. Copies are plain dicts."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], unit: Unit, read: Callable[[Unit], None]
    ) -> None:
        super().__init__(parameters.items())
        self._unit, self._read = unit, read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._read(self._unit)
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _owners(module: nn.Module, parts: set[int]) -> Iterator[nn.Module]:
    """The modules with parameters of their own at and below one, without `parts` below it, which are units' too."""
    if module._parameters:
        yield module
    for child in module.children():
        if id(child) not in parts:
            yield from _owners(child, parts)
