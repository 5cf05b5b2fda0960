"""The only reader of environment variables (floor 0)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from megatron.core.config_base import RANKS

_MAX_DIGITS = 40


class LaunchEnvError(ValueError):
    """A launcher's variable that is missing or makes no sense."""


@dataclasses.dataclass(frozen=True)
class LaunchEnv:
    """What the launcher (torchrun) says about this process, and the few variables that change what we do.

    launched: a launcher set RANK and WORLD_SIZE; otherwise this is a world of one.
    restart_count: torchrun's in-place restarts so far (0 on the first attempt).
    """

    launched: bool = False
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    restart_count: int = 0
    max_restarts: int = 0
    run_id: str | None = None
    shutdown_timeout_s: int = 30
    cuda_visible_devices: str | None = None
    cuda_device_max_connections: int | None = None
    cublas_workspace_config: str | None = None
    nccl_algo: str | None = None
    slurm_job_id: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnv:
        """From `environ`, by default the process's. Raises LaunchEnvError naming the variable."""
        source = os.environ if environ is None else environ
        launched = "RANK" in source and "WORLD_SIZE" in source
        world_size = _integer(source, "WORLD_SIZE", 1) if launched else 1
        env = cls(
            launched=launched,
            rank=_integer(source, "RANK", 0) if launched else 0,
            world_size=world_size,
            local_rank=_integer(source, "LOCAL_RANK", 0) if launched else 0,
            local_world_size=_integer(source, "LOCAL_WORLD_SIZE", world_size) if launched else 1,
            node_rank=_integer(source, "GROUP_RANK", 0) if launched else 0,
            master_addr=source.get("MASTER_ADDR", "localhost"),
            master_port=_optional_integer(source, "MASTER_PORT"),
            restart_count=_integer(source, "TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_integer(source, "TORCHELASTIC_MAX_RESTARTS", 0),
            run_id=source.get("TORCHELASTIC_RUN_ID"),
            shutdown_timeout_s=_integer(source, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30),
            cuda_visible_devices=source.get("CUDA_VISIBLE_DEVICES"),
            cuda_device_max_connections=_optional_integer(source, "CUDA_DEVICE_MAX_CONNECTIONS"),
            cublas_workspace_config=source.get("CUBLAS_WORKSPACE_CONFIG"),
            nccl_algo=source.get("NCCL_ALGO"),
            slurm_job_id=source.get("SLURM_JOB_ID"),
        )
        if not 0 <= env.rank < env.world_size or not 0 <= env.local_rank < env.local_world_size:
            raise LaunchEnvError(
                f"RANK={env.rank} of WORLD_SIZE={env.world_size}, LOCAL_RANK={env.local_rank} of "
                f"LOCAL_WORLD_SIZE={env.local_world_size}: start the processes with torchrun"
            )
        if not RANKS.hold(env.world_size):
            raise LaunchEnvError(f"WORLD_SIZE={env.world_size}: at most {RANKS.most} ranks are possible")
        return env

    @staticmethod
    def memory_bytes() -> int:
        """Memory of this machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def gpu_present(self, dev: Path = Path("/dev")) -> bool:
        """Whether this machine shows a GPU, judged without torch: device files and CUDA_VISIBLE_DEVICES."""
        if self.cuda_visible_devices is not None and self.cuda_visible_devices.strip() in ("", "-1"):
            return False
        return any(path.name[6:].isdigit() for path in dev.glob("nvidia*")) or (dev / "dxg").exists()


def _integer(source: Mapping[str, str], name: str, default: int) -> int:
    value = _optional_integer(source, name)
    return default if value is None else value


def _optional_integer(source: Mapping[str, str], name: str) -> int | None:
    text = source.get(name, "").strip()
    if not text:
        return None
    try:
        if len(text) > _MAX_DIGITS:
            raise ValueError
        return int(text)
    except ValueError:
        raise LaunchEnvError(f"environment variable {name}={text[:_MAX_DIGITS]!r} is no integer") from None
