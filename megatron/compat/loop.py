"""What a loop of one's own calls in a step: forward and backward of its microbatches, data parallel wrapper, optimizer;
over our plans, engine and optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat.fields import expect, in_fields, settings_of_pretrain
from megatron.compat.layers import ShardedStateDict, param_meta_of
from megatron.compat.model import DistributedDataParallelConfig, OptimizerConfig
from megatron.compat.parallel_state import current
from megatron.core.distributed import data_parallel
from megatron.core.distributed.custom_fsdp import data_parallel_config
from megatron.core.module import MegatronModule, ModelContext
from megatron.core.optimizer import optimization_config
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.mixed_precision import OptimizerStateError, build_optimizer
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.schedules import MOST_FORWARDS
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.transport import collectives
from megatron.training.config.values import shown
from megatron.training.engine import weight_pieces
from megatron.training.guard.weight_check import WeightCheck
from megatron.training.report.step_metrics import ForwardStep, evaluate_loss, loss_to_differentiate
from megatron.training.run.data import StepBatches

_ADVICE = (
    "so the run ends here. Lower lr in OptimizerConfig, give it adam_eps above 0 (or bf16 for fp16, whose range is "
    "larger)"
)
# By model: what moves its hidden states.
_CHANNELS: weakref.WeakKeyDictionary[nn.Module, P2P] = weakref.WeakKeyDictionary()


def unwrap_model(model: Any) -> Any:
    """The model inside its wrappers, ours or torch's; of a list, each."""
    if isinstance(model, list):
        return [unwrap_model(one) for one in model]
    wrappers = (DataParallelModel, nn.parallel.DistributedDataParallel)
    return unwrap_model(model.module) if isinstance(model, wrappers) else model


def context_of(model: nn.Module) -> ModelContext:
    """The model's own; of one that is not ours a new one. Its iteration: the steps that the model was trained."""
    inner = unwrap_model(model)
    return inner.context if isinstance(inner, MegatronModule) else ModelContext(0)


def get_model_config(model: nn.Module) -> Any:
    """The `TransformerConfig` that the model was made with."""
    return unwrap_model(model).config


def get_forward_backward_func(*_: Any, **__: Any) -> Callable[..., list[Any]]:
    """What runs the microbatches of a step."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    **_: Any,
) -> list[Any]:
    """What the loss function reports of each microbatch, on the ranks that compute the loss; elsewhere [].

    By 1F1B; forward_only: without backwards. Gradients are of the mean over microbatches; messages carry shapes.
    Communicates over the pipeline, and as `config.finalize_model_grads_func`. Raises ValueError for several chunks a
    rank, for losses by token, and for anything but losses.
    """
    (wrapped, *more), (batches, *_rest) = _listed(model), _listed(data_iterator)
    ps, inner, config = current(), unwrap_model(wrapped), get_model_config(wrapped)
    most = MOST_FORWARDS // ps.pp_size
    if not isinstance(num_microbatches, int) or not 1 <= num_microbatches <= most:
        told = f"get_forward_backward_func()(num_microbatches={shown(num_microbatches)})"
        raise ValueError(f"{told}: expects a whole number from 1 to {most}, which a step's plan holds")
    if more or config.calculate_per_token_loss or collect_non_loss_data:
        told = "one model a rank, TransformerConfig(calculate_per_token_loss=False), no collect_non_loss_data"
        raise ValueError(f"get_forward_backward_func()(model, ...): {told}")
    ends, reports = ps.pp_rank == ps.pp_size - 1, list[Any]()
    context = context_of(inner)
    step = context.iteration + (not forward_only)  # with the microbatch the key of dropout masks
    source = StepBatches(batches, reads=batches is not None)

    def run(microbatch: int, hidden: Tensor | None) -> Tensor:
        context.begin_microbatch(step, microbatch, microbatch * ps.dp_size + ps.dp_rank)
        if hidden is not None:
            inner.set_input_tensor(hidden)
        output, loss_func = forward_step_func((source.microbatch(microbatch) for _ in range(1)), wrapped)
        if not ends:
            return output
        result = evaluate_loss(output, loss_func)
        reports.append(result.report)
        loss = loss_to_differentiate(result, per_token_loss=False) / num_microbatches
        return loss if config.grad_scale_func is None or forward_only else config.grad_scale_func(loss)

    sink = context.grads if isinstance(inner, MegatronModule) else None
    stages = {ps.pp_rank: ModelStage(run, sink, begins=ps.pp_rank == 0, ends=ends)}
    placement = Placement(LINEAR, ps.pp_size, 1)
    purpose = PlanPurpose.EVALUATE if forward_only else PlanPurpose.TRAIN
    plan = plan_for(ScheduleSpec("1f1b", placement, CostModel.of_ranks(placement)), num_microbatches, purpose)
    with torch.set_grad_enabled(not forward_only):
        Executor(plan, ps.pp_rank, stages, _CHANNELS.setdefault(wrapped, P2P(ps))).run(step)
    if config.finalize_model_grads_func is not None and not forward_only:
        config.finalize_model_grads_func([wrapped], None)
    return reports


def _listed(one: Any) -> list[Any]:
    return one if isinstance(one, list) else [one]


class DataParallelModel(nn.Module):
    """A module whose gradients are averaged over data parallel ranks.

        ddp.zero_grad_buffer(); forwards and backwards; ddp.finish_grad_sync(); optimizer.step()

    They are in `parameter.main_grad`, and where its dtype is the weight's in `parameter.grad`, for torch's optimizers.
    Communicates over dp where it is built and in `finish_grad_sync`. Raises ValueError for fields that only pretrain()
    has a use for, and warns of overlaps.
    """

    def __init__(self, config: Any, ddp_config: Any, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__()
        ours = _engine_config(ddp_config, (ps := current()).dp_outer_group.size)
        self.config, self.ddp_config, self.module = config, ddp_config, module
        own = isinstance(module, MegatronModule)
        meta = None if own else param_meta_of(module)
        self.engine = data_parallel.DistributedDataParallel([module], ps, ours, meta, stages=[ps.pp_rank])
        if not own:
            collectives.broadcast_weights([module], ps)
        buffer = self.engine.buffer
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.main_grad = buffer.main_grad(buffer.param_meta[name].grad_keys[0])  # type: ignore[attr-defined]
        # The module's own, without a prefix; main weights follow a load.
        module.register_load_state_dict_post_hook(lambda *_: buffer.copy_weights_to_main())
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict  # type: ignore[method-assign]
        self.no_sync = contextlib.nullcontext  # nothing is summed before `finish_grad_sync` anyhow

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        if torch.is_grad_enabled() and not self.engine.is_stepping:
            self.zero_grad_buffer()
        return self.engine(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """A step begins, whose gradients overwrite those of the last one."""
        self.engine.begin_step(1)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Gradients are reduced in `finish_grad_sync`, weights gathered in the optimizer's step."""

    start_grad_sync = start_param_sync = enable_forward_pre_hook = disable_forward_pre_hook = _nothing

    def broadcast_params(self) -> None:
        """Ranks take the weights of data parallel rank 0. Communicates over dp."""
        collectives.broadcast_weights([self.module], current())
        self.engine.buffer.copy_weights_to_main()

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> ShardedStateDict:
        """For `dist_checkpointing.save` and `load`. Communicates over dp, where the optimizer is sharded."""
        self.engine.settle_weights()
        pieces = weight_pieces(self.engine.buffer)
        return ShardedStateDict(self.state_dict(prefix=prefix), pieces, self.weights_loaded)

    def weights_loaded(self, *, with_main_weights: bool = False) -> None:
        """The module's weights have been filled: what is made of them follows. Communicates over dp where the
        optimizer is sharded."""
        if not with_main_weights:
            self.engine.buffer.copy_weights_to_main()
        self.engine.weights_changed()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Times this factor, before or after `finish_grad_sync`."""
        for grads in self.engine.buffer.grads_at_rest():
            grads.mul_(scaling_factor)

    def finish_grad_sync(self, *_: Any, **__: Any) -> None:
        """Gradients are the mean over data parallel ranks; where the optimizer is sharded, this rank's part of it."""
        self.engine.finish()
        for parameter in self.module.parameters():
            if (grad := getattr(parameter, "main_grad", None)) is not None and grad.dtype == parameter.dtype:
                parameter.grad = grad


DistributedDataParallel = DataParallelModel  # Megatron's name


def _engine_config(given: Any, instances: int) -> data_parallel_config.DistributedDataParallelConfig:
    expect(given, DistributedDataParallelConfig, "DistributedDataParallel")
    ours = given.group(data_parallel_config.DistributedDataParallelConfig)
    for one in settings_of_pretrain(vars(ours)):
        told = f"DistributedDataParallelConfig: {one.message}; use custom_fsdp.fully_shard"
        raise ValueError(in_fields(told, given.called))
    if (asked := ours.num_distributed_optimizer_instances) not in (1, instances):
        raise ValueError(
            f"num_distributed_optimizer_instances={asked}: {instances} in initialize_model_parallel"
        )
    off: dict[str, Any] = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), False)
    if late := [name for name in off if getattr(ours, name)]:
        warnings.warn(f"{', '.join(late)}: without effect in a loop of one's own", stacklevel=4)
    if ours.use_distributed_optimizer:
        off["data_parallel_sharding_strategy"] = "optim"
    return dataclasses.replace(ours, ddp_average_in_collective=True, **off)


def wrapped_model(model: Any) -> DataParallelModel:
    """The same. Raises ValueError where it is not wrapped."""
    if isinstance(model, DataParallelModel):
        return model
    raise ValueError(f"{type(model).__name__}: wrap the model in DistributedDataParallel of megatron.core")


def finalize_model_grads(model: Sequence[nn.Module], *_: Any, **__: Any) -> None:
    """A step's backwards are done: gradients are complete on every rank. Communicates over dp, tp and embedding."""
    for one in model:
        wrapped_model(one).finish_grad_sync()


class MegatronOptimizer:
    """The optimizer of one wrapped model. Its gradients are the wrapper's: `zero_grad_buffer` begins a step."""

    def __init__(self, config: Any, model: DataParallelModel) -> None:
        ours, self._engine = config.group(optimization_config.OptimizerConfig), model.engine
        self.inner, self.config = build_optimizer(ours, self._engine.buffer, current()), config
        self.scaler = build_grad_scaler(ours)
        self.param_groups = self.inner.param_groups  # schedulers write lr and weight_decay

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: see the class."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """loss * scale: for `config.grad_scale_func`."""
        return loss * self.scaler.scale

    def step(self) -> tuple[bool, float | None, int | None]:
        """(True, the gradient's norm before clipping, how many of its elements are zero with `log_num_zeros_in_grad`,
        else None), or where it is not finite (False, None, None) without an
        update. Communicates over the world. Raises NonFiniteWeightsError, as `pretrain`, where the update has made
        weights that are not finite."""
        divisor = self.scaler.scale * self._engine.buffer.grads_divided_by
        stats = self.inner.prepare(divisor, count_zero_grads=bool(self.config.log_num_zeros_in_grad))
        self.scaler.update(stats.nonfinite)
        if stats.nonfinite:
            return False, None, None
        self.inner.step(divisor, clip_coefficient(stats.norm, self.config.clip_grad))
        check = WeightCheck(self.inner)
        self._engine.weights_changed()
        check.passed(f"optimizer.step() number {self.inner.num_steps}", _ADVICE)
        return True, stats.norm, stats.num_zeros

    def values(self) -> dict[str, Any]:
        """What is not tensors."""
        return {"optimizer": self.inner.state(), "scaler": self.scaler.state()}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Raises OptimizerStateError."""
        self.inner.load_state(values["optimizer"])
        self.scaler.load_state(values["scaler"])

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: values, and its parts of moments and main weights by name and place, not copied. Any layout can
        load what `save_checkpoint` writes; this is for the same one."""
        return {**self.values(), "tensors": self._tensors()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `state_dict` has it. Raises OptimizerStateError."""
        mine, given = self._tensors(), state_dict.get("tensors", {})
        here, there = ({name: [*one.shape] for name, one in held.items()} for held in (mine, given))
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                told = f"another layout's or model's, or none: {name} is {there.get(name)}, here {here.get(name)}"
                raise OptimizerStateError(f"load_state_dict: tensors of {told}")
        self.load_values(state_dict)
        for name, tensor in mine.items():
            tensor.copy_(given[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{piece.name}{list(piece.offset)}": piece.tensor for piece in self.inner.pieces()}


def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *conditions: Any, **named: Any) -> Any:
    """Of one wrapped model; use_gloo_process_groups is without effect. Raises ValueError for more, and for conditions
    by parameter."""
    expect(config, OptimizerConfig, "get_megatron_optimizer")
    first, *more = model_chunks
    asked = [*conditions, *(one for name, one in named.items() if name != "use_gloo_process_groups")]
    if more or any(one not in (None, False, 1.0) for one in asked):
        raise ValueError("get_megatron_optimizer: of one model, without conditions; decoupled_lr is here")
    return MegatronOptimizer(config, wrapped_model(first))
