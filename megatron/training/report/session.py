"""What all parts of a run share: configuration, ranks, device, timers, watchdog, tokenizer and output folder, as
`run/session.py` builds them."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.device import Device
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport import host_data, parallel_state
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard import console
from megatron.training.guard.console import say
from megatron.training.guard.run_folder import OutputPathError, RunFolder
from megatron.training.guard.watchdog import Watchdog
from megatron.training.planner import Planner
from megatron.training.report.timers import Timers


@dataclasses.dataclass
class Session:
    """The surroundings of a run. `config` is complete: the padded vocabulary is known. undescribed: why nobody knows
    before a step what the model takes, though somebody asks."""

    config: Config
    env: LaunchEnv
    device: Device
    ps: ParallelState
    timers: Timers
    watchdog: Watchdog
    tokenizer: Tokenizer
    folder: RunFolder
    started_at: float
    planner: Planner
    undescribed: str = ""

    def settings(self) -> dict[str, Any]:
        """Every setting under its destination name, with what the planner has decided."""
        return dataclasses.replace(self.config, ddp=self.planner.sharded(self.config.ddp)).flat()

    def print_rank_0(self, *texts: str, brief: str | None = None) -> None:
        """Each text on a line of its own. brief: what a terminal shows in the place of all of them."""
        if texts and self.ps.is_first_rank:
            say("\n".join(texts), brief)

    def print_rank_last(self, *texts: str, brief: str | None = None) -> None:
        if texts and self.ps.is_last_rank:
            say("\n".join(texts), brief)

    def open_log(self) -> None:
        """On a terminal: from now on the run's folder has a file of what a pipe would get. Raises OutputPathError."""
        assert self.folder.path is not None, "a run without a folder"
        try:
            log = console.open_log(self.folder.path)
        except OSError as error:
            raise OutputPathError(
                f"{error.filename}: {error.strerror}: name another folder in --save"
            ) from error
        if log is not None:
            self.print_rank_last(f" > log: {log}, every line in full")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's plain value, of those that are there. Communicates over the world."""
        return [value] if self.ps.is_fake else host_data.all_gather_json(value, self.ps.control_group)

    def close(self) -> None:
        """Leave the world together with all other ranks."""
        self.watchdog.close()
        parallel_state.destroy_process_group(self.ps)
        self.folder.release()
