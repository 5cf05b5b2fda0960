"""Stages of megatron-core whose F, B and W sleep: what `bubble.py` measures, run on every rank."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import zbpp_light
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer import TransformerConfig

WIDTH = 8


class Work:
    """Sleeps, and when each began and ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: list[float] = []

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        time.sleep(self.seconds)
        self.times.append(time.monotonic())


class SlowInputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.work()
        return grad, None


class SlowWeightGradient:
    """In the place of apex's kernel of fused accumulation, which Megatron's linear layer calls."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wgrad_gemm_accum_fp32(self, x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        self._work()
        main_grad.add_(grad.t().matmul(x))


class Stage(torch.nn.Module):
    """One linear layer of Megatron's."""

    def __init__(self, config: TransformerConfig, work: Work) -> None:
        super().__init__()
        self.config, self._work, self._given = config, work, None
        self.model_type = ModelType.encoder_or_decoder  # which releases up to 0.16 ask for
        self.linear = ColumnParallelLinear(
            WIDTH, WIDTH, config=config, init_method=torch.nn.init.ones_, bias=False, gather_output=False
        )
        self.linear.weight.main_grad = torch.zeros(WIDTH, WIDTH)
        self.linear.weight.grad_added_to_main_grad = False

    def set_input_tensor(self, tensor: Any) -> None:
        self._given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> Tensor:
        x = self._given if self._given is not None else torch.ones(1, 1, WIDTH, requires_grad=True)
        self._work()
        output: Tensor = self.linear(SlowInputGradient.apply(x, self._work))[0]
        return output


def measure(
    ctx: Any, seconds: float, microbatches: int, contestants: list[dict[str, str] | None], steps: int
) -> list[dict[str, Any]]:
    """Of each contestant (arguments of `patch_megatron`, or None for Megatron's own): start and end of this rank's
    steps, and the sum of its weight's gradient."""
    work = Work(seconds)
    layers.fused_weight_gradient_mlp_cuda = sys.modules["fused_weight_gradient_mlp_cuda"] = (
        SlowWeightGradient(work)
    )
    layers._grad_accum_fusion_available = True
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ctx.world_size)
    config = TransformerConfig(
        num_layers=ctx.world_size,
        hidden_size=WIDTH,
        num_attention_heads=1,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=ctx.world_size,
        gradient_accumulation_fusion=True,
        deallocate_pipeline_outputs=True,
    )
    stage = Stage(config, work)
    results = []
    for words in contestants:
        if words is not None:
            zbpp_light.patch_megatron(**words)
        results.append({"steps": [_step(stage, work, microbatches) for _ in range(steps)]})
        results[-1]["gradient"] = float(stage.linear.weight.main_grad.sum())
        if words is not None:
            zbpp_light.unpatch_megatron()
    return results


def _step(stage: Stage, work: Work, microbatches: int) -> list[float]:
    """Start of its first operation, end of its last."""
    work.times.clear()
    stage.linear.weight.main_grad.zero_()
    torch.distributed.barrier()
    get_forward_backward_func()(
        forward_step_func=lambda data, model: (model(), lambda output: (output.sum(), {})),
        data_iterator=None,
        model=[stage],
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    assert len(work.times) == 6 * microbatches, (
        f"{len(work.times)} starts and ends of {microbatches} F, B and W"
    )
    return [work.times[0], work.times[-1]]
