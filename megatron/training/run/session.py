"""What a run holds from its first collective to its last: ranks, device, clocks, watchers; made by `initialize`."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import random
import time
from typing import Any

import numpy as np
import torch

from megatron.core import device
from megatron.core.device import Device
from megatron.core.models.gpt.parameter_count import padded_vocabulary
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport import collectives, host_data, parallel_state
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config import limits
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.saved_config import (
    check_holds_tokenizer,
    saved_padded_vocabulary,
    with_saved_vocabulary,
)
from megatron.training.guard.console import say
from megatron.training.guard.meeting import Meeting
from megatron.training.guard.rendezvous import hosts_store, open_store
from megatron.training.guard.run_folder import RunFolder
from megatron.training.guard.startup_check import compare_across_ranks
from megatron.training.guard.watchdog import Watchdog
from megatron.training.report import metrics
from megatron.training.report.timers import Timers

_OF_DEVICE = 0.9  # of a GPU's memory: --rank-memory-limit auto. The rest is the allocator's and NCCL's.


@dataclasses.dataclass
class Session:
    """The surroundings of a run. `config` is complete: the padded vocabulary is known."""

    config: Config
    env: LaunchEnv
    device: Device
    ps: ParallelState
    timers: Timers
    watchdog: Watchdog
    tokenizer: Tokenizer
    folder: RunFolder
    started_at: float

    def print_rank_0(self, text: str) -> None:
        if self.ps.is_first_rank:
            say(text)

    def print_rank_last(self, text: str) -> None:
        if self.ps.is_last_rank:
            say(text)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's plain value. Communicates over the world."""
        return host_data.all_gather_json(value, self.ps.control_group)

    def close(self) -> None:
        """Leave the world together with all other ranks."""
        self.watchdog.close()
        parallel_state.destroy_process_group(self.ps)
        self.folder.release()


def initialize(config: Config, env: LaunchEnv, folder: RunFolder) -> Session:
    """Threads, device, the comparison between ranks, their groups, seeds, tokenizer, the run's folder: all before the
    model.

    Raises ValueError for the user's mistakes, StartupMismatchError on every rank when ranks were started differently,
    LeaseError on every rank when another run holds --save, PeerLostError. Communicates over the world.
    """
    started_at = time.monotonic()
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)
    raised = limits.allow_files(limits.files_needed(config, env))
    threads, threads_by = _set_threads(config, env)
    limits.try_threads(limits.threads_needed(config, env, threads))
    here = device.current_device(
        env.local_rank, kind="cpu" if config.parallel.distributed_backend == "gloo" else None
    )
    here.allow_tf32(config.optimizer.allow_tf32)
    if config.training.deterministic_mode:  # the call alone imports the compiler: 0.6 s
        torch.use_deterministic_algorithms(True)
    timeout = datetime.timedelta(minutes=config.reliability.distributed_timeout_minutes)
    grid = config.grid()
    store = _store_of_equals(config, env, here, timeout)
    parallel_state.init_process_group(
        here, rank=env.rank, world_size=env.world_size, timeout=timeout, store=store
    )
    watchdog = Watchdog(
        store,
        env.rank,
        env.world_size,
        store_host=f"{env.master_addr}:{env.master_port} (rank 0 or its launcher)",
    )
    ps = parallel_state.make_parallel_state(
        grid,
        here,
        timeout,
        observer=watchdog.collective,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
    )
    watchdog.watch(group.traffic for group in ps.groups.values())
    _seed(config.training.seed, ps)
    assert config.tokenizer.tokenizer_type is not None, "the rules ask for --tokenizer-type"
    tokenizer = build_from_config(config.tokenizer)
    config = _with_limit(_with_vocabulary(config, tokenizer, ps), ps)
    timers = Timers(
        config.logging.timing_log_level,
        config.logging.timing_log_option,
        synchronize=here.synchronize,
        barrier=lambda: collectives.barrier(ps.control_group),
    )
    # The last thing that may be refused: from here on the run's ends are recorded, and the folder given free. Gathered,
    # as a broadcast would not wait for the others, who would lose a first rank that ends.
    claimed = folder.claim(env, say) if ps.is_first_rank else None
    folder.adopt(host_data.all_gather_json(claimed, ps.control_group)[0])
    session = Session(config, env, here, ps, timers, watchdog, tokenizer, folder, started_at)
    if raised is not None:
        session.print_rank_0(raised)
    session.print_rank_0(
        metrics.threads_line(threads, device.available_cores(), env.local_world_size, said_by=threads_by)
    )
    session.print_rank_0(metrics.padded_vocab_line(tokenizer.vocab_size, config.model.padded_vocab_size or 0))
    return session


def _set_threads(config: Config, env: LaunchEnv) -> tuple[int, str | None]:
    """The threads that this rank computes with, and who has said so: None where ranks share the cores."""
    asked, said_by = config.training.threads_per_rank, "--threads-per-rank"
    if asked is None:
        asked, said_by = env.threads_of_user, "OMP_NUM_THREADS"
    threads = device.set_threads(env.local_world_size, threads=asked)
    return threads, said_by if asked is not None else None


def _store_of_equals(
    config: Config, env: LaunchEnv, here: Device, timeout: datetime.timedelta
) -> torch.distributed.Store:
    """The store, once all ranks have come there and were started alike: different flags make different groups, and
    ranks would wait for each other in them."""
    store = open_store(env, timeout)
    if env.world_size > 1:
        meeting = Meeting(store, env.rank, env.world_size, timeout, hosts=hosts_store(env))
        flags = {**config.flat(), **config.extra}
        compare_across_ranks(meeting, flags, backend=here.backend, torch_version=torch.__version__)
    return store


def _seed(seed: int, ps: ParallelState) -> None:
    """Python, NumPy and torch, for user code: the model's own randomness is keyed by name and by sample.

    seed + 100 * pipeline rank, as Megatron.
    """
    value = seed + 100 * ps.pp_rank
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _with_limit(config: Config, ps: ParallelState) -> Config:
    """With what --rank-memory-limit decides on. Communicates over the world where it is a share of the device's memory.
    Raises ConfigurationError."""
    if config.parallel.rank_memory_limit == "auto":
        totals = host_data.all_gather_json(ps.device.total_bytes(), ps.control_group)
        config = config.replace(rank_memory_limit=int(_OF_DEVICE * min(totals)))
    try:
        return config.chosen()
    except (StageLayersError, PlanError) as error:
        fix = "raise it, use smaller microbatches or more recomputation, or more ranks"
        raise ConfigurationError(
            [Problem("rank-memory-limit", ("--rank-memory-limit",), str(error), fix)]
        ) from None


def _with_vocabulary(config: Config, tokenizer: Tokenizer, ps: ParallelState) -> Config:
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
            config = with_saved_vocabulary(config, saved)
    if config.model.padded_vocab_size is None:
        padded = padded_vocabulary(
            tokenizer.vocab_size,
            config.model.make_vocab_size_divisible_by,
            config.parallel.tensor_model_parallel_size,
        )
        return config.replace(padded_vocab_size=padded)
    check_holds_tokenizer(config, tokenizer.vocab_size)
    return config
