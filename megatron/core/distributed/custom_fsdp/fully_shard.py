"""Sharding without the trainer: `fully_shard(module)` for any `nn.Module`, any torch optimizer.

    model = fully_shard(MyModel(), fsdp_unit_modules=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(batch)
    loss.backward()                 # after it the parameters' .grad hold the mean over ranks
    optimizer.step()
    optimizer.zero_grad()

`model.parameters()` are this rank's shards: 1-D, one a parameter (empty where the rank has no part of it, so that every
rank builds the same optimizer), fp32 for 16-bit models.
The wrapped module's own parameters stay what they were, whole while they are in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core import collectives
from megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    ranks_of,
)
from megatron.core.distributed.custom_fsdp.shard_parameters import ShardParameters
from megatron.core.distributed.custom_fsdp.standalone_config import resolve_standalone
from megatron.core.distributed.custom_fsdp.whole_state import load_whole_state, whole_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.hooks import in_backward
from megatron.core.distributed.initial_weights import broadcast_weights
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.units import UnitModule
from megatron.core.module import ModelError
from megatron.core.optimizer.clip_grads import squared_sums
from megatron.core.parallel_state import ParallelState


def fully_shard(
    module: nn.Module,
    ps_or_mesh: ParallelState | DeviceMesh | None = None,
    config: DistributedDataParallelConfig | None = None,
    *,
    fsdp_unit_modules: Sequence[UnitModule] | None = None,
    sync_module_states: bool = True,
) -> FullyShardedModule:
    """Shard a module over data parallel ranks.

    ps_or_mesh: the ranks; a mesh of one dim, or of two (instances, ranks of an instance); all of the default process
    group if not given. config: strategy and how it runs; optim_grads_params if not given. fsdp_unit_modules: classes,
    their names, or tuples of modules' names; those of the config if not given. sync_module_states: all ranks begin with
    rank 0's weights.

    Communicates when called, in forward and in backward. Raises ModelError where units do not fit the module, or where
    the config sets what has no effect (`standalone_config.py`); MeshError and ReshardPlanError as the engine.
    """
    ps = ranks_of(ps_or_mesh)
    config = resolve_standalone(config, instances=ps.dp_outer_group.size)
    return FullyShardedModule(
        module, ps, config, fsdp_unit_modules=fsdp_unit_modules, sync_module_states=sync_module_states
    )


class FullyShardedModule(nn.Module):
    """A module whose steps begin with a forward and end with a backward.

    Gradients are means over ranks. Each backward reduces, and adds to what `zero_grad` has left; inside `no_sync` it
    does not. Not for modules that several forwards and backwards of one step cross pipeline ranks with: those are the
    trainer's.
    """

    def __init__(
        self,
        module: nn.Module,
        ps: ParallelState,
        config: DistributedDataParallelConfig,
        *,
        fsdp_unit_modules: Sequence[UnitModule] | None = None,
        sync_module_states: bool = True,
    ) -> None:
        super().__init__()
        config = dataclasses.replace(config, ddp_average_in_collective=True)
        if sync_module_states:
            broadcast_weights([module], ps)
        # Not registered as a child: this module's parameters are the shards.
        self.__dict__["_module"] = module
        self.__dict__["_engine"] = engine = FullyShardedDataParallel(
            module, ps, config, fsdp_unit_modules=fsdp_unit_modules
        )
        engine.weights_changed()
        engine.on_gradient, engine.on_backward = self._contribution, self._arm
        self._sync = True
        self._armed = False  # a backward is under way
        self._is_last = False  # that backward ends the step
        self._contributed = False  # a gradient has come in this step
        self._held = False  # this step adds to what `.grad` holds
        self._holds_sum = False  # the gradients are sums that a next backward adds to
        self._in_forward = False  # of the whole module
        # The module's own parameters and whether they were trained when it was wrapped.
        self._trained = [(n, p, p.requires_grad) for n, p in module.named_parameters()]
        self._shards = shards = ShardParameters(engine.buffer, taken={*dir(self), "_shards"})
        for registered, shard in shards.made.items():
            self.register_parameter(registered, shard)
        shards.watch(self._parameters)
        engine.release_gradients()
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)
        for unit in engine.units:  # units may be called without the whole
            for part in unit.modules:
                if part is not module:
                    part.register_forward_pre_hook(self._before_unit, prepend=True)
                    part.register_forward_hook(self._after_unit, always_call=True)

    @property
    def module(self) -> nn.Module:
        """What was wrapped."""
        module: nn.Module = self.__dict__["_module"]
        return module

    @property
    def engine(self) -> FullyShardedDataParallel:
        """What shards it."""
        engine: FullyShardedDataParallel = self.__dict__["_engine"]
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> FullyShardedModule:
        self.module.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedModule:
        for name, shard in self.named_parameters():
            new = fn(shard.data)
            if (new.dtype, new.device) != (shard.dtype, shard.device):
                raise ModelError(
                    f"{self._shards.names[name]} would become {new.dtype} on {new.device}: a sharded module keeps "
                    "dtype and device; convert the module before fully_shard"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedModule:
        raise ModelError(
            "a sharded module cannot be copied: its memory and groups are its own; copy the module before fully_shard, "
            "or load full_state_dict() into another one"
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not reduce; the first one after it reduces the sum.

        What it costs: gradients stay whole on every rank until then, as many bytes as all of the model's gradients (4
        an element in fp32). Without it, a backward costs one more reduction, over instances too, and no memory.

        Raises ModelError where gradients share the double buffer's slots, which cannot keep them.
        """
        if self.engine.config.fsdp_double_buffer and self.engine.sharding.main_grads is not Cut.WHOLE:
            raise ModelError(
                "--fsdp-double-buffer: no_sync() keeps the gradients of all units, and two slots hold those of two; "
                "leave out one of them"
            )
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most max_norm; the norm before.

        Communicates over dp.
        """
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        total = squared_sums(grads).sum()
        engine = self.engine
        if engine.sharding.optimizer is not Cut.WHOLE:
            collectives.all_reduce(total, engine.ps.dp_reduce_group)
            if engine.sharding.optimizer is Cut.FULL:
                collectives.all_reduce(total, engine.ps.dp_outer_group)
        norm = float(total.sqrt())  # sync: the host decides on the factor
        if max_norm < norm:
            for grad in grads:
                grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def full_state_dict(self) -> dict[str, Any]:
        """What the plain module's `state_dict()` would be, on every rank, on the host: whole weights under all of their
        names, this rank's buffers. Communicates over dp_gather, unit by unit."""
        self._write_back()
        return whole_state(self.module, self.engine)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a plain module's `state_dict()`, the same on every rank. Raises ModelError where names or shapes differ,
        or where two names of one weight have different values."""
        self._shards.take_changes()  # and drop them
        load_whole_state(self.module, self.engine, state)
        self.engine.weights_changed()

    # A step by itself -----------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._prepare()
            self._in_forward = True

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._in_forward = False
        failed = output is None
        if (torch.is_grad_enabled() or failed) and not in_backward():
            self.engine.weights_were_read()  # its backward may never run, and weights be written next

    def _before_unit(self, module: nn.Module, args: Any) -> None:
        if not self._in_forward and not in_backward():
            self._prepare()

    def _after_unit(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._in_forward and not in_backward():
            self.engine.weights_were_read()

    def _prepare(self) -> None:
        """Before a forward: weights are the optimizer's, a step has begun."""
        training = torch.is_grad_enabled()
        if training:
            self._check_trained()
        self._write_back()
        if self._armed:
            self._abandon_step()
        if training and not self.engine.is_stepping:
            self._begin_step()

    def _check_trained(self) -> None:
        changed = [
            name for name, parameter, trained in self._trained if parameter.requires_grad is not trained
        ]
        changed += [
            name
            for name, (shard, _) in zip(self._shards.names.values(), self._shards, strict=True)
            if not shard.requires_grad
        ]
        if changed:
            raise ModelError(
                f"requires_grad of {sorted(set(changed))} was changed after fully_shard, which cuts memory by it: "
                "set it before, or leave these parameters out of the optimizer; torch.no_grad() trains nothing"
            )

    def _begin_step(self) -> None:
        engine = self.engine
        whole = engine.sharding.main_grads is Cut.WHOLE and engine.place.dp_size > 1
        held = self._holds_sum and any(parameter.grad is not None for parameter in self.parameters())
        if held and whole:
            # sync, on this path only: zero_grad(set_to_none=False) leaves zeros, which may be overwritten
            held = any(p.grad is not None and bool(p.grad.any()) for p in self.parameters())
            if held:
                raise ModelError(
                    f"--data-parallel-sharding-strategy {engine.config.data_parallel_sharding_strategy}: gradients of "
                    "an earlier backward are there, reduced: call zero_grad() before the next forward, or run all "
                    "backwards of a step but its last inside no_sync()"
                )
        if held:
            self._take_held()
        self._held, self._contributed = held, False
        engine.begin_step(None, accumulate=held)

    def _take_held(self) -> None:
        """What is added to is what `.grad` holds now: nothing, or something else than what was reduced."""
        for parameter, grad in self._shards:
            if parameter.grad is None:
                grad.zero_()
            elif parameter.grad.data_ptr() != grad.data_ptr():
                grad.copy_(parameter.grad)
        if self.engine.place.outer_size > 1:
            self._keep_outer_sum_once()

    def _keep_outer_sum_once(self) -> None:
        """What instances hold is summed again after the next backward: one of them keeps what they have summed, or
        each its own part of it."""
        engine = self.engine
        for bucket in engine.buffer.buckets:
            if bucket.main_grads is None or bucket.optimizer_grads is None:
                continue
            if engine.sharding.optimizer is Cut.FULL:
                own = bucket.optimizer_grads.clone()
                bucket.main_grads.zero_()
                bucket.optimizer_grads.copy_(own)
            elif engine.place.outer_rank > 0:
                bucket.main_grads.zero_()

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
        self._is_last = self._sync
        self.engine.hold_back(not self._sync)
        if self._sync:
            self.engine.expect_last()
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
        self._shards.may_have_changed = True
        # A backward to inputs only (torch.autograd.grad) leaves .grad alone, as it does without sharding. sync, on this
        # path only: other ranks may have contributed.
        if not (self._contributed or self._held or any(bool(grad.any()) for _, grad in self._shards)):
            return
        self._holds_sum = True
        for parameter, grad in self._shards:
            if parameter.grad is None or parameter.grad.data_ptr() != grad.data_ptr():
                # A tensor of its own: whether somebody holds one decides when their memory may go.
                parameter.grad = grad.to(parameter.dtype) if grad.dtype != parameter.dtype else grad.detach()

    def _write_back(self) -> None:
        """After a step of the optimizer: its weights are the model's."""
        with torch.no_grad():
            changed = self._shards.take_changes()
        if changed:
            self.engine.buffer.copy_main_to_weights()
            self.engine.weights_changed()
