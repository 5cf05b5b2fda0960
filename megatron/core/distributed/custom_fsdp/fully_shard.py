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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core import collectives
from megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from megatron.core.distributed.custom_fsdp.hooks import in_backward
from megatron.core.distributed.custom_fsdp.units import UnitModule
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.initial_weights import broadcast_weights
from megatron.core.distributed.sharding import Cut
from megatron.core.module import MegatronModule, ModelError
from megatron.core.optimizer.clip_grads import squared_sums
from megatron.core.parallel_state import ParallelState, data_parallel_state, parallel_state_of_mesh
from megatron.core.weight_grad import WeightGradAccumulator


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
    their names, or tuples of modules' names. sync_module_states: all ranks begin with rank 0's weights.

    Communicates when called, in forward and in backward. Raises ModelError where units do not fit the module.
    """
    if ps_or_mesh is None:
        ps = data_parallel_state()
    elif isinstance(ps_or_mesh, DeviceMesh):
        ps = parallel_state_of_mesh(ps_or_mesh)
    else:
        ps = ps_or_mesh
    config = config or DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
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
        sink: WeightGradAccumulator | None = None
        meta = None
        if isinstance(module, MegatronModule):
            sink, meta = module.context.grads, module.param_meta
        if sync_module_states:
            broadcast_weights([module], ps)
        # Not registered as a child: this module's parameters are the shards.
        self.__dict__["_module"] = module
        self.__dict__["_engine"] = engine = FullyShardedDataParallel(
            module, ps, config, meta, sink, fsdp_unit_modules=fsdp_unit_modules
        )
        engine.weights_changed()
        self._names: dict[str, str] = {}  # name of the registered shard -> of the parameter
        for name in engine.buffer.names:
            self._names[name.replace(".", "/")] = name
            shard = nn.Parameter(engine.buffer.main_weight_part(name))
            self.register_parameter(name.replace(".", "/"), shard)
        engine.on_gradient = self._arm
        self._versions = self._current_versions()
        self._stepped = False
        self._watch_optimizers()
        self._sync = True
        self._armed = False
        self._holds_sum = False  # the gradients are sums that a next backward adds to
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        for unit in engine.units:  # units may be called without the whole
            for part in unit.modules:
                part.register_forward_pre_hook(self._before_forward, prepend=True)

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
                    f"{self._names[name]} would become {new.dtype} on {new.device}: a sharded module keeps dtype and "
                    "device; convert the module before fully_shard"
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

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """name -> whole weight, on every rank, on the host. Communicates over dp_gather, unit by unit."""
        self._write_back()
        engine = self.engine
        engine.settle_weights()
        out: dict[str, Tensor] = {}
        for unit in engine.units:
            engine.wait(0, unit.index)
            out |= {name: engine.buffer.weight(name).detach().cpu().clone() for name in unit.names}
            engine.weights_read(unit.index)
        order = [name for name, _ in self.module.named_parameters()]
        return {name: out[name] for name in order}

    @torch.no_grad()
    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights by name, the same on every rank. Raises ModelError where names or shapes differ."""
        buffer = self.engine.buffer
        shapes = {name: buffer.param_meta[name].local_shape for name, _ in self.module.named_parameters()}
        wrong = set(shapes.keys() ^ weights.keys()) | {
            name for name in shapes.keys() & weights.keys() if tuple(weights[name].shape) != shapes[name]
        }
        if wrong:
            raise ModelError(f"weights that are missing, unknown or of another shape: {sorted(wrong)}")
        for name, weight in weights.items():
            buffer.write_weight(name, weight)
        self.engine.weights_changed()
        self._versions = self._current_versions()

    # A step by itself -----------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if in_backward():
            return
        self._write_back()
        if self._armed:
            self._abandon_step()
        if torch.is_grad_enabled() and not self.engine.is_stepping:
            self._begin_step()

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
        engine.begin_step(None, accumulate=held)

    def _take_held(self) -> None:
        """What is added to is what `.grad` holds now: nothing, or something else than what was reduced."""
        for parameter, name in self._shards():
            grad = self.engine.buffer.main_grad_part(name)
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
            self.engine.reduce(0, last=True).wait()
            self._begin_step()

    def _arm(self) -> None:
        """Called inside each backward: when it ends, the microbatch is over."""
        if self._armed:
            return
        self._armed = True
        if not self.engine.is_stepping:  # several forwards ran before their backwards
            self._begin_step()
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
        if not self._sync:
            return
        self.engine.finish()
        self._holds_sum = True
        for parameter, name in self._shards():
            grad = self.engine.buffer.main_grad_part(name)
            if parameter.grad is None or parameter.grad.data_ptr() != grad.data_ptr():
                parameter.grad = grad.to(parameter.dtype)

    def _write_back(self) -> None:
        """After a step of the optimizer: its weights are the model's."""
        versions = self._current_versions()
        if self._stepped or versions != self._versions:
            self.engine.buffer.copy_main_to_weights()
            self.engine.weights_changed()
            self._versions, self._stepped = versions, False

    def _watch_optimizers(self) -> None:
        """Fused optimizers write weights without a word to autograd: every step of an optimizer that has one of ours is
        heard of."""
        ours, me = {id(parameter) for parameter in self.parameters()}, weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            module = me()
            if module is not None and any(
                id(p) in ours for group in optimizer.param_groups for p in group["params"]
            ):
                module._stepped = True

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters()]

    def _shards(self) -> Iterator[tuple[nn.Parameter, str]]:
        for registered, parameter in self.named_parameters():
            yield parameter, self._names[registered]
