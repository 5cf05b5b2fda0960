"""What a trainer calls around a loop of its own: `initialize_megatron`, checkpoints, the number of microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.compat.loop import DataParallelModel, context_of
from megatron.compat.model import ShardedStateDict, settings_of_pretrain
from megatron.compat.parallel_state import current, initialize_model_parallel
from megatron.core import device
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.saving import save as save_pieces
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.tokenizers.build import build_from_config
from megatron.core.transport.parallel_state import init_process_group
from megatron.training import global_vars
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.microbatches import BatchSchedule
from megatron.training.config.problems import Problem
from megatron.training.run.arguments import launch_config
from megatron.training.run.checkpointing import Checkpointer
from megatron.training.run.session import sow, with_vocabulary


def initialize_megatron(
    extra_args_provider: Any = None, args_defaults: Any = None, ignore_unknown_args: bool = False, **_: Any
) -> None:
    """Flags, process groups, seeds, tokenizer: afterwards `get_args()`, `mpu` and `get_num_microbatches()` answer.

    Communicates over the world. Raises SystemExit as `launch_config`, also for flags that only pretrain() has a use
    for; ValueError for ignore_unknown_args, as no flag is dropped here.
    """
    if ignore_unknown_args:
        raise ValueError("ignore_unknown_args: declare such flags by extra_args_provider instead")
    config = launch_config(
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        needs_data=False,
        more_rules=_not_of_a_loop,
    )
    env, parallel, training = LaunchEnv.read(), config.parallel, config.training
    on_cpu = parallel.distributed_backend == "gloo"
    here = device.current_device(env.local_rank, kind="cpu" if on_cpu else None)
    device.set_threads(env.local_world_size, threads=training.threads_per_rank)
    if not torch.distributed.is_initialized():
        init_process_group(here, rank=env.rank, world_size=env.world_size)
    initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.reliability.distributed_timeout_minutes,
        order=config.rank_order,
    )
    sow(training.seed, current())
    tokenizer = build_from_config(config.tokenizer)
    config = with_vocabulary(config, tokenizer, current())
    args = {**config.flat(), **config.extra}
    global_vars.set_global_variables(args, rank=env.rank, world_size=env.world_size)
    global_vars.provide(
        config=config, device=here, tokenizer=tokenizer, batch_schedule=config.batch_schedule()
    )
    update_num_microbatches(0)


def _not_of_a_loop(config: Config) -> list[Problem]:
    """The flags as given; where only what follows from them asks for pretrain(), that."""
    given = {name: value for name, value in config.flat().items() if config.given(name)}
    return settings_of_pretrain(given) or settings_of_pretrain(config.flat())


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
    global_vars.provide(batch_schedule=BatchSchedule(*sizes, ramp, decrease_batch_size_if_needed))
    update_num_microbatches(0)


reconfigure_num_microbatches_calculator = init_num_microbatches_calculator


def update_num_microbatches(consumed_samples: int, *_: Any, **__: Any) -> None:
    """So many samples have been trained on."""
    names, schedule = ("num_microbatches", "global_batch_size"), global_vars.get_batch_schedule()
    global_vars.provide(**{name: partial(getattr(schedule, name), int(consumed_samples)) for name in names})


def get_micro_batch_size() -> int:
    """Samples of a microbatch."""
    return int(global_vars.get_batch_schedule().micro_batch_size)


def save_checkpoint(
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    *_: Any,
    **__: Any,
) -> None:
    """Into `--save`: weights, optimizer, scheduler. Communicates over the world. Raises CheckpointError."""
    common = {
        "iteration": iteration,
        "config": global_vars.get_config().flat(),
        "steps_trained": max((context_of(one).iteration for one in model), default=0),
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
        "scheduler": opt_param_scheduler and opt_param_scheduler.state_dict(),
        **({} if optimizer is None else optimizer.state_dict()),
    }
    _checkpointer(optimizer).save(iteration, *_pieces(model, optimizer), common, wait=True)


def load_checkpoint(
    model: Sequence[nn.Module], optimizer: Any, opt_param_scheduler: Any, *_: Any, **__: Any
) -> tuple[int, float]:
    """(iteration, floating point operations) of what `--load` holds, which is put back; (0, 0) where it holds nothing.
    Communicates over the world. Raises CheckpointError."""
    pieces, config = _pieces(model, optimizer), global_vars.get_config().flat()
    restored = _checkpointer(optimizer).load(*pieces, config=config)
    if restored is None:
        return 0, 0.0
    for one in model:
        if isinstance(one, DataParallelModel):
            one.weights_loaded(with_main_weights=bool(restored.optimizer))
    if not restored.resumed:
        return 0, 0.0
    for one in model:
        context_of(one).iteration = restored.common.get("steps_trained", restored.iteration)
    if optimizer is not None and restored.optimizer:
        optimizer.load_state_dict(restored.common)
    if opt_param_scheduler is not None and restored.common.get("scheduler"):
        opt_param_scheduler.load_state_dict(restored.common["scheduler"])
    return restored.iteration, float(restored.common.get("num_floating_point_operations_so_far", 0))


def _checkpointer(optimizer: Any) -> Checkpointer:
    flags = global_vars.get_config().checkpoint
    if optimizer is None:
        flags = dataclasses.replace(flags, no_load_optim=True, no_save_optim=True)
    return Checkpointer(current(), flags, log=global_vars.print_rank_0)


def _pieces(model: Sequence[Any], optimizer: Any) -> tuple[list[LocalPiece], list[LocalPiece]]:
    weights = [piece for one in model for piece in one.sharded_state_dict().pieces]
    return weights, [] if optimizer is None else optimizer.inner.pieces()


def save(sharded_state_dict: Any, checkpoint_dir: str, *strategies: Any, **named: Any) -> None:
    """`dist_checkpointing.save` of a model's `sharded_state_dict()`, or of a dict of it and JSON values; any layout can
    load it. Communicates over the world. Raises CheckpointError; ValueError for other values and for strategies."""
    model, values = _split(sharded_state_dict, *strategies, **named)
    try:
        save_pieces(checkpoint_dir, 0, model.pieces, {"values": values}, {}, current())
    except TypeError as error:
        raise ValueError(f"dist_checkpointing.save, of {sorted(values)}: {error}; vars(args) is") from error


def load(sharded_state_dict: Any, checkpoint_dir: str, *strategies: Any, **named: Any) -> Any:
    """`dist_checkpointing.load`, of what `save` takes: the model's tensors are filled in place, values are the saved
    ones. Communicates over the world. Raises as `save`."""
    model, _ = _split(sharded_state_dict, *strategies, **named)
    if (found := find(checkpoint_dir, current()).found) is None:
        raise CheckpointError(f"{checkpoint_dir}: no checkpoint that dist_checkpointing.save has written")
    load_pieces(found, model.pieces, current())
    model.loaded()
    sharded_state_dict.update(found.manifest.common.get("values", {}))
    return sharded_state_dict


def _split(given: Any, *strategies: Any, **named: Any) -> tuple[ShardedStateDict, dict[str, Any]]:
    """The model's, and what else is in the dict."""
    state = {"model": given} if isinstance(given, ShardedStateDict) else given
    named.pop("validate_access_integrity", None)  # always so
    models = [one for one in state.values() if isinstance(one, ShardedStateDict)]
    if len(models) != 1 or any((*strategies, *named.values())):
        raise ValueError(
            "dist_checkpointing: sharded_state_dict() of one model, no strategies, nothing async"
        )
    return models[0], {name: one for name, one in state.items() if one is not models[0]}
