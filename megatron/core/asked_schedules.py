"""Flags that ask for a pipeline schedule in other words than its name (floor 0)."""

from __future__ import annotations

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.schedules import AUTO

V_BY_MEMORY = {"zb": "zbv", "half": "v-half", "min": "v-min"}


def asked_schedules(parallel: ModelParallelConfig) -> dict[str, str]:
    """Flags that name a schedule in other words than --pipeline-schedule -> its name."""
    asked = {}
    if parallel.zero_bubble_v_schedule:
        asked["--zero-bubble-v-schedule"] = V_BY_MEMORY[parallel.zero_bubble_v_schedule_mem_setup]
    elif parallel.enable_zero_bubble:
        pending = parallel.zero_bubble_max_pending_backward
        twice = pending is not None and pending >= 2 * parallel.pipeline_model_parallel_size
        asked["--enable-zero-bubble"] = "zb-2p" if twice else "zb-1p"
    if parallel.enable_1f1b_v:
        asked["--enable-1f1b-v"] = "1f1b-v"
    if parallel.interleave_group_size > 0:
        asked["--interleave-group-size"] = "gis"
    return asked


def describe_schedule(parallel: ModelParallelConfig, runs: str | None = None) -> str:
    """The flag that asks for the schedule. runs: what is run, for flags that leave that to a choice or to a file."""
    name = parallel.pipeline_schedule
    if parallel.pipeline_schedule_file is not None:
        told = f"--pipeline-schedule-file {parallel.pipeline_schedule_file}"
        return told if runs is None else f"{told} (schedule {runs})"
    for flag, asked in asked_schedules(parallel).items():
        if asked == name:
            return f"{flag} (schedule {name})"
    told = f"--pipeline-schedule {name}"
    return f"{told} (which has chosen {runs})" if name == AUTO and runs is not None else told
