"""When a model comes to its units: hooks on their modules, and on the gradients of what these hand on.

A forward and a recomputation come to a unit when one of its modules is called, a backward when the first gradient of
one of its modules' outputs is complete. Nothing is told of a unit's end: it is the beginning of another one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.protocols import UnitListener
from megatron.core.weight_grad import WeightGradAccumulator


def hook_units(
    chunks: Sequence[Iterable[tuple[int, Sequence[nn.Module]]]], listener: UnitListener
) -> list[RemovableHandle]:
    """Tell `listener` of the units that forwards and backwards come to, until what is returned is removed (graphs that
    there are keep their hooks).

    chunks: of each, its units' numbers and modules. Modules whose forward is never called tell nothing.
    """
    return [
        handle
        for chunk, units in enumerate(chunks)
        for unit, modules in units
        for module in modules
        for handle in _watch(module, functools.partial(listener.unit_begins, chunk, unit))
    ]


def _watch(module: nn.Module, tell: Callable[[], None]) -> tuple[RemovableHandle, RemovableHandle]:
    def begins(*_: Any) -> None:
        tell()

    def returns(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
                node.register_prehook(begins)

    return module.register_forward_pre_hook(begins), module.register_forward_hook(returns)


def watch_units(
    unit_modules: Sequence[Sequence[Sequence[nn.Module]]],
    unit_of_key: Sequence[Mapping[str, int]],
    sinks: Sequence[WeightGradAccumulator | None],
    listener: UnitListener,
) -> None:
    """Tell of units that begin: in forwards and backwards by hooks, in W's by the chunks' sinks. By chunk: the modules
    of its units, the unit of each of its gradients, its sink."""
    hook_units([tuple(enumerate(units)) for units in unit_modules], listener)
    for chunk, (sink, unit_of) in enumerate(zip(sinks, unit_of_key, strict=True)):
        if sink is not None:
            sink.report_units(unit_of, functools.partial(listener.unit_begins, chunk))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, tuple | list):
        inside = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = (getattr(value, field.name) for field in dataclasses.fields(value))
    for item in inside:
        yield from tensors_in(item)
