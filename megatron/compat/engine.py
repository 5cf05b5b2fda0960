"""Megatron's data parallel wrapper and optimizer over this framework's engine: `DistributedDataParallel(Config)`,
`get_megatron_optimizer`, `finalize_model_grads`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat import parallel_state
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel as Engine
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as EngineConfig,
)
from megatron.core.module import MegatronModule
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as OurOptimizerConfig
from megatron.core.transport import collectives

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "MegatronOptimizer",
    "OptimizerConfig",
    "finalize_model_grads",
    "get_megatron_optimizer",
]


@dataclasses.dataclass
class DistributedDataParallelConfig:
    """Megatron's fields; what is not said of a field has no effect here.

    grad_reduce_in_fp32: gradients are summed in fp32. use_distributed_optimizer: ZeRO-1. bucket_size: parameters a
    bucket. average_in_collective: taken, means are formed as gradients are added either way.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    average_in_collective: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"

    def engine_config(self) -> EngineConfig:
        """Ours. Raises ValueError where weights are to be sharded, which a loop of one's own does by `fully_shard`."""
        strategy = self.data_parallel_sharding_strategy
        strategy = "optim" if strategy == "no_shard" and self.use_distributed_optimizer else strategy
        if strategy not in ("no_shard", "optim"):
            raise ValueError(
                f"DistributedDataParallelConfig(data_parallel_sharding_strategy={strategy!r}): gathers of sharded"
                " gradients and weights are planned by pretrain(); in a loop of your own use"
                " megatron.core.distributed.custom_fsdp.fully_shard, or optim"
            )
        return EngineConfig(
            data_parallel_sharding_strategy=strategy,
            accumulate_allreduce_grads_in_fp32=self.grad_reduce_in_fp32,
            ddp_average_in_collective=True,
            ddp_bucket_size=self.bucket_size,
        )


class DistributedDataParallel(nn.Module):
    """One chunk whose gradients are averaged over data parallel ranks, in `parameter.main_grad`.

        ddp.zero_grad_buffer(); forwards and backwards; ddp.finish_grad_sync(); optimizer.step()

    Communicates over dp where it is built and in `finish_grad_sync`.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        ps = parallel_state.current()
        engine = Engine([module], ps, ddp_config.engine_config(), stages=[ps.pp_rank])
        object.__setattr__(self, "engine", engine)  # no submodule: its chunk is this one
        if not isinstance(module, MegatronModule):
            collectives.broadcast_weights([module], ps)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.main_grad = engine.buffer.main_grad(engine.buffer.param_meta[name].grad_keys[0])
        self._begun = False

    engine: Engine

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.engine(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """A step begins: what gradients there are is overwritten."""
        self.engine.begin_step(1)
        self._begun = True

    def begin(self, num_microbatches: int) -> None:
        """A step begins, unless `zero_grad_buffer` has said so."""
        if not self._begun:
            self.engine.begin_step(num_microbatches)
            self._begun = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Sums are formed in `finish_grad_sync`."""

    def finish_grad_sync(self, *unused: Any, **also: Any) -> None:
        """Gradients are the mean over data parallel ranks; where the optimizer is sharded, this rank's part of it."""
        self.engine.finish()
        self._begun = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is summed before `finish_grad_sync`."""
        return contextlib.nullcontext()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Of all main gradients."""
        for bucket in self.engine.buffer.buckets:
            if bucket.optimizer_grads is not None:
                bucket.optimizer_grads.mul_(scaling_factor)

    def broadcast_params(self) -> None:
        """All data parallel ranks get the weights of the first."""
        collectives.broadcast_weights([self.module], parallel_state.current())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's; main weights follow."""
        found = self.module.load_state_dict(*args, **kwargs)
        self.engine.buffer.copy_weights_to_main()
        return found

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module.sharded_state_dict(*args, **kwargs)


def finalize_model_grads(model: Sequence[nn.Module], num_tokens: Tensor | None = None, **others: Any) -> None:
    """End of a step's backwards: gradients are complete on every rank. num_tokens: of this rank, where losses are sums
    over tokens; gradients are divided by those of all ranks. Communicates over dp, tp and embedding."""
    wrapped = [one for one in model if isinstance(one, DistributedDataParallel)]
    if len(wrapped) != len(model):
        raise ValueError(
            "finalize_model_grads: wrap the model in DistributedDataParallel, whose gradients these are"
        )
    for one in wrapped:
        one.finish_grad_sync()
    per_token = getattr(wrapped[0].config, "calculate_per_token_loss", False)
    if per_token and num_tokens is not None:
        ps = parallel_state.current()
        total = num_tokens.to(torch.float64).clone()
        collectives.all_reduce(total, ps.dp_group)
        for one in wrapped:
            one.scale_gradients(ps.dp_size / max(float(total), 1.0))


_OPTIMIZER_FIELDS = {one.name for one in dataclasses.fields(OurOptimizerConfig)}
_NO_EFFECT = {
    "params_dtype",
    "use_distributed_optimizer",
    "overlap_param_gather",
    "timers",
    "barrier_with_L1_time",
}


class OptimizerConfig:
    """Megatron's fields. Raises ValueError for what is not here."""

    def __init__(self, **values: Any) -> None:
        unknown = sorted(values.keys() - _OPTIMIZER_FIELDS - _NO_EFFECT)
        if asked := [name for name in unknown if values[name] not in (None, False)]:
            raise ValueError(
                f"OptimizerConfig({', '.join(asked)}): not here; leave it out, docs/flags.md says why"
            )
        vars(self).update({one.name: one.default for one in dataclasses.fields(OurOptimizerConfig)})
        vars(self).update(values)

    def ours(self) -> OurOptimizerConfig:
        """The engine's."""
        return OurOptimizerConfig(**{name: vars(self)[name] for name in _OPTIMIZER_FIELDS})


class MegatronOptimizer:
    """Over one wrapped chunk: `step` clips, updates, and gives (success, gradient norm, zeros or None)."""

    def __init__(self, config: OptimizerConfig, model: DistributedDataParallel) -> None:
        self.config, self._model = config, model
        ours = config.ours()
        self.inner = build_optimizer(ours, model.engine.buffer, parallel_state.current())
        self.scaler = build_grad_scaler(ours)
        self._clip = ours.clip_grad

    @property
    def param_groups(self) -> list[Any]:
        """torch's; schedulers write `lr` and `weight_decay`."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the gradients are the wrapper's, see `zero_grad_buffer`."""

    def get_loss_scale(self) -> Tensor:
        """[1]; 1 without fp16."""
        return torch.tensor([self.scaler.scale], device=parallel_state.current().device.torch_device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """loss * scale: `config.grad_scale_func`."""
        return loss * self.scaler.scale

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update with the averaged gradients; (False, None, None) where they are not finite. Communicates over the
        world."""
        divisor = self.scaler.scale * self._model.engine.buffer.grads_divided_by
        stats = self.inner.prepare(divisor)
        self.scaler.update(stats.nonfinite)
        if stats.nonfinite:
            return False, None, None
        self.inner.step(divisor, clip_coefficient(stats.norm, self._clip))
        self._model.engine.weights_changed()
        return True, stats.norm, stats.num_zeros

    def reload_model_params(self) -> None:
        """The model's weights were written: main weights follow."""
        self._model.engine.buffer.copy_weights_to_main()

    def state_dict(self) -> dict[str, Any]:
        """What is not tensors; these are in `pieces`."""
        return {"optimizer": self.inner.state(), "scaler": self.scaler.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `state_dict` has it. Raises OptimizerStateError."""
        self.inner.load_state(state["optimizer"])
        self.scaler.load_state(state["scaler"])


def get_megatron_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module], *args: Any, **kwargs: Any
) -> MegatronOptimizer:
    """The optimizer of a wrapped model. Raises ValueError for more chunks than one, and for conditions by parameter."""
    if any(one is not None for one in args) or any(value not in (None, 1.0) for value in kwargs.values()):
        raise ValueError(
            f"get_megatron_optimizer: {sorted(kwargs) or 'conditions'}: not here; decoupled_lr is"
        )
    first, *more = model_chunks
    if more or not isinstance(first, DistributedDataParallel):
        raise ValueError(
            "get_megatron_optimizer takes one chunk wrapped in DistributedDataParallel; pretrain() has more"
        )
    return MegatronOptimizer(config, first)
