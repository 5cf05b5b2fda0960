"""A sharded module's steps without a trainer: each begins with a forward and ends with a backward.

[Note: what a step adds to] Loops call `zero_grad` before the forward, or between it and the backward, so the first
backward of a step decides whether there is something to add to.

[Note: penalties] What autograd itself adds to a shard's `.grad` (of a penalty on weights, `p.norm()`) would be
overwritten by the sums over ranks: `.grad` is put aside meanwhile, and the penalty added to the sums when they are
complete.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp.bucket_memory import trained
from megatron.core.distributed.sharded_module.parameter_reads import in_backward
from megatron.core.distributed.sharded_module.shard_parameters import ShardParameters
from megatron.core.distributed.sharded_module.sharded_engine import FullyShardedDataParallel
from megatron.core.distributed.sharded_module.sharded_tensor import local_grad, local_part
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver

DRIVER = "_fully_sharded"  # a module's only attribute of ours


class StepDriver:
    """Begins and ends the engine's steps, and has the shards in the place of the module's parameters.

    taken: shards of calls inside, by the id of the module's own parameter. sync: whether the backward that comes next
    reduces. Each one that does adds to what `zero_grad` has left. used: a forward has run. units: modules of those
    that were asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: FullyShardedDataParallel,
        units: list[tuple[nn.Module, ...]],
        taken: Mapping[int, nn.Parameter],
    ) -> None:
        self.module, self.engine, self.units = module, engine, units
        self.sync, self.used = True, False
        self._armed = self._is_last = False  # a backward is under way; it ends the step
        self._held: bool | None = None  # this step adds to what `.grad` held; None before its first backward
        # See [Note: penalties]: shards that have one in the backward under way, and their gradients before.
        self._aside: list[tuple[nn.Parameter, Tensor | None]] = []
        self._penalties: dict[str, Tensor] = {}  # of this step
        self._holds_sum = False  # the gradients are sums that a next backward adds to
        self.shards = ShardParameters(engine.buffer, module, engine.ps.tp_group, taken)
        engine.release_gradients()
        self.write_back()
        driver = engine.driver
        driver.on_forward, driver.on_backward = self._before, self._arm
        driver.on_end = functools.partial(self.shards.set_in_forward, False)
        heard = weakref.ref(self)  # a tensor's hook would hold it for ever
        self._handles = [
            shard.register_hook(functools.partial(_hears_penalty, heard, name))
            for name, shard, _ in self.shards
        ]

    def release(self) -> dict[int, nn.Parameter]:
        """The module is a plain one again, its weights are those of the shards: these, by the id of a parameter."""
        self.engine.settle_weights()
        for handle in (*self._handles, *self.engine.hooks):
            handle.remove()
        return self.shards.release()

    def write_back(self) -> None:
        """After a step of the optimizer: its weights are the model's."""
        with torch.no_grad():
            changed = self.shards.take_changes()
        if changed:
            self.engine.buffer.copy_main_to_weights()
            self.engine.weights_changed()

    def _before(self) -> None:
        """A forward begins: weights are the optimizer's, a step has begun."""
        if not in_backward():
            training = torch.is_grad_enabled()
            self._check_parameters(training)
            self.shards.read_whole(False)
            self.write_back()
            if self._armed:
                self._abandon_step()
            if training and not self.engine.is_stepping:
                self._begin_step()
        self.shards.set_in_forward(True)

    def _check_parameters(self, training: bool) -> None:
        shards, was = self.shards.registered, set(self.shards.names)
        changed = [
            name
            for name, own in self.shards.own.items()
            if not own.requires_grad == shards[name].requires_grad == (name in was)
        ]
        if changed and training:
            raise ModelError(
                f"requires_grad of {sorted(changed)} was changed after fully_shard, which cuts memory by it: set it "
                "before, or leave these parameters out of the optimizer; torch.no_grad() trains nothing"
            )
        if self.used:
            return
        known = {id(shard) for shard in shards.values()}
        if late := [name for name, one in self.module.named_parameters() if id(one) not in known]:
            raise ModelError(
                f"{late} came with a module that was put in after fully_shard: each rank would train it by itself; "
                "do it before"
            )
        self.used = True

    def _begin_step(self) -> None:
        """See [Note: what a step adds to]."""
        self._held = None
        self.engine.driver.contributed = False
        self._penalties.clear()
        self.engine.begin_step(None, keep_gradients=self._has_sum())

    def _has_sum(self) -> bool:
        """Whether there are gradients that a backward may add to."""
        return self._holds_sum and any(parameter.grad is not None for parameter in self.shards.current())

    def _decide_held(self) -> None:
        """In the first backward of a step."""
        engine, self._held = self.engine, self._has_sum()
        if self._held and engine.sharding.main_grads is ShardOver.NONE and engine.place.dp_size > 1:
            self._held = False
            # sync, on this path only: zero_grad(set_to_none=False) leaves zeros, which may be overwritten
            if any(bool(local_grad(parameter).any()) for parameter in self.shards.current()):
                raise ModelError(
                    f"--data-parallel-sharding-strategy {engine.config.data_parallel_sharding_strategy}: gradients of "
                    "an earlier backward are there, reduced: call zero_grad() before the next backward, or run all "
                    "backwards of a step but its last inside no_sync()"
                )
        if self._held:
            engine.reductions.add_to_sums()
            self._take_held()
        else:
            for parameter in self.shards.current():
                parameter.grad = None
            engine.release_gradients()

    def _take_held(self) -> None:
        """What is added to is what `.grad` holds now: nothing, or something else than what was reduced. What instances
        hold is summed again after the next backward: one of them keeps what they have summed, or each its own part of
        it."""
        for _, parameter, grad in self.shards:
            if parameter.grad is None:
                grad.zero_()
            elif (held := local_grad(parameter)).data_ptr() != grad.data_ptr():
                grad.copy_(held)
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
        self._put_back()
        if self.engine.is_stepping:
            if self._is_last:  # other ranks end theirs, and wait for each other there
                self.engine.microbatch_done(0, 0)
                self.engine.finish()
            self._begin_step()
        self.engine.driver.free_all()

    def _arm(self) -> None:
        """Called inside each backward: when it ends, the microbatch is over."""
        if self._armed:
            return
        self._armed = True
        if not self.engine.is_stepping:  # several forwards ran before their backwards
            self._begin_step()
        if self._held is None:
            self._decide_held()
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
        self._put_back()
        self.engine.microbatch_done(0, 0)
        if self._is_last:
            self.engine.finish()
            self.shards.may_have_changed = True
            self._give_gradients()

    def _give_gradients(self) -> None:
        """To the shards, of the step that is over."""
        # A backward to inputs only (torch.autograd.grad) leaves .grad alone, as it does without sharding. sync, on this
        # path only: other ranks may have contributed.
        known = self.engine.driver.contributed or self._held or self._penalties
        if not (known or any(bool(grad.any()) for grad in self.shards.grads)):
            return
        self._holds_sum = True
        for name, parameter, grad in self.shards:
            if name in self._penalties:
                grad.add_(self._penalties[name])
            if parameter.grad is None or local_grad(parameter).data_ptr() != grad.data_ptr():
                # A tensor of its own: whether somebody holds one decides when their memory may go.
                own = grad.to(parameter.dtype) if grad.dtype != parameter.dtype else grad.detach()
                parameter.grad = self.shards.shown(name, own)

    def _put_back(self) -> None:
        """The backward is over, or has ended with an error."""
        for parameter, before in self._aside:
            parameter.grad = before
        self._aside.clear()

    def penalty(self, name: str, grad: Tensor) -> None:
        """Inside a backward, before autograd adds to a shard. See [Note: penalties]."""
        self._arm()
        parameter, before = self.shards.registered[name], self._penalties.get(name)
        own = local_part(grad)
        self._penalties[name] = own.clone() if before is None else before + own
        self._aside.append((parameter, parameter.grad))
        parameter.grad = None


def _hears_penalty(driver: weakref.ref[StepDriver], name: str, grad: Tensor) -> None:
    if (heard := driver()) is not None:
        heard.penalty(name, grad)


def driver_of(module: nn.Module) -> StepDriver:
    """Raises ModelError for a module that is a unit of another by now."""
    driver: StepDriver = module.__dict__[DRIVER]
    if driver.module is not module:
        raise ModelError(
            f"{type(module).__name__} is a unit of {type(driver.module).__name__} since fully_shard was called for "
            "that: call what fully_shard adds there"
        )
    return driver
