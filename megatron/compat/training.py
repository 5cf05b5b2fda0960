"""Megatron's entry points of a trainer with a loop of its own: `initialize_megatron`, `core_transformer_config_from_args`,
`save_checkpoint`, `load_checkpoint`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.compat import num_microbatches_calculator as calculator
from megatron.compat import parallel_state
from megatron.compat.engine import DistributedDataParallel, MegatronOptimizer
from megatron.compat.model import config_from_args as core_transformer_config_from_args
from megatron.compat.schedules import unwrap_model
from megatron.core import device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.load import find, load_pieces
from megatron.core.dist_checkpointing.save import save
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.module import MegatronModule
from megatron.core.tokenizers.build import build_from_config
from megatron.core.transport.parallel_state import init_process_group
from megatron.training import global_vars
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.engine import weight_pieces
from megatron.training.run.arguments import launch_config

__all__ = ["core_transformer_config_from_args", "initialize_megatron", "load_checkpoint", "save_checkpoint"]


def initialize_megatron(
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    **others: Any,
) -> None:
    """Flags, process groups, seeds, tokenizer: afterwards `get_args()`, `mpu` and `get_num_microbatches()` answer.

    Communicates over the world. Raises SystemExit with status 2 for flags that are refused; ValueError for
    ignore_unknown_args, as no flag is dropped here.
    """
    if ignore_unknown_args:
        raise ValueError(
            "initialize_megatron(ignore_unknown_args=True): declare them by extra_args_provider instead"
        )
    config, env = (
        launch_config(extra_args_provider=extra_args_provider, args_defaults=args_defaults),
        LaunchEnv.read(),
    )
    kind = "cpu" if config.parallel.distributed_backend == "gloo" else None
    here = device.current_device(env.local_rank, kind=kind)
    device.set_threads(env.local_world_size, threads=config.training.threads_per_rank)
    if not torch.distributed.is_initialized():
        init_process_group(here, rank=env.rank, world_size=env.world_size)
    parallel = config.parallel
    if not skip_mpu_initialization:
        parallel_state.initialize_model_parallel(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        )
    seed = config.training.seed + 100 * (0 if skip_mpu_initialization else parallel_state.current().pp_rank)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    global_vars.set_global_variables(
        {**config.flat(), **config.extra}, rank=env.rank, world_size=env.world_size
    )
    global_vars.provide(config=config, device=here, tokenizer=build_from_config(config.tokenizer))
    ramp = config.training.rampup_batch_size
    calculator.init_num_microbatches_calculator(
        env.rank,
        ramp,
        config.training.global_batch_size,
        config.training.micro_batch_size,
        config.grid().dp,
    )


def _model_pieces(model: Sequence[nn.Module]) -> list[LocalPiece]:
    pieces: list[LocalPiece] = []
    for one in model:
        if isinstance(one, DistributedDataParallel):
            one.engine.settle_weights()
            pieces += weight_pieces(one.engine.buffer)
            continue
        inner = unwrap_model(one)
        if not isinstance(inner, MegatronModule):
            raise ValueError(
                f"{type(inner).__name__}: wrap it in DistributedDataParallel, which knows its parameters"
            )
        parameters = dict(inner.named_parameters())
        pieces += [
            piece
            for name, meta in inner.param_meta.items()
            for piece in pieces_of("model", meta, parameters[name])
        ]
    return pieces


def save_checkpoint(
    iteration: int,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    *unused: Any,
    **also: Any,
) -> None:
    """Into `--save` of `get_args()`: weights, optimizer, scheduler. Communicates over the world."""
    common = {
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
    }
    pieces = _model_pieces(model)
    if optimizer is not None:
        pieces += optimizer.inner.pieces()
        common["loop"] = optimizer.state_dict()
    if opt_param_scheduler is not None:
        common["scheduler"] = opt_param_scheduler.state_dict()
    save(_folder("save"), iteration, pieces, common, {}, parallel_state.current())


def load_checkpoint(
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    *unused: Any,
    **also: Any,
) -> tuple[int, float]:
    """(iteration, floating point operations) of what `--load` holds, which is put back; (0, 0) where it holds nothing.
    Communicates over the world. Raises CheckpointError."""
    ps, folder = parallel_state.current(), getattr(global_vars.get_args(), load_arg, None)
    found = None if folder is None else find(folder, ps).found
    if found is None:
        return 0, 0.0
    pieces = _model_pieces(model) + (optimizer.inner.pieces() if optimizer is not None else [])
    load_pieces(found, pieces, ps, prefixes=("model.",) if optimizer is None else ("model.", "optimizer."))
    common = found.manifest.common
    for one in model:
        if isinstance(one, DistributedDataParallel):
            one.engine.weights_changed()
            if optimizer is None:
                one.engine.buffer.copy_weights_to_main()
    if optimizer is not None:
        if "loop" not in common:
            raise CheckpointError(
                f"{found.directory}: of pretrain(), which resumes it; here it is loaded without optimizer"
            )
        optimizer.load_state_dict(common["loop"])
    if opt_param_scheduler is not None and "scheduler" in common:
        opt_param_scheduler.load_state_dict(common["scheduler"])
    return int(common["iteration"]), float(common["num_floating_point_operations_so_far"])


def _folder(flag: str) -> Path:
    folder = getattr(global_vars.get_args(), flag)
    if folder is None:
        raise ValueError(f"--{flag} names no folder")
    return Path(folder)
