"""The dict of a module's own parameters, which may show others in their place: a sharded module its shards."""

from __future__ import annotations

from collections.abc import ItemsView, ValuesView
from typing import Any, Protocol

from torch import nn


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
