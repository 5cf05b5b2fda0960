"""Sharding without the trainer: `fully_shard(module)` for any `nn.Module`, any torch optimizer.

The model stays what it is: its class is a subclass of the one it had, attributes and methods are where they were.
`model.parameters()` are sharded parameters under the names of the parameters (`ShardedTensor`, which answers as the
whole one and holds this rank's part; plain ones where every rank has all of them), fp32 for 16-bit models. Inside a
forward they are what they were, whole while they are in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.sharding import is_contradicted
from megatron.core.distributed.sharded_module.inner_calls import InnerCalls
from megatron.core.distributed.sharded_module.shard_parameters import UNCOPIED
from megatron.core.distributed.sharded_module.sharded_engine import (
    FullyShardedDataParallel,
    ranks_of,
    refuse_plans,
)
from megatron.core.distributed.sharded_module.step_driver import DRIVER, StepDriver, driver_of
from megatron.core.module import ModelError
from megatron.core.sharding_table import STRATEGIES, goes_with_outer, grads_are_sharded
from megatron.core.transport.collectives import broadcast_weights
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.units import UnitModule, matched_units


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | ParallelState | None = None,
    config: DistributedDataParallelConfig | None = None,
    *,
    fsdp_unit_modules: Sequence[UnitModule] | None = None,
    sync_module_states: bool = True,
) -> FullyShardedModule:
    """Shard a module over data parallel ranks, in place; returns the module.

    Modules inside it that were given to fully_shard before are units of it from here on.

    mesh: the ranks, of one dim, or of two (instances, ranks of an instance); all of the default process group if not
    given. config: strategy and how it runs; optim_grads_params if not given. Both are those of the calls
    inside where there are some. fsdp_unit_modules: classes, their names, or tuples of modules' names; those of the
    config if not given. sync_module_states: all ranks begin with rank 0's weights.

    Communicates when called, in forward and in backward. Raises ModelError where units do not fit the module, where it
    is sharded already, where calls inside differ, or where the config sets what has no effect (`resolve_standalone`);
    MeshError as the engine.
    """
    _keep_out_of_graphs()
    inner = InnerCalls(module)
    ps = inner.first.ps if mesh is None and inner.first else ranks_of(mesh)
    if config is None and inner.first:
        config = dataclasses.replace(inner.first.config, fsdp_unit_modules=None)
    else:
        config = resolve_standalone(config, instances=ps.dp_outer_group.size)
        config = dataclasses.replace(config, ddp_average_in_collective=True)
    own_units = config.fsdp_unit_modules or () if fsdp_unit_modules is None else fsdp_unit_modules
    unit_modules = inner.unit_modules(own_units)
    taken = inner.take_over(ps, config)
    if sync_module_states:
        broadcast_weights([module], ps, without=taken.keys())
    engine = FullyShardedDataParallel(module, ps, config, fsdp_unit_modules=unit_modules)
    driver = StepDriver(module, engine, [(module,), *matched_units(module, unit_modules)], taken)
    for one in module.modules():
        if one is module or DRIVER in one.__dict__:  # of a call inside
            one.__dict__[DRIVER] = driver
    names = {name for own in (module._modules, module._parameters, module._buffers) for name in own}
    module.__class__ = _class_of(cast(Any, type(module)), frozenset(names & vars(FullyShardedModule).keys()))
    return cast(FullyShardedModule, module)


class FullyShardedModule(nn.Module):
    """What `fully_shard` adds to a module's class, behind all that is the class's own.

    Gradients are means over ranks. Each backward reduces, and adds to what `zero_grad` has left; inside `no_sync` it
    does not. Not for modules that several forwards and backwards of one step cross pipeline ranks with: those are the
    trainer's.
    """

    @property
    def engine(self) -> FullyShardedDataParallel:
        """What shards it."""
        return driver_of(self).engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(UNCOPIED)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedModule:
        for name, shard in self.named_parameters():
            new = fn(shard.data)
            if (new.dtype, new.device) != (shard.dtype, shard.device):
                raise ModelError(
                    f"{name} would become {new.dtype} on {new.device}: a sharded module keeps "
                    "dtype and device; convert the module before fully_shard"
                )
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not reduce; the first one after it reduces the sum.

        What it costs: gradients stay whole on every rank until then, as many bytes as all of the model's gradients (4
        an element in fp32). Without it, a backward costs one more reduction, over instances too, and no memory.
        """
        before = driver_of(self).sync
        FullyShardedModule.set_requires_gradient_sync(self, False)
        try:
            yield
        finally:
            driver_of(self).sync = before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """The same from here on, until it is called again: whether backwards reduce."""
        driver_of(self).sync = requires_gradient_sync

    def unshard(self) -> None:
        """Until `reshard` or the next forward, parameters that are read as attributes are whole. Communicates over
        dp_gather."""
        driver = driver_of(self)
        driver.write_back()
        driver.engine.driver.unshard()
        driver.shards.read_whole(True)

    def reshard(self) -> None:
        """Free what `unshard` has gathered."""
        driver = driver_of(self)
        driver.shards.read_whole(False)
        driver.engine.driver.reshard()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most max_norm; the norm before.

        As `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`. Communicates over dp.
        """
        return float(nn.utils.clip_grad_norm_(driver_of(self).shards.current(), max_norm))

    def full_state_dict(self) -> dict[str, Any]:
        """What the plain module's `state_dict()` would be, on every rank, on the host: whole weights under all of their
        names, this rank's buffers. Communicates over dp_gather, unit by unit."""
        driver, engine = driver_of(self), driver_of(self).engine
        driver.write_back()
        whole: dict[str, Tensor] = {}
        for unit in engine.units:
            with engine.gathered([unit.index]):
                whole |= {name: _copied(engine.buffer.weight(name)) for name in unit.names}
        first = _first_names(self)
        return {
            name: whole[first[name]] if name in first else _copied(value)
            for name, value in self.state_dict(keep_vars=True).items()
        }

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a plain module's `state_dict()`, the same on every rank; of a tied weight one name is enough. Raises
        ModelError where names or shapes differ, or where two names of one weight have different values."""
        driver = driver_of(self)
        _check_whole(self, driver.engine, state)
        first = _first_names(self)
        parts = {name: driver.shards.cut(first[name], state[name]) for name in first.keys() & state.keys()}
        self.load_state_dict({**state, **parts}, strict=False)
        driver.write_back()


# Fields that act only where gradients are sharded -> their value where nobody has set them.
OF_SHARDED_GRADIENTS: dict[str, object] = {
    "fsdp_reshard_policy": "memory",
    "suggested_communication_unit_size": None,
    "fsdp_debug": False,
    "megatron_fsdp_grad_comm_dtype": "auto",
}
SHARDED_GRADIENTS = tuple(filter(grads_are_sharded, STRATEGIES))


def resolve_standalone(
    config: DistributedDataParallelConfig | None, *, instances: int
) -> DistributedDataParallelConfig:
    """What a config means for these ranks: optim_grads_params where none is given. instances: of the ranks.

    Raises ModelError where a field is set that the strategy or the ranks leave without effect.
    """
    config = config or DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    refuse_plans(config)
    strategy, told = config.data_parallel_sharding_strategy, config.num_distributed_optimizer_instances
    idle = [field for field, unset in OF_SHARDED_GRADIENTS.items() if getattr(config, field) != unset]
    if idle and strategy not in SHARDED_GRADIENTS:
        raise ModelError(
            f"{', '.join(idle)}: no effect with data_parallel_sharding_strategy={strategy!r}, which cuts no gradients; "
            f"set the strategy to one of {list(SHARDED_GRADIENTS)}, or leave {'it' if len(idle) == 1 else 'them'} out"
        )
    if is_contradicted(config):
        raise ModelError(
            "use_distributed_optimizer: data_parallel_sharding_strategy='no_shard' (its default) does not shard the "
            "optimizer; set the strategy to 'optim', 'optim_grads' or 'optim_grads_params'"
        )
    if told not in (1, instances):
        raise ModelError(
            f"num_distributed_optimizer_instances={told}: the ranks given have {instances} "
            f"instance{'s' * (instances != 1)}; pass a mesh of shape ({told}, ranks of an instance), or leave it out"
        )
    outer = "optim" if config.enable_full_sharding_in_hsdp else config.outer_dp_sharding_strategy
    if not goes_with_outer(strategy, outer):
        raise ModelError(
            f"outer_dp_sharding_strategy={outer!r} with data_parallel_sharding_strategy={strategy!r}: the optimizer is "
            "cut over instances only with 'optim_grads_params'; set that, or leave the outer strategy out"
        )
    return dataclasses.replace(
        config, outer_dp_sharding_strategy=outer, num_distributed_optimizer_instances=instances
    )


@functools.cache
def _keep_out_of_graphs() -> None:
    """What autograd calls of ours inside a compiled step stays eager; of forwards hooks see to it."""
    from torch._dynamo import trace_rules  # takes a while, as with any of torch's optimizers

    for package in ("distributed", "transport", "memory_tracker"):
        trace_rules.add(f"megatron.core.{package}")


def _first_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> its first."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}


def _check_whole(module: nn.Module, engine: FullyShardedDataParallel, state: Mapping[str, Any]) -> None:
    """Raises ModelError where a state is none of the plain module."""
    first = _first_names(module)
    shapes = {name: _shape(value) for name, value in module.state_dict(keep_vars=True).items()}
    shapes |= {name: engine.buffer.param_meta[first[name]].local_shape for name in first}
    known = sorted(first.keys() & state.keys())
    given = {first[name]: name for name in reversed(known)}
    wrong = {name for name in shapes.keys() - state.keys() if first.get(name) not in given}
    wrong |= {name for name in state if name not in shapes or shapes[name] != _shape(state[name])}
    if wrong:
        raise ModelError(f"weights that are missing, unknown or of another shape: {sorted(wrong)}")
    for name in known:
        if (other := given[first[name]]) != name and not torch.equal(state[other].cpu(), state[name].cpu()):
            raise ModelError(
                f"{other!r} and {name!r} are one weight here, and have different values: give one of them"
            )


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


@functools.cache
def _class_of(cls: Any, taken: frozenset[str]) -> type[nn.Module]:
    """The class with ours behind it. taken: names of ours that the module has children, parameters or buffers of."""
    own = {
        name: property(lambda module, name=name: nn.Module.__getattr__(module, name))  # type: ignore[misc]
        for name in taken
    }
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, **own}
    return type(cls)(f"FullySharded{cls.__name__}", (cls, FullyShardedModule), names)


def sharded_grad_scaler(model: FullyShardedModule, **kwargs: Any) -> torch.amp.GradScaler:
    """`torch.amp.GradScaler` for the model's device: all ranks skip a step, and change the scale, where the gradients
    of one of them are not finite. kwargs: of GradScaler, `device` too.

    `unscale_` and `step` communicate over the ranks that share the gradients: one number.
    """
    device = driver_of(model).engine.ps.device.torch_device.type
    return torch.amp.GradScaler(**{"device": device, **kwargs})
