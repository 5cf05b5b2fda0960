"""When a model's units are about to run, and when they have run: hooks on its modules and on tensors of its graph.

forward pre-hook of a module      -> `enter_forward`
forward hook                      -> `leave_forward`
gradient of an output arrives     -> `enter_backward`
gradient of every input is there  -> `passed`: backward has gone through the unit
a parameter is read though its unit's forward has never run -> `enter_forward` (see [Note: modules that are not called])

[Note: sources] Nothing tells when a call is passed that has no differentiable input (lookups), or one that is a leaf
(of a reentrant checkpoint; a parameter): a leaf's gradient and the last ones of the unit's parameters only wait to be
accumulated, in any order. Units with such calls are complete with their last gradient. A call counts for as long as the
graph behind its outputs lives: several microbatches may be under way.

[Note: one tensor, two units] What one unit hands on, the next one takes: the gradient of one tensor says that backward
is through the latter and comes to the former. Hooks of the tensor run before those of the operation that made it:
the first are for who takes it, the second for who made it, so that one unit's weights go before the other's come.

[Note: modules that are not called] Some modules' forwards never run: whoever is around them reads their parameters
(`nn.MultiheadAttention` its `out_proj`, anybody an `nn.ParameterList`). Without memory behind them such a read ends in
torch's error about a storage, or in a crash. So reads of their parameters are listened to (`ParameterReads`). A unit
that is read so stays from its first read in a forward to the end of the microbatch, a backward needs it from the
model's output on, and only its last gradient completes it.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megatron.core.distributed.custom_fsdp.unit_driver import UnitDriver
from megatron.core.distributed.unit_events import tensors_in
from megatron.core.module import ModelError
from megatron.core.units import Unit, owning_modules


class _Call:
    """One forward of a unit with a graph; alive as long as the graph is."""


_CallsOf = collections.defaultdict[int, "weakref.WeakSet[_Call]"]  # by unit


class UnitHooks:
    """Installs the hooks. backward: also those of the graph. handles: remove those of modules."""

    def __init__(
        self, chunks: Sequence[nn.Module], units: Sequence[Unit], driver: UnitDriver, *, backward: bool
    ) -> None:
        self._driver = driver
        self._backward = backward
        # Forwards under way that are no recomputations (those may be left in the middle, and what they held would
        # stay): their input tensors, and the versions of these when they began.
        self._runs: list[tuple[list[Tensor], list[int]]] = []
        self._ran: dict[int, set[int]] = {unit.index: set() for unit in units}  # unit -> its modules that ran
        self._calls = _CallsOf(weakref.WeakSet)  # that are not passed
        self._readers = _CallsOf(weakref.WeakSet)  # forwards that have read a unit, as calls
        self._sources: dict[int, _Call] = {}  # under way, by module; see [Note: sources]
        self._in_chunk = False  # a chunk's forward is under way
        self._reads = ParameterReads(units, self._read)
        self._read_units: dict[int, Unit] = {}  # what the forward under way has read of those
        eager = torch.compiler.disable  # graphs of compiled modules end before them
        enter, leave = eager(self._enter), eager(self._leave)
        self.handles = [chunk.register_forward_pre_hook(eager(self._begin_forward)) for chunk in chunks]
        for module, unit in ((module, one) for one in units for module in one.modules):
            self.handles += [
                module.register_forward_pre_hook(functools.partial(enter, unit), with_kwargs=True),
                module.register_forward_hook(functools.partial(leave, unit), with_kwargs=True),
            ]
        for chunk in chunks:
            self.handles += [
                chunk.register_forward_hook(eager(self._end_forward)),
                chunk.register_forward_hook(eager(self._forward_over), always_call=True),
            ]

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._runs.clear()  # of a forward that ended with an error
            self._sources.clear()
            self._read_units.clear()
            for ran in self._ran.values():
                ran.clear()
            self._in_chunk = True
            self._driver.begin_forward(training=torch.is_grad_enabled())

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            self._watch_read(output)
            self._driver.end_forward(training=torch.is_grad_enabled())

    def _forward_over(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also where it ended with an error."""
        if not in_backward():
            self._in_chunk = False

    def _read(self, unit: Unit) -> None:
        """See [Note: modules that are not called]. Outside of forwards only the user asks, for a shape perhaps."""
        recomputing = in_backward()
        if not recomputing:
            if unit.index in self._read_units or not (self._in_chunk or self._runs):
                return
            self._read_units[unit.index] = unit
        self._driver.enter_forward(unit.index, recomputing=recomputing)

    def _watch_read(self, output: Any) -> None:
        """Backward needs what was read from the outermost output on."""
        if self._backward and torch.is_grad_enabled():
            for unit in self._read_units.values():
                reader = _Call()
                self._readers[unit.index].add(reader)
                self._watch_outputs(unit, output, reader)
        self._read_units.clear()

    def _enter(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recomputing = in_backward()
        self._reads.called(module)
        self._driver.enter_forward(unit.index, recomputing=recomputing)
        graph = self._backward and torch.is_grad_enabled()
        inputs = list(tensors_in((args, kwargs))) if graph else []
        if not recomputing:
            tracked = [tensor for tensor in inputs if not tensor.is_inference()]
            self._runs.append((tracked, [tensor._version for tensor in tracked]))
        if graph:
            self._watch_inputs(unit, module, inputs)

    def _leave(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recomputing = in_backward()
        inputs, versions = ([], []) if recomputing else self._runs.pop()
        if [tensor._version for tensor in inputs] != versions:
            raise ModelError(
                f"unit {unit.name!r}: {type(module).__name__} changes one of its inputs in place; a unit hands on "
                "new tensors, because its input's gradient tells when its backward is over: use the operation that "
                "is not in place"
            )
        source = self._sources.pop(id(module), None)
        if self._backward and torch.is_grad_enabled():
            self._watch_outputs(unit, output, source)
        if not (recomputing or self._runs or self._in_chunk):  # a unit called without the whole
            self._watch_read(output)
        ran = self._ran[unit.index]
        ran.add(id(module))
        if len(ran) == len(unit.modules):
            ran.clear()
            self._driver.leave_forward(unit.index, recomputing=recomputing)

    def _watch_inputs(self, unit: Unit, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        """A module may run several times: the unit is passed once all of its calls are. See [Note: sources]."""
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        call, calls = _Call(), self._calls[unit.index]
        calls.add(call)
        if not inputs or any(tensor.is_leaf for tensor in inputs):
            self._sources[id(module)] = call
            return

        def through(_: Any) -> None:
            if torch.is_grad_enabled():  # create_graph=True
                return
            calls.discard(call)
            if not self._readers[unit.index]:
                self._driver.passed(unit.index, last=not calls)

        if len(inputs) == 1:
            inputs[0].register_hook(through)
        else:
            register_multi_grad_hook(inputs, through, mode="all")

    def _watch_outputs(self, unit: Unit, output: Any, source: _Call | None) -> None:
        """See [Note: one tensor, two units]. Of several outputs the first counts. source: lives as long as these."""
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        backwards: set[int] = set()  # that have come to this call

        def arrives(_: Any, source: _Call | None = source) -> None:
            backward = torch._C._current_graph_task_id()
            if backward not in backwards:
                backwards.add(backward)
                self._driver.enter_backward(unit.index, differentiable=torch.is_grad_enabled())

        for node in nodes:
            node.register_prehook(arrives)
        if len(nodes) == 0 and outputs:  # leaves
            register_multi_grad_hook(outputs, arrives, mode="any")


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
