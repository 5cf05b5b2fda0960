"""What a trainer calls around a loop of its own: `initialize_megatron`, checkpoints, the number of microbatches."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.compat.loop import DataParallelModel
from megatron.compat.parallel_state import current, initialize_model_parallel
from megatron.core import device
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.tokenizers.build import build_from_config
from megatron.core.transport.parallel_state import init_process_group
from megatron.training import global_vars
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.microbatches import BatchSchedule
from megatron.training.engine import weight_pieces
from megatron.training.run.arguments import launch_config
from megatron.training.run.checkpointing import Checkpointer


def initialize_megatron(
    extra_args_provider: Any = None, args_defaults: Any = None, ignore_unknown_args: bool = False, **_: Any
) -> None:
    """Flags, process groups, seeds, tokenizer: afterwards `get_args()`, `mpu` and `get_num_microbatches()` answer.

    Communicates over the world. Raises SystemExit with status 2 for flags that are refused; ValueError for
    ignore_unknown_args, as no flag is dropped here.
    """
    if ignore_unknown_args:
        raise ValueError("ignore_unknown_args: declare such flags by extra_args_provider instead")
    config = launch_config(
        extra_args_provider=extra_args_provider, args_defaults=args_defaults, needs_data=False
    )
    env, parallel, training = LaunchEnv.read(), config.parallel, config.training
    here = device.current_device(
        env.local_rank, kind="cpu" if parallel.distributed_backend == "gloo" else None
    )
    device.set_threads(env.local_world_size, threads=training.threads_per_rank)
    if not torch.distributed.is_initialized():
        init_process_group(here, rank=env.rank, world_size=env.world_size)
    instances = config.ddp.num_distributed_optimizer_instances
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    initialize_model_parallel(*sizes, num_distributed_optimizer_instances=instances)
    for sow in (random.seed, np.random.seed, torch.manual_seed):
        sow(training.seed + 100 * current().pp_rank)
    global_vars.set_global_variables(
        {**config.flat(), **config.extra}, rank=env.rank, world_size=env.world_size
    )
    global_vars.provide(config=config, device=here, tokenizer=build_from_config(config.tokenizer))
    batch = training.rampup_batch_size, training.global_batch_size, training.micro_batch_size
    init_num_microbatches_calculator(
        env.rank, *batch, current().dp_size, training.decrease_batch_size_if_needed
    )


class _Batches:
    schedule: BatchSchedule
    consumed = 0


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Any,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Sets what `get_num_microbatches()` answers. Raises ValueError for a batch that does not divide."""
    ramp: Any = rampup_batch_size and tuple(map(int, rampup_batch_size))
    sizes = micro_batch_size, data_parallel_size, global_batch_size
    _Batches.schedule, _Batches.consumed = BatchSchedule(*sizes, ramp, decrease_batch_size_if_needed), 0
    global_vars.provide(
        num_microbatches=lambda: _Batches.schedule.num_microbatches(_Batches.consumed),
        global_batch_size=lambda: _Batches.schedule.global_batch_size(_Batches.consumed),
    )


def update_num_microbatches(consumed_samples: int, *_: Any, **__: Any) -> None:
    """So many samples have been trained on."""
    _Batches.consumed = int(consumed_samples)


def get_micro_batch_size() -> int:
    """Samples of a microbatch."""
    return _Batches.schedule.micro_batch_size


def save_checkpoint(
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    flops: float = 0,
    *_: Any,
    **__: Any,
) -> None:
    """Into `--save`: weights, optimizer, scheduler. Communicates over the world. Raises CheckpointError."""
    common = optimizer.state_dict() if optimizer else {}
    common |= {"iteration": iteration, "num_floating_point_operations_so_far": flops}
    common["config"] = global_vars.get_config().flat()
    common["scheduler"] = opt_param_scheduler and opt_param_scheduler.state_dict()
    _checkpointer().save(iteration, *_pieces(model, optimizer), common, wait=True)


def load_checkpoint(
    model: Sequence[nn.Module], optimizer: Any, opt_param_scheduler: Any, *_: Any, **__: Any
) -> tuple[int, float]:
    """(iteration, floating point operations) of what `--load` holds, which is put back; (0, 0) where it holds nothing.
    Communicates over the world. Raises CheckpointError."""
    restored = _checkpointer().load(*_pieces(model, optimizer), config=global_vars.get_config().flat())
    if restored is None:
        return 0, 0.0
    for engine in (one.engine for one in model if isinstance(one, DataParallelModel)):
        engine.weights_changed()
        if not restored.optimizer:
            engine.buffer.copy_weights_to_main()
    if not restored.resumed:
        return 0, 0.0
    if optimizer is not None and restored.optimizer:
        optimizer.load_state_dict(restored.common)
    if opt_param_scheduler is not None:
        opt_param_scheduler.load_state_dict(restored.common["scheduler"])
    return restored.iteration, float(restored.common.get("num_floating_point_operations_so_far", 0))


def _checkpointer() -> Checkpointer:
    return Checkpointer(current(), global_vars.get_config().checkpoint, log=global_vars.print_rank_0)


def _pieces(model: Sequence[Any], optimizer: Any) -> tuple[list[LocalPiece], list[LocalPiece]]:
    weights: list[LocalPiece] = []
    for one in model:
        if isinstance(one, DataParallelModel):
            one.engine.settle_weights()
            weights += weight_pieces(one.engine.buffer)
        else:
            weights += one.sharded_state_dict().pieces
    return weights, optimizer.inner.pieces() if optimizer else []


def save_sharded(sharded_state_dict: Any, checkpoint_dir: str, *_: Any, **__: Any) -> None:
    """`dist_checkpointing.save` of a model's `sharded_state_dict()`, which any layout can load. Communicates over the
    world. Raises CheckpointError."""
    save(checkpoint_dir, 0, sharded_state_dict.pieces, {}, {}, current())


def load_sharded(
    sharded_state_dict: Any, checkpoint_dir: str, *_: Any, **__: Any
) -> Mapping[str, torch.Tensor]:
    """`dist_checkpointing.load`, for `load_state_dict`; the model's tensors are filled in place. Communicates over the
    world. Raises CheckpointError."""
    if (found := find(checkpoint_dir, current()).found) is None:
        raise CheckpointError(f"{checkpoint_dir}: no checkpoint that dist_checkpointing.save has written")
    load_pieces(found, sharded_state_dict.pieces, current())
    return sharded_state_dict
