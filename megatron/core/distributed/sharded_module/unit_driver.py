"""Without a plan: which unit is gathered, freed and reduced when, as hooks on a model's modules tell what runs.

[Note: what is over] Autograd runs what was recorded last first. So when a backward comes to the output of a call, all
calls that began behind it are over: nothing reads their weights any more, and units without an earlier call have all
of their gradients. What is recomputed inside a backward is a forward of its own.

[Note: order] All ranks have to gather and reduce alike. Gathers go ahead in the order in which modules are registered,
in a backward in that of the forward's own calls. Reductions begin in the reverse order of registration: parameters may
be unused on some ranks only, and where weights are unsharded a rank may skip units that others run.

[Note: modules that are not called] Some modules' forwards never run: whoever is around them reads their parameters
(`nn.MultiheadAttention` its `out_proj`, anybody an `nn.ParameterList`). So reads of parameters are listened to until
their module is called. A unit that is read so stays from its first read in a forward to the end of the microbatch, and
a backward needs it from the model's output on.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from megatron.core.distributed.custom_fsdp.all_gather_pipeline import UnitState
from megatron.core.distributed.custom_fsdp.unit_events import tensors_in
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.sharded_module.parameter_reads import ParameterReads, in_backward
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver
from megatron.core.units import Unit


def _nothing() -> None:
    """Nobody listens."""


class _Forward:
    """calls: of units, in the order in which they began, where there is a graph. reached: calls from this one on are
    over; None: no backward has come to it. read: see [Note: modules that are not called]."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.read: dict[int, None] = {}
        self.reached: int | None = None

    def to_come(self) -> set[int]:
        """Units that a backward still has to go through."""
        return set() if self.reached == 0 else {*self.read, *self.calls[: self.reached]}


class UnitDriver:
    """Gathers what is needed, and ahead of that what comes next, as long as no more than a bound is gathered
    (--suggested-communication-unit-size). What is not in use is freed when another unit is needed.

    on_forward, on_end: told where an outermost forward begins and ends; on_backward: inside backwards, of each unit
    that they come to and of each contribution. contributed: one has come, until somebody forgets it. Communicates over
    dp_gather and dp_reduce.
    """

    def __init__(self) -> None:
        self.on_forward = self.on_end = self.on_backward = _nothing
        self.contributed = False
        self._held: dict[int, None] = {}  # gathered; of these:
        self._in_use: set[int] = set()
        self._ahead: list[int] = []
        self._stack: list[nn.Module] = []  # whose forwards are under way
        self._forward = _Forward()
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._entered: dict[int, None] = {}  # in the backward under way, and not over
        self._done: set[int] = set()  # all gradients of the microbatch have come
        self._before_it: set[int] = set()  # in use when the forward under way began

    def attach(self, engine: DistributedDataParallel) -> None:
        """Hook the modules of its units."""
        config, sharding = engine.config, engine.sharding
        self._units, self._chunks = engine.units, engine.chunks
        self._gathers, self._reductions = engine.gathers, engine.reductions
        self._frees, grads_cut = (
            cut is not ShardOver.NONE for cut in (sharding.weights, sharding.main_grads)
        )
        self._overlap = grads_cut or (config.overlap_grad_reduce and len(engine.chunks) == 1)
        self._by_step = config.fsdp_reshard_policy == "step"
        self._late = self._by_step or not grads_cut
        self._keys = [unit.keys for unit in engine.reductions.units]
        self._unit_of = {key: unit for unit, own in enumerate(self._keys) for key in own}
        buckets = (engine.buffer.buckets_of_unit(unit.name) for unit in self._units)
        self._numel = [sum(one.bucket.numel for one in of_unit) for of_unit in buckets]
        bound = config.suggested_communication_unit_size
        self._bound = math.ceil(2 * sum(self._numel) / max(1, len(self._numel))) if bound is None else bound
        frozen = set(engine.buffer.frozen)
        # Frozen weights report no gradient, and a unit around others comes back behind them.
        self._ends_with_gradients = [
            not (one.lasts or one.nests) and frozen.isdisjoint(one.names) for one in self._units
        ]
        unit_of = {id(module): unit.index for unit in self._units for module in unit.modules}
        called = [one for chunk in self._chunks for one in chunk.modules() if id(one) in unit_of]
        registered = [unit_of[id(module)] for module in called]
        self._order = list(dict.fromkeys(registered))
        self.begin_step(None)
        self._reads = ParameterReads(self._units, self._read)
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        upcoming = {id(one): tuple(dict.fromkeys(registered[at + 1 :])) for at, one in enumerate(called)}
        for module in dict.fromkeys((*self._chunks, *called)):
            unit = unit_of.get(id(module))
            begins = functools.partial(enter, unit, upcoming.get(id(module), ()))
            engine.hooks += [
                module.register_forward_pre_hook(begins, prepend=True),
                module.register_forward_hook(functools.partial(leave, unit), always_call=True),
            ]

    # The loop -------------------------------------------------------------------------------------------

    def begin_step(self, num_microbatches: int | None) -> None:
        """num_microbatches: of all chunks; None where `begin_backward` will say which is the last."""
        self._left = num_microbatches
        self._begin_microbatch()

    def begin_backward(self, *, is_last: bool) -> None:
        """is_last: the step's gradients are complete behind it, and reduced."""
        self._is_last = is_last
        self._reduces = self._overlap and (is_last or (self._left is not None and not self._late))

    def end_microbatch(self) -> None:
        """All gradients of the microbatch are there: weights are freed but for what stays for the whole step."""
        assert self._left != 0, "more microbatches done than the step has"
        self._complete(self._order)
        for one in self._forwards:
            one.reached = one.reached and 0
        if self._is_last or not self._by_step:
            self.free_all()
        if self._left is not None:
            self._left -= 1
        self._begin_microbatch()

    def _begin_microbatch(self) -> None:
        self._missing = [set(own) for own in self._keys]
        self._entered.clear()
        self._done.clear()
        self._to_reduce = self._order.copy()  # from its end
        self.begin_backward(is_last=self._left == 1)

    # Weights --------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """All weights are whole on return, until the model has used them, or `reshard`."""
        if self._frees:
            for unit in range(len(self._units)):
                self._gather(unit)
        self._gathers.settle()

    def reshard(self) -> None:
        """What is not in use is freed."""
        self._free(self._held.keys() - self._in_use)

    def free_all(self) -> None:
        self._in_use.clear()
        self.reshard()

    # Gradients ------------------------------------------------------------------------------------------

    def grad_begins(self, key: str) -> bool:
        """A contribution is about to be written. Whether it overwrites. Raises ModelError where no more was to come."""
        self.on_backward()
        self.contributed, unit = True, self._unit_of[key]
        if self._overlap and key not in self._missing[unit]:
            raise ModelError(
                f"a gradient for parameter {key!r} arrived after its unit {self._units[unit].name!r} had "
                "all its gradients of the microbatch: a module that runs several times under reentrant activation "
                "checkpointing reports a gradient for each, with no word which is the last; checkpoint it with "
                "use_reentrant=False, or give each use a module of its own"
            )
        return self._reductions.grad_begins(key)

    def grad_ready(self, key: str, microbatch: int) -> None:
        """A contribution is complete; the unit is, with its last one."""
        unit = self._unit_of[key]
        self._missing[unit].discard(key)
        if not self._missing[unit]:
            if self._ends_with_gradients[unit]:
                self._over((unit,))
            self._complete((unit,))

    def _complete(self, units: Collection[int]) -> None:
        """What of these has not come by now does not come in this microbatch. See [Note: order]."""
        self._done.update(units)
        while self._reduces and self._to_reduce and self._to_reduce[-1] in self._done:
            unit = self._to_reduce.pop()
            self._missing[unit].clear()
            self._reductions.start(unit)

    # Hooks ----------------------------------------------------------------------------------------------

    def _enter(self, unit: int | None, upcoming: Iterable[int], module: nn.Module, args: Any) -> None:
        again = in_backward()
        outermost = not self._stack or (module in self._chunks and not again)
        if outermost:
            self._stack.clear()  # an interrupt may have left it
        self._stack.append(module)
        if outermost:
            self.on_forward()
            self._forward, self._before_it = _Forward(), set(self._in_use)
            self._forwards.add(self._forward)
        if unit is None:
            return
        self._reads.called(module)
        if torch.is_grad_enabled():
            self._forward.calls.append(unit)
        self._need(unit, () if again or self._stack[0] not in self._chunks else upcoming)

    def _leave(self, unit: int | None, module: nn.Module, args: Any, output: Any) -> None:
        """Also where it ended with an error."""
        if not self._stack or self._stack[-1] is not module:
            return
        self._stack.pop()
        if unit is not None:
            self._watch(output, unit)
            # What runs again inside a backward has its own soon.
            if not (self._units[unit].lasts or unit in self._entered or in_backward()):
                self._over((unit,))
        if not self._stack:
            self._end(output)

    def _end(self, output: Any) -> None:
        """Of an outermost forward. Behind one without backward nothing stays but what was in use before it."""
        for unit in self._forward.read:
            self._watch(output, unit)
        if not in_backward():
            if torch.is_grad_enabled():
                self._free(self._ahead)
            else:
                self._in_use &= self._before_it
                self.reshard()
        self.on_end()

    def _read(self, unit: Unit) -> None:
        """See [Note: modules that are not called]. Outside of forwards only the user asks, for a shape perhaps."""
        again = in_backward()
        if again or (self._stack and unit.index not in self._forward.read):
            if not again:
                self._forward.read[unit.index] = None
            self._need(unit.index, self._ahead)

    def _watch(self, output: Any, unit: int) -> None:
        """Of several outputs the first counts."""
        if not (self._overlap and torch.is_grad_enabled()):
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        forward, reached, backwards = self._forward, len(self._forward.calls), [-1]  # the last that has come

        def arrives(*_: Any) -> None:
            if backwards[0] != (backward := torch._C._current_graph_task_id()):
                backwards[0] = backward
                self._arrive(forward, reached, unit)

        for node in nodes:
            node.register_prehook(arrives)
        if outputs and not nodes:  # leaves
            register_multi_grad_hook(outputs, arrives, mode="any")

    def _arrive(self, forward: _Forward, reached: int, unit: int) -> None:
        """A backward comes to the output of a call. Raises ModelError where weights would be freed that a second
        backward reads."""
        if torch.is_grad_enabled():  # create_graph=True
            if self._frees:
                raise ModelError(
                    f"unit {self._units[unit].name!r}: create_graph=True with --data-parallel-sharding-strategy "
                    "optim_grads_params, which frees weights behind a backward, so that a backward through it could "
                    "not read them; use optim_grads, optim or no_shard, whose weights stay whole"
                )
            return  # gradients of parameters come with the backward through it
        self.on_backward()
        forward.reached = reached
        to_come = set[int]().union(*(one.to_come() for one in self._forwards))
        over = [one for one in self._entered if one not in to_come]
        for one in over:
            del self._entered[one]
        self._over(over)
        self._complete(over)
        for one in (*forward.read, unit):
            self._entered[one] = None
            if self._units[one].backward_reads:
                before = reversed(forward.calls[:reached])
                self._need(one, (other for other in before if self._units[other].backward_reads))

    # ---

    def _over(self, units: Iterable[int]) -> None:
        if not self._by_step:
            self._in_use.difference_update(units)

    def _need(self, unit: int, upcoming: Iterable[int]) -> None:
        """On return the unit's weights are whole, and what is needed next is on its way."""
        if not self._frees:
            self._gathers.wait(unit)
            return
        self._in_use.add(unit)
        room = self._bound - sum(self._numel[one] for one in self._in_use)
        self._ahead = []
        for other in (one for one in upcoming if one not in self._in_use):
            if (room := room - self._numel[other]) < 0:
                break
            self._ahead.append(other)
        self._free(self._held.keys() - self._in_use - {*self._ahead})
        for other in (unit, *self._ahead):
            self._gather(other)
        self._gathers.wait(unit)

    def _gather(self, unit: int) -> None:
        if self._gathers.state(unit) is UnitState.SHARDED:  # nobody else reads it just now
            self._gathers.start(unit)
        self._held[unit] = None

    def _free(self, units: Iterable[int]) -> None:
        for unit in tuple(units):
            self._held.pop(unit, None)
            if self._gathers.state(unit) is not UnitState.SHARDED:
                self._gathers.free(unit)
