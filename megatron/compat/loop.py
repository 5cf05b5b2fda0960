"""What a loop of one's own calls in a step: forward and backward of its microbatches, data parallel wrapper, optimizer;
over our plans, engine and optimizer."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat.parallel_state import current
from megatron.core.distributed import data_parallel_config
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import MegatronModule
from megatron.core.optimizer import optimization_config
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec, plan_for
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.transport import collectives
from megatron.training.report.step_metrics import ForwardStep, evaluate_loss, loss_to_differentiate
from megatron.training.run.data import StepBatches

# Of each model: what moves its hidden states, and how many steps it has run, which key dropout.
_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, tuple[P2P, Iterator[int]]] = weakref.WeakKeyDictionary()


def unwrap_model(model: Any) -> Any:
    """The model inside its wrappers; of a list, each."""
    if isinstance(model, list):
        return [unwrap_model(one) for one in model]
    return unwrap_model(model.module) if hasattr(model, "module") else model


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

    By 1F1B. Gradients are of the mean over microbatches. Shapes need not be told: messages carry them. Communicates
    over the pipeline, and with whom `config.finalize_model_grads_func` does. Raises ValueError for several chunks.
    """
    (wrapped, *more), batches = model if isinstance(model, list) else [model], data_iterator
    if more or collect_non_loss_data:
        raise ValueError(
            "get_forward_backward_func: one chunk a rank, and losses only; pretrain() interleaves"
        )
    ps, inner, config = current(), unwrap_model(wrapped), get_model_config(wrapped)
    channel, steps = _OF_MODEL.setdefault(wrapped, (P2P(ps), itertools.count()))
    source = StepBatches(batches[0] if isinstance(batches, list) else batches, reads=batches is not None)
    step, begins, ends = next(steps), ps.pp_rank == 0, ps.pp_rank == ps.pp_size - 1
    reports: list[Any] = []
    tokens: list[Tensor] = []

    def run(microbatch: int, hidden: Tensor | None) -> Tensor:
        if isinstance(inner, MegatronModule):
            inner.context.begin_microbatch(step, microbatch, microbatch * ps.dp_size + ps.dp_rank)
        if hidden is not None:
            inner.set_input_tensor(hidden)
        output, loss_func = forward_step_func((source.microbatch(microbatch) for _ in range(1)), wrapped)
        if not ends:
            return output
        result, per_token = evaluate_loss(output, loss_func), config.calculate_per_token_loss
        reports.append(result.report)
        tokens.extend([] if result.num_tokens is None else [result.num_tokens])
        loss = loss_to_differentiate(result, per_token) / (1 if per_token else num_microbatches)
        return loss if config.grad_scale_func is None or forward_only else config.grad_scale_func(loss)

    sink = inner.context.grads if isinstance(inner, MegatronModule) else None
    placement, purpose = (
        Placement(LINEAR, ps.pp_size, 1),
        PlanPurpose.EVALUATE if forward_only else PlanPurpose.TRAIN,
    )
    plan = plan_for(ScheduleSpec("1f1b", placement, CostModel.of_ranks(placement)), num_microbatches, purpose)
    with torch.set_grad_enabled(not forward_only):
        stages = {ps.pp_rank: ModelStage(run, sink, begins=begins, ends=ends)}
        Executor(plan, ps.pp_rank, stages, channel).run(step)
    if not forward_only and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func([wrapped], torch.stack(tokens).sum() if tokens else None)
    return reports


class DataParallelModel(nn.Module):
    """Megatron's `DistributedDataParallel`: a module whose gradients are averaged over data parallel ranks.

        ddp.zero_grad_buffer(); forwards and backwards; ddp.finish_grad_sync(); optimizer.step()

    They are in `parameter.main_grad`, and where its dtype is the weight's in `parameter.grad`, for torch's optimizers.
    Communicates over dp where it is built and in `finish_grad_sync`. Raises ValueError where more than the optimizer is
    to be sharded.
    """

    def __init__(self, config: Any, ddp_config: Any, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__()
        strategy = ddp_config.data_parallel_sharding_strategy
        strategy = "optim" if ddp_config.use_distributed_optimizer and strategy == "no_shard" else strategy
        if strategy not in ("no_shard", "optim"):
            raise ValueError(
                f"data_parallel_sharding_strategy={strategy!r}: use optim, fully_shard or pretrain()"
            )
        off = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "use_custom_fsdp"), False)
        flags = {**off, "data_parallel_sharding_strategy": strategy, "ddp_average_in_collective": True}
        ours, ps = ddp_config.group(data_parallel_config.DistributedDataParallelConfig, **flags), current()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self.engine = DistributedDataParallel([module], ps, ours, stages=[ps.pp_rank])
        if not isinstance(module, MegatronModule):
            collectives.broadcast_weights([module], ps)
        self._grads = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                buffer = self.engine.buffer
                self._grads[parameter] = buffer.main_grad(buffer.param_meta[name].grad_keys[0])
                parameter.main_grad = self._grads[parameter]  # type: ignore[attr-defined]
        self.state_dict = module.state_dict  # type: ignore[method-assign]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        if torch.is_grad_enabled() and not self.engine.is_stepping:
            self.zero_grad_buffer()
        return self.engine(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """A step begins: what gradients there are is overwritten."""
        self.engine.begin_step(1)

    def finish_grad_sync(self, *_: Any, **__: Any) -> None:
        """Gradients are the mean over data parallel ranks; where the optimizer is sharded, this rank's part of it."""
        self.engine.finish()
        for parameter, grad in self._grads.items():
            parameter.grad = grad if grad.dtype == parameter.dtype else None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is summed before `finish_grad_sync` anyhow."""
        return contextlib.nullcontext()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, without a prefix as `state_dict`'s; main weights follow."""
        found = self.module.load_state_dict(*args, **kwargs)
        self.engine.buffer.copy_weights_to_main()
        return found


def finalize_model_grads(
    model: Sequence[nn.Module], num_tokens: Tensor | None = None, *_: Any, **__: Any
) -> None:
    """A step's backwards are done: gradients are complete on every rank. num_tokens: of this rank, where losses are
    sums over tokens; gradients are divided by those of all ranks. Communicates over dp, tp and embedding."""
    for one in model:
        assert isinstance(one, DataParallelModel), (
            "finalize_model_grads: wrap the model in DistributedDataParallel"
        )
        one.finish_grad_sync()
        if num_tokens is not None and one.config.calculate_per_token_loss:
            ps, total = current(), num_tokens.double().clone()
            collectives.all_reduce(total, ps.dp_group)
            for bucket in one.engine.buffer.buckets:
                if bucket.optimizer_grads is not None:
                    bucket.optimizer_grads.mul_(ps.dp_size / max(float(total), 1.0))


class ModelOptimizer:
    """Megatron's optimizer of one wrapped model. Its gradients are the wrapper's: `zero_grad_buffer` begins a step."""

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

    def step(self) -> tuple[bool, float | None, None]:
        """(True, the gradient's norm before clipping, None), or where it is not finite (False, None, None) without an
        update. Communicates over the world."""
        divisor = self.scaler.scale * self._engine.buffer.grads_divided_by
        stats = self.inner.prepare(divisor)
        self.scaler.update(stats.nonfinite)
        if stats.nonfinite:
            return False, None, None
        self.inner.step(divisor, clip_coefficient(stats.norm, self.config.clip_grad))
        self._engine.weights_changed()
        return True, stats.norm, None

    def state_dict(self) -> dict[str, Any]:
        """What is not tensors; these are in `inner.pieces()`."""
        return {"optimizer": self.inner.state(), "scaler": self.scaler.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `state_dict` has it. Raises OptimizerStateError."""
        self.inner.load_state(state["optimizer"])
        self.scaler.load_state(state["scaler"])


def get_megatron_optimizer(
    config: Any, model_chunks: Sequence[nn.Module], *conditions: Any, **named: Any
) -> Any:
    """Of one wrapped model. Raises ValueError for more, and for conditions by parameter."""
    first, *more = model_chunks
    if more or any(one not in (None, 1.0) for one in [*conditions, *named.values()]):
        raise ValueError(
            "get_megatron_optimizer: one model, without conditions by parameter; decoupled_lr is here"
        )
    assert isinstance(first, DataParallelModel), (
        "get_megatron_optimizer: wrap the model in DistributedDataParallel"
    )
    return ModelOptimizer(config, first)
