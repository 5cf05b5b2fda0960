"""The functions of megatron-core that zbpp_light depends on, with their parameters and as little behind them as does.

Real releases are the proof's (extras/proof): this is for what they cannot show on CPU, and for refusals.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SCHEDULES, LAYERS = "megatron.core.pipeline_parallel.schedules", "megatron.core.tensor_parallel.layers"
WIDTH = 4


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer,
        wgrad_deferral_limit, tp_group,
    ):  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.use_bias, ctx.gradient_accumulation_fusion = bias is not None, gradient_accumulation_fusion
        ctx.grad_output_buffer, ctx.wgrad_deferral_limit = grad_output_buffer, wgrad_deferral_limit
        output = input.matmul(weight.t())
        return output + bias if bias is not None else output

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        computes = ctx.grad_output_buffer is None
        if not computes:
            ctx.grad_output_buffer.append(grad_output)
        else:
            rows = grad_output.reshape(-1, grad_output.shape[-1])
            input = input.reshape(-1, input.shape[-1])
        grad_weight = None if ctx.gradient_accumulation_fusion else rows.t().matmul(input)
        grad_bias = rows.sum(dim=0) if ctx.use_bias else None
        return grad_output.matmul(weight), grad_weight, grad_bias, None, None, None, None, None, None


class ColumnParallelLinear(nn.Module):
    """fusion: as gradient_accumulation_fusion."""

    def __init__(self, fusion: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.fusion = fusion

    def forward(self, x: Tensor) -> Tensor:
        function = LinearWithGradAccumulationAndAsyncCommunication
        return function.apply(x, self.weight, self.bias, self.fusion, False, False, None, 0, None)


class RowParallelLinear(ColumnParallelLinear):
    """The same."""


class VocabParallelEmbedding(nn.Embedding):
    """Torch's."""


class Config(types.SimpleNamespace):
    def __init__(self, **words: Any) -> None:
        names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "timers", "grad_scale_func")
        super().__init__(**dict.fromkeys(names))
        self.num_microbatches_with_partial_activation_checkpoints = None
        self.calculate_per_token_loss = self.deallocate_pipeline_outputs = False
        self.pipeline_dtype = torch.float32
        self.__dict__.update(words)


def forward_step(
    forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, cp_group_size,
    collect_non_loss_data=False, checkpoint_activations_microbatch=None, is_first_microbatch=False,
    current_microbatch=None, vp_stage=None, is_last_stage=True,
):  # fmt: skip
    output = forward_step_func(data_iterator, model, input_tensor)
    if is_last_stage:
        output = output.square().mean() / num_microbatches
        forward_data_store.append(output.detach())
    return output, torch.tensor(3, dtype=torch.int)


def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
    torch.autograd.backward(output_tensor, output_tensor_grad)
    return None if input_tensor is None else input_tensor.grad


def get_tensor_shapes(
    *, seq_length, micro_batch_size, decoder_seq_length, config, tp_group=None, cp_group=None
):
    return [(seq_length, micro_batch_size, WIDTH)]


def deallocate_output_tensor(out, deallocate_pipeline_outputs=False): ...


def forward_backward_pipelining_without_interleaving(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size,
    decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None,
    adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False,
):  # fmt: skip
    """Megatron's own: here, evaluations say that they were its."""
    return "Megatron's own"


def forward_backward_pipelining_with_interleaving(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size,
    decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None,
    adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False,
):  # fmt: skip
    return "Megatron's own, interleaved"


def modules() -> dict[str, Any]:
    """Both modules by their names, for `sys.modules`."""
    schedules, layers = types.ModuleType(SCHEDULES), types.ModuleType(LAYERS)
    functions = (
        forward_step, backward_step, get_tensor_shapes, deallocate_output_tensor,
        forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving,
    )  # fmt: skip
    schedules.__dict__.update({function.__name__: function for function in functions})
    schedules.get_model_config = lambda model: model.config
    schedules.parallel_state = types.SimpleNamespace(
        get_pipeline_model_parallel_group=lambda: dist.group.WORLD,
        get_tensor_model_parallel_group=lambda: None,
        get_context_parallel_group=lambda: types.SimpleNamespace(size=lambda: 1),
    )
    classes = (
        LinearWithGradAccumulationAndAsyncCommunication, ColumnParallelLinear, RowParallelLinear,
        VocabParallelEmbedding,
    )  # fmt: skip
    layers.__dict__.update({cls.__name__: cls for cls in classes})
    return {SCHEDULES: schedules, LAYERS: layers}


class Model(nn.Module):
    """Linear layers, one of them used twice."""

    def __init__(self, config: Config, *layers: nn.Module) -> None:
        super().__init__()
        self.config, self.layers = config, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = x + torch.tanh(layer(x))
        return x


def step(schedules: Any, model: nn.Module, microbatches: int = 4, **words: Any) -> Any:
    """A training step by what Megatron's `get_forward_backward_func` would return now."""

    def forward(data, model, received):
        x = next(data)
        return model(x if received is None else received)

    source = torch.Generator().manual_seed(5)
    data = (torch.randn(3, 2, WIDTH, generator=source, requires_grad=True) for _ in range(microbatches))
    given = {
        "forward_step_func": forward,
        "data_iterator": data,
        "model": [model],
        "num_microbatches": microbatches,
    }
    given |= {"seq_length": 3, "micro_batch_size": 2, **words}
    return schedules.forward_backward_pipelining_without_interleaving(**given)
