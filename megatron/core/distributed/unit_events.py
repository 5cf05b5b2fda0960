"""When a model comes to its units: hooks on their modules, and on the gradients of what these hand on.

A forward and a recomputation come to a unit when one of its modules is called, a backward when the first gradient of
one of its modules' outputs is complete. Nothing is told of a unit's end: it is the beginning of another one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.protocols import UnitListener
from megatron.core.weight_grad import WeightGradAccumulator

ModulesOfUnit = tuple[int, Sequence[nn.Module]]


class UnitEvents:
    """Tells `listener` of the units that forwards and backwards come to, until it is removed.

    chunks: of each, its units' numbers and modules. Modules whose forward is never called tell nothing.
    """

    def __init__(self, chunks: Sequence[Iterable[ModulesOfUnit]], listener: UnitListener) -> None:
        self._listener = listener
        self.handles: list[RemovableHandle] = []
        for chunk, units in enumerate(chunks):
            for unit, modules in units:
                for module in modules:
                    self._watch(module, chunk, unit)

    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that there are keep theirs."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _watch(self, module: nn.Module, chunk: int, unit: int) -> None:
        def begins(*_: Any) -> None:
            self._listener.unit_begins(chunk, unit)

        def returns(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
                for node in nodes:
                    node.register_prehook(begins)

        self.handles.append(module.register_forward_pre_hook(begins))
        self.handles.append(module.register_forward_hook(returns))


def watch_units(
    model: DistributedDataParallel, sinks: Sequence[WeightGradAccumulator | None], listener: UnitListener
) -> None:
    """Tell of units that begin: in forwards and backwards by hooks, in W's by the chunks' sinks."""
    UnitEvents([tuple(enumerate(units)) for units in model.unit_modules()], listener)
    for chunk, (sink, unit_of) in enumerate(zip(sinks, model.unit_of_key(), strict=True)):
        if sink is not None:
            sink.report_units(unit_of, functools.partial(listener.unit_begins, chunk))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
