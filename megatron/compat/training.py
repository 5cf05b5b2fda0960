"""What a trainer calls before a loop of its own: `parse_args`, `initialize_megatron`, the number of microbatches."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megatron.compat.checkpoints import hold
from megatron.compat.fields import check_fields, config_of, settings_of_pretrain
from megatron.compat.parallel_state import current, initialize_model_parallel
from megatron.core import device
from megatron.core.tokenizers.build import build_from_config
from megatron.core.transport.parallel_state import init_process_group
from megatron.training import global_vars
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.microbatches import BatchSchedule
from megatron.training.config.problems import Problem
from megatron.training.run.arguments import launch_config
from megatron.training.run.session import new_timers, sow, with_vocabulary


def parse_args(
    extra_args_provider: Any = None, ignore_unknown_args: bool = False, args_defaults: Any = None
) -> Any:
    """The flags of this launch, checked and with all that follows from them, as `get_args()` has them; `set_args` and
    `initialize_megatron(parsed_args=...)` take them, with what was written into them. Raises as `initialize_megatron`.
    """
    if ignore_unknown_args:
        raise ValueError("ignore_unknown_args: declare such flags by extra_args_provider instead")
    config = launch_config(
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        needs_data=False,
        more_rules=_not_of_a_loop,
    )
    global_vars.provide(config=config)
    env = LaunchEnv.read()
    place = {"rank": env.rank, "world_size": env.world_size}
    return SimpleNamespace(**{**config.flat(), **config.extra, **place})


def initialize_megatron(
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    store: Any = None,
    parsed_args: Any = None,
) -> None:
    """Flags, process groups, seeds, tokenizer, the lease on --save: afterwards `get_args()`, `get_timers()`, `mpu` and
    `get_num_microbatches()` answer. parsed_args: of `parse_args`.

    Communicates over the world. Raises SystemExit as `launch_config`, also for flags that only pretrain() has a use
    for; ValueError for ignore_unknown_args, as no flag is dropped here, and for places of embeddings; LeaseError.
    """
    if skip_mpu_initialization or get_embedding_ranks or get_position_embedding_ranks:
        told = "skip_mpu_initialization, get_embedding_ranks, get_position_embedding_ranks"
        raise ValueError(f"initialize_megatron: {told}: leave them out")
    args = parsed_args or parse_args(extra_args_provider, ignore_unknown_args, args_defaults)
    config, env = config_of(args), LaunchEnv.read()
    parallel, training = config.parallel, config.training
    on_cpu = parallel.distributed_backend == "gloo"
    here = device.current_device(env.local_rank, kind="cpu" if on_cpu else None)
    device.set_threads(env.local_world_size, threads=training.threads_per_rank)
    if not torch.distributed.is_initialized():
        init_process_group(here, rank=env.rank, world_size=env.world_size, store=store)
    initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.reliability.distributed_timeout_minutes,
        order=config.rank_order,
    )
    hold(config.checkpoint.save)
    sow(training.seed, current())
    tokenizer = build_from_config(config.tokenizer)
    config = with_vocabulary(config, tokenizer, current())
    vars(args).update(config.flat(), rank=env.rank, world_size=env.world_size)
    global_vars.set_args(args)
    global_vars.provide(config=config, device=here, tokenizer=tokenizer)
    global_vars.provide(timers=new_timers(config, current()), batch_schedule=config.batch_schedule())
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
    """Sets what `get_num_microbatches()` answers. Raises ValueError for sizes that make no batch."""
    asked = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    check_fields("init_num_microbatches_calculator", asked)
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
