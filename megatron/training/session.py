"""What a run holds from its first collective to its last: ranks, device, clocks, watchers; made by `initialize`."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import random
import sys
import time
from typing import Any

import numpy as np
import torch

from megatron.core import collectives, device, host_data, parallel_state
from megatron.core.device import Device
from megatron.core.models.gpt.parameter_count import padded_vocabulary
from megatron.core.parallel_state import ParallelState
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training import metrics
from megatron.training.config import Config
from megatron.training.launch_env import LaunchEnv
from megatron.training.run_folder import RunFolder
from megatron.training.saved_vocabulary import (
    check_holds_tokenizer,
    saved_padded_vocabulary,
    with_saved_vocabulary,
)
from megatron.training.startup_check import compare_across_ranks
from megatron.training.timers import Timers
from megatron.training.watchdog import Watchdog


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


def say(text: str) -> None:
    """Print a line in one write: `print` makes two when output is unbuffered, and ranks share one pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def initialize(config: Config, env: LaunchEnv, folder: RunFolder) -> Session:
    """Threads, device, ranks, the comparison between ranks, seeds, tokenizer, the run's folder: all before the model.

    Raises ValueError for the user's mistakes, StartupMismatchError on every rank when ranks were started differently,
    LeaseError on every rank when another run holds --save, PeerLostError. Communicates over the world.
    """
    started_at = time.monotonic()
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)
    threads = device.set_threads(env.local_world_size, threads=config.training.threads_per_rank)
    here = device.current_device(
        env.local_rank, kind="cpu" if config.parallel.distributed_backend == "gloo" else None
    )
    here.allow_tf32(config.optimizer.allow_tf32)
    if config.training.deterministic_mode:  # the call alone imports the compiler: 0.6 s
        torch.use_deterministic_algorithms(True)
    timeout = datetime.timedelta(minutes=config.reliability.distributed_timeout_minutes)
    grid = config.grid()
    store = parallel_state.init_process_group(
        here, rank=env.rank, world_size=env.world_size, timeout=timeout, attempt=env.restart_count
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
    compare_across_ranks(
        lambda value: host_data.all_gather_json(value, ps.control_group),
        {**config.flat(), **config.extra},
        torch_version=torch.__version__,
    )
    _seed(config.training.seed, ps)
    tokenizer = _tokenizer(config)
    config = _with_vocabulary(config, tokenizer, ps)
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
    session.print_rank_0(metrics.threads_line(threads, device.available_cores(), env.local_world_size))
    session.print_rank_0(metrics.padded_vocab_line(tokenizer.vocab_size, config.model.padded_vocab_size or 0))
    return session


def _seed(seed: int, ps: ParallelState) -> None:
    """Python, NumPy and torch, for user code: the model's own randomness is keyed by name and by sample.

    seed + 100 * pipeline rank, as Megatron.
    """
    value = seed + 100 * ps.pp_rank
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _tokenizer(config: Config) -> Tokenizer:
    flags = config.tokenizer
    assert flags.tokenizer_type is not None, "the rules ask for --tokenizer-type"
    return build_from_config(flags)


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
