"""Where a model meets its engines: the one visible order in which a run is put together.

model_provider -> DistributedDataParallel (flat buffers) -> initial weights -> optimizer -> schedules
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.module import MegatronModule, ModelContext
from megatron.core.optimizer.grad_scaler import GradScaler, build_grad_scaler
from megatron.core.optimizer.mixed_precision import MixedPrecisionOptimizer, build_optimizer
from megatron.core.optimizer.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    build_scheduler,
    idle_scheduler,
)
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta, infer_param_meta
from megatron.core.tensor_parallel.init import fill
from megatron.training.config import Config

ModelProvider = Callable[..., nn.Module]


@dataclasses.dataclass
class Engine:
    """Everything that one training step touches on this rank."""

    model: DistributedDataParallel
    context: ModelContext
    param_meta: dict[str, ParamMeta]
    optimizer: MixedPrecisionOptimizer
    scheduler: OptimizerParamScheduler
    scaler: GradScaler

    def model_pieces(self) -> list[LocalPiece]:
        """The model's weights, under `model.<name>`, as a checkpoint holds them."""
        buffer = self.model.buffer
        return [
            LocalPiece(f"model.{name}", meta.global_shape, (0,) * len(meta.global_shape), buffer.weight(name))
            for name, meta in self.param_meta.items()
        ]


def build_gpt_model(config: Config, *, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """The GPT that the flags describe, on torch's current default device."""
    padded_vocab_size = config.model.padded_vocab_size
    assert padded_vocab_size is not None, "padded_vocab_size is derived once the tokenizer is known"
    return GPTModel(
        config.model,
        padded_vocab_size=padded_vocab_size,
        seed=config.training.seed,
        params_dtype=params_dtype(config),
        device=torch.get_default_device(),
        pre_process=pre_process,
        post_process=post_process,
    )


def params_dtype(config: Config) -> torch.dtype:
    """The dtype of model weights: --bf16, --fp16, --fp64, else fp32."""
    dtype = getattr(torch, config.params_dtype)
    assert isinstance(dtype, torch.dtype), f"{config.params_dtype} is no dtype"
    return dtype


def build_engine(config: Config, ps: ParallelState, model_provider: ModelProvider) -> Engine:
    """Build the model and wrap it. Communicates over dp for models that are not ours (their initial weights)."""
    on_meta = config.model.init_model_with_meta_device
    with torch.device("meta") if on_meta else ps.device.torch_device:
        module = model_provider(pre_process=True, post_process=True)
    module.to(params_dtype(config))
    if isinstance(module, MegatronModule):
        context, meta = module.context, module.param_meta
        model = DistributedDataParallel(module, ps, config.ddp, meta, context.grads)
        if on_meta:
            _fill(model.buffer, meta, config.training.seed)
    else:
        if on_meta:
            raise ValueError(
                "--init-model-with-meta-device needs a model that says how its weights start (MegatronModule): "
                f"leave the flag out for {type(module).__name__}"
            )
        context, meta = ModelContext(config.training.seed), infer_param_meta(module)
        model = DistributedDataParallel(module, ps, config.ddp, meta)
        model.broadcast_weights()
    optimizer = build_optimizer(config.optimizer, model.buffer, ps)
    return Engine(
        model=model,
        context=context,
        param_meta=meta,
        optimizer=optimizer,
        scheduler=_scheduler(config, optimizer),
        scaler=build_grad_scaler(config.optimizer),
    )


def _scheduler(config: Config, optimizer: MixedPrecisionOptimizer) -> OptimizerParamScheduler:
    if config.evaluation.skip_train:
        return idle_scheduler(optimizer.param_groups)
    by_samples = config.training.train_samples is not None
    return build_scheduler(
        config.optimizer,
        optimizer.param_groups,
        train_iters=None if by_samples else config.training.train_iters,
        train_samples=config.training.train_samples,
        global_batch_size=config.training.global_batch_size,
    )


def _fill(buffer: FlatBuffer, param_meta: dict[str, ParamMeta], seed: int) -> None:
    """Initial weights of a model that was built without memory."""
    for name, meta in param_meta.items():
        fill(buffer.weight(name), meta, seed)
    buffer.copy_weights_to_main()
