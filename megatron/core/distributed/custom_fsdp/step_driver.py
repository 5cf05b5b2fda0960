"""A sharded module's steps without a trainer: each begins with a forward and ends with a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.bucket_memory import trained
from megatron.core.distributed.custom_fsdp.hooks import in_backward
from megatron.core.distributed.custom_fsdp.shard_parameters import UNCOPIED, ShardParameters
from megatron.core.distributed.custom_fsdp.sharded_engine import FullyShardedDataParallel
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver
from megatron.core.units import UnitModule

DRIVER = "_fully_sharded"  # a module's only attribute of ours


class StepDriver:
    """Hooks on a module and its units that begin and end the engine's steps, and the shards in the place of the
    module's parameters.

    sync: whether the backward that comes next reduces. Each one that does adds to what `zero_grad` has left. used: a
    forward has run. unit_modules: what the engine's units were made of.
    """

    def __init__(
        self, module: nn.Module, engine: FullyShardedDataParallel, unit_modules: Sequence[UnitModule]
    ) -> None:
        self.module, self.engine, self.unit_modules = module, engine, unit_modules
        engine.weights_changed()
        engine.driver.on_gradient, engine.driver.on_backward = self._contribution, self._arm
        self.sync, self.used = True, False
        self._armed = self._is_last = False  # a backward is under way; it ends the step
        self._contributed = False  # a gradient has come in this step
        self._held = False  # this step adds to what `.grad` holds
        self._holds_sum = False  # the gradients are sums that a next backward adds to
        self._running: nn.Module | None = None  # the outermost of ours whose forward is under way
        # The module's own parameters and whether they were trained when it was sharded.
        self._trained = [(n, p, p.requires_grad) for n, p in module.named_parameters()]
        self.shards = ShardParameters(engine.buffer, module)
        engine.release_gradients()
        parts = (part for unit in engine.units for part in unit.modules)  # may be called without the whole
        self._handles = [
            handle
            for part in dict.fromkeys((module, *parts))
            for handle in (
                part.register_forward_pre_hook(self._before, prepend=True),
                part.register_forward_hook(self._after, always_call=True),
            )
        ]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(UNCOPIED)

    def release(self) -> None:
        """The module is a plain one again, whose weights only the engine can still read."""
        for handle in (*self._handles, *self.engine.hooks):
            handle.remove()
        self.shards.release()

    def write_back(self) -> None:
        """After a step of the optimizer: its weights are the model's."""
        with torch.no_grad():
            changed = self.shards.take_changes()
        if changed:
            self.engine.buffer.copy_main_to_weights()
            self.engine.weights_changed()

    def _before(self, module: nn.Module, args: Any) -> None:
        if not in_backward() and (self._running is None or module is self.module):
            self._prepare()
            self._set_running(module)

    def _set_running(self, module: nn.Module | None) -> None:
        self._running = module
        self.shards.in_forward = module is not None

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._running and not in_backward():
            self._set_running(None)

    def _prepare(self) -> None:
        """Before a forward: weights are the optimizer's, a step has begun."""
        training = torch.is_grad_enabled()
        if training:
            self._check_trained()
        if not self.used:
            self._check_sharded()
        self.used = True
        self.shards.read_whole(False)
        self._set_running(None)  # an interrupt may have left it
        self.write_back()
        if self._armed:
            self._abandon_step()
        if training and not self.engine.is_stepping:
            self._begin_step()

    def _check_trained(self) -> None:
        shards = self.shards.registered
        changed = [
            name
            for name, own, was in self._trained
            if own.requires_grad is not was or shards[name].requires_grad is not was
        ]
        if changed:
            raise ModelError(
                f"requires_grad of {sorted(changed)} was changed after fully_shard, which cuts memory by it: set it "
                "before, or leave these parameters out of the optimizer; torch.no_grad() trains nothing"
            )

    def _check_sharded(self) -> None:
        known = {id(shard) for shard in self.shards.registered.values()}
        late = [name for name, parameter in self.module.named_parameters() if id(parameter) not in known]
        if late:
            raise ModelError(
                f"{late} came with a module that was put in after fully_shard: each rank would train it by itself; "
                "do it before"
            )

    def _begin_step(self) -> None:
        engine = self.engine
        grads = [p.grad for p in self.shards.current() if p.grad is not None] if self._holds_sum else []
        if engine.sharding.main_grads is ShardOver.NONE and engine.place.dp_size > 1:
            # sync, on this path only: zero_grad(set_to_none=False) leaves zeros, which may be overwritten
            if any(bool(grad.any()) for grad in grads):
                raise ModelError(
                    f"--data-parallel-sharding-strategy {engine.config.data_parallel_sharding_strategy}: gradients of "
                    "an earlier backward are there, reduced: call zero_grad() before the next forward, or run all "
                    "backwards of a step but its last inside no_sync()"
                )
            grads = []
        if grads:
            self._take_held()
        self._held, self._contributed = bool(grads), False
        engine.begin_step(None, accumulate=self._held)

    def _take_held(self) -> None:
        """What is added to is what `.grad` holds now: nothing, or something else than what was reduced. What instances
        hold is summed again after the next backward: one of them keeps what they have summed, or each its own part of
        it."""
        for parameter, grad in self.shards:
            if parameter.grad is None:
                grad.zero_()
            elif parameter.grad.data_ptr() != grad.data_ptr():
                grad.copy_(parameter.grad)
        scattered, place = self.engine.sharding.optimizer is ShardOver.FULL, self.engine.place
        for bucket in (one for one in self.engine.buffer.buckets if one.trained and place.outer_size > 1):
            own = trained(bucket.optimizer_grads).clone() if scattered else None
            if scattered or place.outer_rank > 0:
                trained(bucket.main_grads).zero_()
            if own is not None:
                trained(bucket.optimizer_grads).copy_(own)

    def _abandon_step(self) -> None:
        """The last backward ended with an error: what it has started ends, and what it has added is not kept."""
        self._armed = False
        if self.engine.is_stepping:
            if self._is_last:  # other ranks end theirs, and wait for each other there
                self.engine.microbatch_done(0, 0)
                self.engine.finish()
            self._begin_step()

    def _contribution(self) -> None:
        """A gradient of a parameter comes."""
        self._arm()
        self._contributed = True

    def _arm(self) -> None:
        """Called inside each backward: when it ends, the microbatch is over."""
        if self._armed:
            return
        self._armed = True
        if not self.engine.is_stepping:  # several forwards ran before their backwards
            self._begin_step()
        self._is_last = self.sync
        self.engine.driver.begin_backward(is_last=self.sync)
        self._call_after_backward()

    def _call_after_backward(self, *_: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        outside = torch._C._current_autograd_node()
        if outside is not None:  # a backward inside a backward (reentrant checkpointing): that one has to end
            outside.register_hook(self._call_after_backward)  # goes with the node
            return
        self._armed = False
        self.engine.microbatch_done(0, 0)
        if not self._is_last:
            return
        self.engine.finish()
        self.shards.may_have_changed = True
        # A backward to inputs only (torch.autograd.grad) leaves .grad alone, as it does without sharding. sync, on this
        # path only: other ranks may have contributed.
        if not (self._contributed or self._held or any(bool(grad.any()) for _, grad in self.shards)):
            return
        self._holds_sum = True
        for parameter, grad in self.shards:
            if parameter.grad is None or parameter.grad.data_ptr() != grad.data_ptr():
                # A tensor of its own: whether somebody holds one decides when their memory may go.
                parameter.grad = grad.to(parameter.dtype) if grad.dtype != parameter.dtype else grad.detach()


def driver_of(module: nn.Module) -> StepDriver:
    """Raises ModelError for a module that is a unit of another by now."""
    driver: StepDriver = module.__dict__[DRIVER]
    if driver.module is not module:
        raise ModelError(
            f"{type(module).__name__} is a unit of {type(driver.module).__name__} since fully_shard was called for "
            "that: call what fully_shard adds there"
        )
    return driver
