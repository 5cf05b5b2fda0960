"""Megatron's `get_forward_backward_func`: a step's microbatches through this rank's chunks, by this framework's plans."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat import parallel_state
from megatron.compat.engine import DistributedDataParallel
from megatron.core.module import MegatronModule
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, Placement
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec, plan_for
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.training.run.step_batches import StepBatches

__all__ = ["get_forward_backward_func", "get_model_config", "unwrap_model"]

_CHANNELS: weakref.WeakKeyDictionary[nn.Module, P2P] = weakref.WeakKeyDictionary()  # of a model's first chunk
_STEPS: weakref.WeakKeyDictionary[nn.Module, int] = (
    weakref.WeakKeyDictionary()
)  # how many it has run: keys dropout


def unwrap_model(model: Any) -> Any:
    """The model inside its wrappers; of a list, each."""
    if isinstance(model, list):
        return [unwrap_model(one) for one in model]
    return unwrap_model(model.module) if hasattr(model, "module") else model


def get_model_config(model: nn.Module) -> Any:
    """The `TransformerConfig` that the model was made with."""
    return unwrap_model(model).config


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None
) -> Callable[..., list[Any]]:
    """What runs the microbatches of a step; of 1F1B with several stages, interleaved with several chunks a rank."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: Callable[[Iterator[Any], nn.Module], tuple[Tensor, Callable[..., Any]]],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    **others: Any,
) -> list[Any]:
    """What the loss function reports of each microbatch, on the ranks that compute the loss; elsewhere [].

    Gradients are of the mean over microbatches. Shapes need not be told: messages carry them. Communicates over the
    pipeline, and with whom `config.finalize_model_grads_func` does, which is called at the end.
    """
    chunks: list[nn.Module] = list(model) if isinstance(model, Sequence) else [model]
    iterators = list(data_iterator) if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
    ps, config = parallel_state.current(), get_model_config(chunks[0])
    placement = Placement(LINEAR if len(chunks) == 1 else LOOPED, ps.pp_size, len(chunks))
    group = ps.pp_size if len(chunks) > 1 else None
    name = "1f1b" if len(chunks) == 1 else "interleaved"
    spec = ScheduleSpec(name, placement, CostModel.of_ranks(placement), group_size=group)
    purpose = PlanPurpose.EVALUATE if forward_only else PlanPurpose.TRAIN
    step = _STEPS[chunks[0]] = _STEPS.get(chunks[0], -1) + 1
    reports: list[Any] = []
    tokens: list[Tensor] = []

    def run(chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        wrapped, inner = chunks[chunk], unwrap_model(chunks[chunk])
        if isinstance(inner, MegatronModule):
            inner.context.begin_microbatch(step, microbatch, microbatch * ps.dp_size + ps.dp_rank)
        if hidden is not None:
            inner.set_input_tensor(hidden)
        batches = _one(batches_of[chunk], microbatch)
        output, loss_func = forward_step_func(batches, wrapped)
        if placement.stages_of(ps.pp_rank)[chunk] < placement.num_stages - 1:
            return output
        if collect_non_loss_data:
            reports.append(loss_func(output, non_loss_data=True))
            return output
        loss, *counted, report = loss_func(output)
        reports.append(report)
        if counted:
            tokens.append(counted[0])
            per_token = getattr(config, "calculate_per_token_loss", False)
            loss = loss if per_token else loss / torch.clamp(counted[0], min=1)
        if not (counted and getattr(config, "calculate_per_token_loss", False)):
            loss = loss / num_microbatches
        scale = getattr(config, "grad_scale_func", None)
        return loss if scale is None or forward_only else scale(loss)

    batches_of = [None if one is None else StepBatches(one) for one in iterators]
    for one in batches_of:
        if one is not None:
            one.begin_step()
    stages = {
        stage: ModelStage(
            lambda microbatch, hidden, chunk=chunk: run(chunk, microbatch, hidden),
            inner.context.grads if isinstance(inner := unwrap_model(module), MegatronModule) else None,
            begins=stage == 0,
            ends=stage == placement.num_stages - 1,
        )
        for chunk, (stage, module) in enumerate(zip(placement.stages_of(ps.pp_rank), chunks, strict=True))
    }
    if not forward_only:
        for chunk in chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.begin(num_microbatches)
    channel = _CHANNELS.setdefault(chunks[0], P2P(ps))
    with torch.no_grad() if forward_only else contextlib.nullcontext():
        Executor(plan_for(spec, num_microbatches, purpose), ps.pp_rank, stages, channel).run(step)
    finalize = getattr(config, "finalize_model_grads_func", None)
    if not forward_only and finalize is not None:
        finalize(chunks, torch.stack(tokens).sum() if tokens else None)
    return reports


def _one(batches: StepBatches | None, microbatch: int) -> Iterator[Any]:
    """The microbatch, drawn when it is asked for: a stage between the ends need not have data."""

    def draw() -> Iterator[Any]:
        assert batches is not None, "the forward step of this stage reads data, and its data_iterator is None"
        yield batches.microbatch(microbatch)

    return draw()
