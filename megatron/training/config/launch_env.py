"""The only reader of environment variables (floor 0)."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import machine
from megatron.core.config_base import RANKS, THREADS

LAUNCH_RECORD = "MEGATRON_ZERO_LAUNCH_RECORD"
_MAX_DIGITS = 40


class LaunchEnvError(ValueError):
    """A launcher's variable that is missing or makes no sense."""


@dataclasses.dataclass(frozen=True)
class LaunchEnv:
    """What the launcher (torchrun) says about this process, and the few variables that change what we do.

    restart_count: torchrun's in-place restarts so far (0 on the first attempt). agent_store: torchrun hosts the store
    at MASTER_ADDR:MASTER_PORT; otherwise rank 0 does. launcher_pid: of torchrun, which lives as long as its ranks; None
    where the parent may end before them (srun, mpirun, a shell). error_file: where torchrun looks for the words of a
    rank that has failed. launch_record: the folder in which `megatron-zero launch` looks for exit records, one of each
    attempt. faked: rank and size of a world of which this process is the only one that is there, see `alone`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "localhost"
    master_port: int | None = None
    restart_count: int = 0
    agent_store: bool = False
    use_libuv: bool = True
    run_id: str | None = None
    launcher_pid: int | None = None
    cuda_visible_devices: str | None = None
    cublas_workspace_config: str | None = None
    nccl_algo: str | None = None
    slurm_job_id: str | None = None
    omp_num_threads: int | None = None
    error_file: str | None = None
    launch_record: str | None = None
    faked: tuple[int, int] | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnv:
        """From `environ`, by default the process's. Raises LaunchEnvError naming the variable."""
        source = os.environ if environ is None else environ
        launched = "RANK" in source or "WORLD_SIZE" in source
        of_launcher = source if launched else {"WORLD_SIZE": "1", "RANK": "0"}
        place = {name: _integer(of_launcher, name) for name in ("WORLD_SIZE", "RANK")}
        if missing := [name for name, value in place.items() if value is None]:
            raise LaunchEnvError(
                f"{missing[0]} is not set, or empty: a launcher sets RANK and WORLD_SIZE together; start the "
                "processes with torchrun, or unset both for a single process (--fake-process-group takes both)"
            )
        env = cls(
            rank=place["RANK"],
            world_size=place["WORLD_SIZE"],
            local_rank=_integer(of_launcher, "LOCAL_RANK", 0),
            local_world_size=_integer(of_launcher, "LOCAL_WORLD_SIZE", place["WORLD_SIZE"]),
            master_addr=source.get("MASTER_ADDR", "localhost").strip(),
            master_port=_integer(source, "MASTER_PORT"),
            restart_count=_integer(source, "TORCHELASTIC_RESTART_COUNT", 0),
            agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            use_libuv=source.get("USE_LIBUV", "1") == "1",
            run_id=source.get("TORCHELASTIC_RUN_ID"),
            launcher_pid=_parent_of(os.getpid()) if "TORCHELASTIC_RUN_ID" in source else None,
            cuda_visible_devices=source.get("CUDA_VISIBLE_DEVICES"),
            cublas_workspace_config=source.get("CUBLAS_WORKSPACE_CONFIG"),
            nccl_algo=source.get("NCCL_ALGO"),
            slurm_job_id=source.get("SLURM_JOB_ID"),
            omp_num_threads=_omp_num_threads(source),
            error_file=source.get("TORCHELASTIC_ERROR_FILE"),
            launch_record=source.get(LAUNCH_RECORD),
        )
        if env.world_size > RANKS.most:
            raise LaunchEnvError(f"WORLD_SIZE={env.world_size}: at most {RANKS.most} ranks are possible")
        if not 0 <= env.rank < env.world_size or not 0 <= env.local_rank < env.local_world_size:
            raise LaunchEnvError(
                f"RANK={env.rank} of WORLD_SIZE={env.world_size}, LOCAL_RANK={env.local_rank} of "
                f"LOCAL_WORLD_SIZE={env.local_world_size}: ranks are 0 to below the size; start the processes with "
                "torchrun, or one by itself with --fake-process-group"
            )
        return env

    def alone(self) -> LaunchEnv:
        """--fake-process-group: the variables name a rank whose place this process takes, which has no launcher. Raises
        LaunchEnvError."""
        if self.local_rank and self.run_id is None:  # under torchrun that is what is wrong
            raise LaunchEnvError(
                f"LOCAL_RANK={self.local_rank} with --fake-process-group, which is one process on the first device "
                "that it sees: CUDA_VISIBLE_DEVICES says which that is"
            )
        place = self.rank, self.world_size
        return dataclasses.replace(self, rank=0, world_size=1, local_world_size=1, faked=place)

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of the world that is trained in."""
        return self.faked or (self.rank, self.world_size)

    @property
    def record_of_attempt(self) -> str | None:
        """The folder for a second copy of exit.json; None where no launcher of ours reads it."""
        return (
            None if self.launch_record is None else os.path.join(self.launch_record, str(self.restart_count))
        )

    def check_meeting_place(self) -> None:
        """Raises LaunchEnvError where MASTER_ADDR and MASTER_PORT cannot name one, and there is somebody to meet."""
        if self.world_size == 1:
            return
        if not self.master_addr:
            raise LaunchEnvError("MASTER_ADDR is empty: it names the host of rank 0, where all ranks meet")
        if self.master_port is None or not 1 <= self.master_port <= 65535:
            found = " is not set, or empty" if self.master_port is None else f"={self.master_port}"
            raise LaunchEnvError(
                f"MASTER_PORT{found}: expected a free port of the host of rank 0, 1 to 65535, where all ranks meet"
            )

    @property
    def threads_of_user(self) -> int | None:
        """What the user says in OMP_NUM_THREADS. None where nothing is said, and where torchrun says 1: it does so
        unasked for more than one rank a machine, and a user's 1 cannot be told from that."""
        unasked = self.run_id is not None and self.local_world_size > 1 and self.omp_num_threads == 1
        return None if unasked else self.omp_num_threads

    @staticmethod
    def memory_bytes() -> int:
        """Memory of this machine, or what this process's control groups may have of it."""
        return machine.total_bytes()

    def ranks_here(self, world_size: int | None) -> int:
        """Ranks that share this host, in a launch of `world_size` that is only checked: as many as the launcher has
        started here; without one, all of them."""
        return self.local_world_size if self.world_size > 1 or world_size is None else world_size

    def gpu_present(self, dev: Path = Path("/dev")) -> bool:
        """Whether this machine shows a GPU, judged without torch: device files and CUDA_VISIBLE_DEVICES."""
        if self.cuda_visible_devices is not None and self.cuda_visible_devices.strip() in ("", "-1"):
            return False
        return any(path.name[6:].isdigit() for path in dev.glob("nvidia*")) or (dev / "dxg").exists()


def terminal_is_dumb() -> bool:
    """Whether TERM says that what is written stays as it is."""
    return os.environ.get("TERM", "") in ("", "dumb")


def colour_is_unwanted() -> bool:
    """Whether NO_COLOR is set, and not empty."""
    return bool(os.environ.get("NO_COLOR"))


@functools.cache
def _parent_of(pid: int) -> int:
    """Of this process, as first asked: before torch is imported, which takes seconds in which a launcher may die."""
    assert pid == os.getpid(), f"pid {pid} is not this process, {os.getpid()}"
    return os.getppid()


def _omp_num_threads(source: Mapping[str, str]) -> int | None:
    """OpenMP's variable may be a list, a number for each level of nesting: the first one counts."""
    text = source.get("OMP_NUM_THREADS", "").strip()
    first = text.partition(",")[0].strip()
    if text and (not first.isdecimal() or len(first) > 4 or not THREADS.hold(int(first))):
        raise LaunchEnvError(f"OMP_NUM_THREADS={text!r}: expected a number of threads, 1 to {THREADS.most}")
    return int(first) if text else None


def _integer(source: Mapping[str, str], name: str, default: int | None = None) -> Any:
    """A variable that may be missing, or empty. Raises LaunchEnvError."""
    text = source.get(name, "").strip()
    try:
        if len(text) > _MAX_DIGITS:
            raise ValueError
        return int(text) if text else default
    except ValueError:
        raise LaunchEnvError(f"environment variable {name}={text[:_MAX_DIGITS]!r} is no integer") from None
