"""One case under the megatron-core that is on the path: built, trained, and what came of it. Runs on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import zbpp_light
from cases import Case
from live_bytes import LiveBytes
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-2, 0.1, 1.0


@dataclasses.dataclass
class Record:
    """Of one rank. Floats are written as hex, so that equal means to the last bit.

    losses: of each step, on the last stage; norms: of the gradients, before clipping, infinite where fp16 overflows;
    evaluations: losses; weights: a sum of the bits of all parameters at the end; peak_bytes: the most live bytes in the
    last step, over what was live before it.
    """

    losses: list[str] = dataclasses.field(default_factory=list)
    norms: list[str] = dataclasses.field(default_factory=list)
    evaluations: list[str] = dataclasses.field(default_factory=list)
    weights: int = 0
    peak_bytes: int = 0


def train_each(
    ctx: Any, case: dict[str, Any], schedules: list[dict[str, str] | None], measure_memory: bool
) -> list[dict[str, Any]]:
    """A case once for each schedule (arguments of `patch_megatron`, or None for Megatron's own), one after the other on
    the same ranks: `Record`s."""
    tiny = Case(**case)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tiny.tensor,
        pipeline_model_parallel_size=tiny.pipeline,
        expert_model_parallel_size=tiny.expert,
        context_parallel_size=tiny.context,
    )
    try:
        return [dataclasses.asdict(train(tiny, words, measure_memory)) for words in schedules]
    finally:
        parallel_state.destroy_model_parallel()


def train(case: Case, schedule: dict[str, str] | None, measure_memory: bool) -> Record:
    """All steps of a case on this rank."""
    if schedule is not None:
        zbpp_light.patch_megatron(**schedule)
    torch.manual_seed(1234)
    with accumulation_kernel() if case.fusion else contextlib.nullcontext():
        config = transformer_config(case)
        model = wrapped(case, config, gpt(case, config))
        optimizer = Optimizer(case, config, model)
        record = Record()
        for step in range(case.steps):
            clear_gradients(case, model, optimizer)
            last = step == case.steps - 1
            with LiveBytes() if measure_memory and last else contextlib.nullcontext() as live:
                losses = run_step(case, model, step, forward_only=False)
            if live is not None:
                record.peak_bytes = live.peak
            record.losses.append(_sum(losses))
            record.norms.append(optimizer.step().hex())
            if case.evaluate_every and step % case.evaluate_every == case.evaluate_every - 1:
                record.evaluations.append(_sum(run_step(case, model, 10_000 + step, forward_only=True)))
        finish_gathers(case, model)
        record.weights = _bits(model)
    if schedule is not None:
        zbpp_light.unpatch_megatron()
    return record


# The model ---------------------------------------------------------------------------------------------


def transformer_config(case: Case) -> TransformerConfig:
    llama = case.shape == "llama"
    words: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": case.hidden,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "pipeline_dtype": _dtype(case),
        **_precision(case),
        "tensor_model_parallel_size": case.tensor,
        "pipeline_model_parallel_size": case.pipeline,
        "context_parallel_size": case.context,
        "sequence_parallel": case.tensor > 1,
        "gradient_accumulation_fusion": case.fusion,
        "deallocate_pipeline_outputs": True,
        "calculate_per_token_loss": case.per_token,
        "attention_dropout": case.dropout,
        "hidden_dropout": case.dropout,
        "bias_dropout_fusion": False,
    }
    if llama:
        words |= {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "num_query_groups": 2,
            "ffn_hidden_size": 2 * case.hidden,
        }
    if case.experts:
        words |= {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 1e-2,
            "moe_ffn_hidden_size": case.hidden,
            "expert_model_parallel_size": case.expert,
        }
    if case.recompute:
        words |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**words)


def _dtype(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype


def _precision(case: Case) -> dict[str, Any]:
    """Settings that configurations of model and optimizer share."""
    dtype = _dtype(case)
    return {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}


def gpt(case: Case, config: TransformerConfig) -> GPTModel:
    spec_words = {
        "num_experts": case.experts or None,
        "moe_grouped_gemm": False,
        "normalization": config.normalization,
    }
    spec = get_gpt_layer_local_spec(**_known(get_gpt_layer_local_spec, spec_words))
    if case.context > 1:
        spec.submodules.self_attention.submodules.core_attention = TokensAlone
    return GPTModel(
        config,
        spec,
        vocab_size=case.vocabulary,
        max_sequence_length=case.length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope" if case.shape == "llama" else "learned_absolute",
    )


class TokensAlone(torch.nn.Module):
    """In the place of attention over ranks that share a sequence, which is Transformer Engine's alone: no token sees
    another."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **words: Any) -> Tensor:
        """All have [tokens, samples, heads, channels]."""
        return ((query * key).sum(dim=-1, keepdim=True).tanh() * value).flatten(2)


def _known(function: Callable[..., Any], words: dict[str, Any]) -> dict[str, Any]:
    """Those that this release's function has, or all where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return words
    return {name: value for name, value in words.items() if name in parameters}


def wrapped(case: Case, config: TransformerConfig, model: GPTModel) -> torch.nn.Module:
    """In Megatron's DDP, with the functions of the configuration set as Megatron's own training loop sets them."""
    if case.ddp == "none":
        return model
    if case.dtype != "float32":
        model = Float16Module(config, model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce="overlap" in case.ddp,
        overlap_param_gather=case.ddp == "sharded-overlap",
        use_distributed_optimizer=case.ddp.startswith("sharded"),
        bucket_size=1000,
    )
    ddp = DistributedDataParallel(config, settings, model)
    if settings.overlap_grad_reduce:
        config.no_sync_func = ddp.no_sync
        if case.align:
            config.grad_sync_func = ddp.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    ddp.broadcast_params()
    return ddp


@contextlib.contextmanager
def accumulation_kernel() -> Iterator[None]:
    """A stand-in for apex's kernel of fused accumulation, which is CUDA's, for the time of a `with`."""
    from megatron.core.tensor_parallel import layers

    def add(x: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t().matmul(x))

    kernel = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = add

    before = layers.__dict__.get("fused_weight_gradient_mlp_cuda"), layers._grad_accum_fusion_available
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = kernel, True
    sys.modules["fused_weight_gradient_mlp_cuda"] = kernel
    try:
        yield
    finally:
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = before
        del sys.modules["fused_weight_gradient_mlp_cuda"]


def norms_under_sequence_parallel() -> None:
    """Apex's and Transformer Engine's norms mark their weights under sequence parallelism. Torch's refuse it: mark."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    plain = WrappedTorchNorm.__new__

    def marked(cls: type, config: TransformerConfig, hidden_size: int, **words: Any) -> torch.nn.Module:
        norm = plain(cls, dataclasses.replace(config, sequence_parallel=False), hidden_size, **words)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def without_transformer_engine() -> None:
    """What releases ask of Transformer Engine without need: a router's kernel (0.13 to 0.16), and to quantize no
    parameters after a step of the distributed optimizer (0.12)."""
    from megatron.core.transformer.moe import moe_utils

    from megatron.core import fp8_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
    quantize = fp8_utils._quantize_param_shard_impl

    def quantize_any(model_params: list[Tensor], *others: Any, **words: Any) -> None:
        if model_params:
            quantize(model_params, *others, **words)

    fp8_utils._quantize_param_shard_impl = quantize_any


norms_under_sequence_parallel()
without_transformer_engine()


# A step ------------------------------------------------------------------------------------------------


def batches(case: Case, step: int) -> Iterator[dict[str, Tensor]]:
    """Microbatches of this rank's replica, or its part of a sequence: tokens, labels and a mask that leaves out other
    tokens in each."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for microbatch in range(case.microbatches):
        source = torch.Generator().manual_seed(step * 1000 + microbatch * 10 + replica)
        length = case.length // case.context
        size = (case.microbatch_size, length + 1)
        text = torch.randint(0, case.vocabulary, size, generator=source)
        mask = torch.rand((case.microbatch_size, length), generator=source) < 0.8
        yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "mask": mask.float()}


def forward_step(case: Case, data: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> Any:
    batch = next(data)
    length = batch["tokens"].shape[1]
    positions = torch.arange(length).expand(case.microbatch_size, -1)
    causal = torch.ones(1, 1, length, length).triu(1).bool()
    output = model(batch["tokens"], positions, causal, labels=batch["labels"])
    return output, functools.partial(loss, case, batch["mask"])


def loss(case: Case, mask: Tensor, output: Tensor) -> Any:
    total, tokens = (output.float() * mask).sum(), mask.sum()
    if case.per_token:
        return total, tokens.int(), {"loss": total.detach() / tokens}
    return total / tokens, {"loss": (total / tokens).detach()}


def clear_gradients(case: Case, model: torch.nn.Module, optimizer: Optimizer) -> None:
    if optimizer.megatron is None:
        optimizer.plain.zero_grad()
    else:
        model.zero_grad_buffer()
        optimizer.megatron.zero_grad()


def run_step(case: Case, model: torch.nn.Module, step: int, *, forward_only: bool) -> list[dict[str, Tensor]]:
    (model.eval if forward_only else model.train)()
    with torch.set_grad_enabled(not forward_only):
        losses: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, case),
            data_iterator=batches(case, step),
            model=[model],
            num_microbatches=case.microbatches,
            seq_length=case.length,
            micro_batch_size=case.microbatch_size,
            forward_only=forward_only,
        )
    return losses


class Optimizer:
    """AdamW: Megatron's, or torch's where gradients are in `.grad`."""

    def __init__(self, case: Case, config: TransformerConfig, model: torch.nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if case.ddp == "none":
            self.plain = torch.optim.AdamW(self.parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
            self.megatron = None
            return
        words = {
            "optimizer": "adam",
            "lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "clip_grad": CLIP,
            **_precision(case),
            "initial_loss_scale": 2.0**24,
            "loss_scale_window": 4,
            "hysteresis": 1,
            "use_distributed_optimizer": case.ddp.startswith("sharded"),
            "overlap_param_gather": case.ddp == "sharded-overlap",
        }
        self.megatron = get_megatron_optimizer(OptimizerConfig(**_known(OptimizerConfig, words)), [model])
        config.grad_scale_func = self.megatron.scale_loss  # as Megatron's own training loop
        self.may_overflow = case.dtype == "float16"

    def step(self) -> float:
        """Returns the norm of the gradients."""
        if self.megatron is None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.plain.step()
            return norm.item()
        updated, norm, _ = self.megatron.step()
        assert updated or self.may_overflow, "the step was left out"
        return float(norm) if updated else math.inf


def finish_gathers(case: Case, model: torch.nn.Module) -> None:
    """Weights that are gathered in the next forward are gathered now."""
    if case.ddp == "sharded-overlap":
        model.disable_forward_pre_hook()


def _sum(losses: list[dict[str, Tensor]]) -> str:
    return sum((one["loss"].item() for one in losses), 0.0).hex()


def _bits(model: torch.nn.Module) -> int:
    return sum(int(parameter.data.view(torch.int16).long().sum()) for parameter in model.parameters())
