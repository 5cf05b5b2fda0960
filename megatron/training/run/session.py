"""`initialize`: from flags and the launcher's environment to a `Session`."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.device import Device
from megatron.core.machine import available_cores
from megatron.core.models.gpt.vocabulary_size import padded_vocabulary
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport import collectives, host_data, parallel_state
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.words import counted
from megatron.estimate.own_description import (
    OwnDescription,
    description_as_json,
    description_from_json,
)
from megatron.training.config import limits
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.rules import plan_problems
from megatron.training.config.saved_config import CHECKPOINT, check_holds_tokenizer, saved_padded_vocabulary
from megatron.training.guard.console import say
from megatron.training.guard.rendezvous import hosts_store, open_store
from megatron.training.guard.run_folder import RunFolder
from megatron.training.guard.startup_check import Meeting, compare_across_ranks
from megatron.training.guard.watchdog import Watchdog
from megatron.training.planner import Planner
from megatron.training.report import metrics
from megatron.training.report.session import Session
from megatron.training.report.timers import Timers
from megatron.training.run.build import fake_state
from megatron.training.run.describe import asks_for_costs, described, limit_fault
from megatron.training.run.measuring import measured_exchange_wire

_OF_DEVICE = 0.9  # of a GPU's memory: --rank-memory-limit auto. The rest is the allocator's and NCCL's.


Look = Callable[[Config, Tokenizer], tuple[OwnDescription | None, str]]


def initialize(config: Config, env: LaunchEnv, folder: RunFolder, look: Look | None = None) -> Session:
    """Threads, device, the comparison between ranks, their groups, seeds, tokenizer, the run's folder: all before the
    model. look: describes the model that will be built, or says why it cannot; None: the one of the flags.

    Raises ValueError for the user's mistakes, StartupMismatchError on every rank when ranks were started differently,
    LeaseError on every rank when another run holds --save, PeerLostError. Communicates over the world.
    """
    started_at = time.monotonic()
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)
    raised = limits.allow_files(limits.files_needed(config, env))
    asked, said_by = config.training.threads_per_rank, "--threads-per-rank"
    if asked is None:
        asked, said_by = env.threads_of_user, "OMP_NUM_THREADS"
    threads = device.set_threads(env.local_world_size, threads=asked)
    limits.try_threads(limits.threads_needed(config, env, threads))
    on_cpu = config.parallel.distributed_backend == "gloo"
    here = device.current_device(env.local_rank, kind="cpu" if on_cpu else None)
    here.allow_tf32(config.optimizer.allow_tf32)
    if config.training.deterministic_mode:  # the call alone imports the compiler: 0.6 s
        torch.use_deterministic_algorithms(True)
    ps, watchdog = (_join_world if env.faked is None else _stand_alone)(config, env, here)
    sow(config.training.seed, ps)
    assert config.tokenizer.tokenizer_type is not None, "the rules ask for --tokenizer-type"
    tokenizer = build_from_config(config.tokenizer)
    config = with_vocabulary(config, tokenizer, ps)
    config, planner, undescribed = _planned(config, env, ps, tokenizer, look)
    timers = new_timers(config, ps)
    # The last thing that may be refused: from here on the run's ends are recorded, and the folder given free. Gathered,
    # as a broadcast would not wait for the others, who would lose a first rank that ends.
    claimed = folder.claim(env, say) if ps.is_first_rank else None
    folder.adopt(host_data.all_gather_json(claimed, ps.control_group)[0])
    shared = config, env, here, ps, timers, watchdog, tokenizer, folder, started_at, planner
    session = Session(*shared, undescribed)
    said = f"; {said_by}" if asked is not None else ""  # else ranks share the cores
    cores, ranks = counted(available_cores(), "core"), counted(env.local_world_size, "local rank")
    size, padded = tokenizer.vocab_size, config.model.padded_vocab_size or 0
    session.print_rank_0(
        *([] if raised is None else [raised]),
        metrics.THREADS.format(threads=threads, cores=cores, ranks=ranks, said_by=said),
    )
    if undescribed and config.staged_model.reads_costs:
        session.print_rank_0(
            f" > planned as of equal stages: {undescribed}. Times are measured in steps, activations are in no plan"
        )
    vocabulary = metrics.PADDED_VOCAB.format(size=size, dummies=padded - size, padded=padded)
    with_padding = f", {padded:,} with padding" if padded > size else ""
    session.print_rank_0(vocabulary, brief=f" > vocabulary: {size:,} tokens{with_padding}")
    return session


def _join_world(config: Config, env: LaunchEnv, here: Device) -> tuple[ParallelState, Watchdog]:
    """This rank's groups and who watches them, once all ranks have come to the store and were started alike: different
    flags make different groups, and ranks would wait for each other in them. Communicates over the world."""
    timeout = datetime.timedelta(minutes=config.reliability.distributed_timeout_minutes)
    part = config.world_part()
    store = open_store(env, timeout)
    if env.world_size > 1:
        meeting = Meeting(store, env.rank, env.world_size, timeout, hosts=hosts_store(env))
        flags = {**config.flat(), **config.extra}
        if _asks_machine(config):  # of which every host has its own; settled below
            flags["rank_memory_limit"] = "auto"
        compare_across_ranks(meeting, flags, backend=here.backend, torch_version=torch.__version__)
    parallel_state.init_process_group(
        here, rank=env.rank, world_size=env.world_size, timeout=timeout, store=store
    )
    store_host = f"{env.master_addr}:{env.master_port} (rank 0 or its launcher)"
    watchdog = Watchdog(store, env.rank, env.world_size, store_host=store_host)
    ps = parallel_state.make_parallel_state(
        part.grid,
        here,
        timeout,
        observer=watchdog.collective,
        num_distributed_optimizer_instances=part.instances,
        experts=part.experts,
    )
    watchdog.watch({id(group): group.traffic for group in ps.groups.values()}.values())
    return ps, watchdog


def _stand_alone(config: Config, env: LaunchEnv, here: Device) -> tuple[ParallelState, Watchdog]:
    """--fake-process-group: the groups of a rank whose peers are not there."""
    ps = fake_state(config, env.place[0], here)
    say(metrics.FAKE.format(rank=ps.rank, ranks=ps.world_size))
    return ps, Watchdog(dist.HashStore(), env.rank, env.world_size)


def new_timers(config: Config, ps: ParallelState) -> Timers:
    """As the flags ask for them."""
    return Timers(
        config.logging.timing_log_level,
        config.logging.timing_log_option,
        synchronize=ps.device.synchronize,
        barrier=lambda: collectives.barrier(ps.control_group),
    )


def sow(seed: int, ps: ParallelState) -> None:
    """Python, NumPy and torch, for user code: the model's own randomness is keyed by name and by sample."""
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed + 100 * ps.pp_rank)  # as Megatron


def _planned(
    config: Config, env: LaunchEnv, ps: ParallelState, tokenizer: Tokenizer, look: Look | None
) -> tuple[Config, Planner, str]:
    """With the bytes of --rank-memory-limit, and the model's description where plans or rules read it, with the wire by
    which its exchanges are priced; the run's planner; and why the model is not described.

    Communicates over the world and `ep_etp`. Raises ConfigurationError on every rank alike.
    """
    limit = config.parallel.rank_memory_limit
    if _asks_machine(config):
        share = int(_OF_DEVICE * (ps.device.total_bytes() or 0)) if limit == "auto" else limit
        config = config.replace(rank_memory_limit=min(host_data.all_gather_json(share, ps.control_group)))
    undescribed = ""
    if asks_for_costs(config) or config.data_parallel_size > 1:
        own, why = (None, "") if look is None else look(config, tokenizer)
        # One rank looks at a model of the flags: all would see the same, and ranks of a machine share its cores.
        mine: list[Any] = []
        if ps.is_first_rank:
            seen = own if own is not None or why else described(config).description
            mine = [description_as_json(seen), why]
        content, undescribed = host_data.all_gather_json(mine, ps.control_group)[0]
        config = dataclasses.replace(config, description=description_from_json(content))
        config = dataclasses.replace(config, exchange_wire=measured_exchange_wire(config, ps))
    if (problem := limit_fault(config, undescribed)) is not None:
        raise ConfigurationError([problem])
    found = [dataclasses.asdict(problem) for problem in plan_problems(config, env)]
    for problems in host_data.all_gather_json(found, ps.control_group):
        if problems:  # machines differ in their memory
            raise ConfigurationError(Problem(**one) for one in problems)
    return config, config.planner(), undescribed


def _asks_machine(config: Config) -> bool:
    """--rank-memory-limit auto: what is left to the device, or was taken from the machine."""
    limit = config.parallel.rank_memory_limit
    return limit == "auto" or (limit is not None and config.origin.get("rank_memory_limit") == "derived")


def with_vocabulary(config: Config, tokenizer: Tokenizer, ps: ParallelState) -> Config:
    """With the padded vocabulary: of the flags, else of the checkpoint to load, else of tokenizer and TP.

    Communicates over the world where there is a checkpoint to load. Raises ConfigurationError.
    """
    if not config.given("padded_vocab_size") and config.checkpoint.load is not None:
        # One rank looks: thousands that read the same files would keep a file system busy.
        mine = saved_padded_vocabulary(config.flat()) if ps.is_first_rank else None
        saved = host_data.all_gather_json(mine, ps.control_group)[0]
        if saved is not None:
            if ps.is_first_rank and saved != config.model.padded_vocab_size:
                say(f" > padded vocab of the checkpoint in {config.checkpoint.load}: {saved}")
            config = config.replace(padded_vocab_size=saved, origin=CHECKPOINT)
    if config.model.padded_vocab_size is not None:
        check_holds_tokenizer(config, tokenizer.vocab_size)
        return config
    divisor, tp = config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    return config.replace(padded_vocab_size=padded_vocabulary(tokenizer.vocab_size, divisor, tp))
