"""From flags to the schedule of a run: its stages, what they cost, what ranks may hold of them (floor 0).

`Config.schedule_spec` is the answer, and is made once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.stage_costs import ModelCosts
from megatron.core.models.gpt.stage_schedule import StagedModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.plan_file import load_plan
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec

if TYPE_CHECKING:
    from megatron.training.config import Config

V_BY_MEMORY = {"zb": "zbv", "half": "v-half", "min": "v-min"}

# [Note: size of plans] A plan is a list of operations that Python makes and checks before the first step: some
# microseconds and half a kilobyte for each forward. A search weighs its candidates too, in a time that grows faster.
MOST_FORWARDS = 2**18
MOST_SEARCHED_FORWARDS = 2**16


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


def told_schedule(config: Config, runs: str | None = None) -> str:
    """The flag that asks for the schedule. runs: what is run, for flags that leave that to a choice or to a file."""
    parallel, name = config.parallel, config.parallel.pipeline_schedule
    if parallel.pipeline_schedule_file is not None:
        told = f"--pipeline-schedule-file {parallel.pipeline_schedule_file}"
        return told if runs is None else f"{told} (schedule {runs})"
    for flag, asked in asked_schedules(parallel).items():
        if asked == name:
            return f"{flag} (schedule {name})"
    told = f"--pipeline-schedule {name}"
    return f"{told} (which has chosen {runs})" if name == AUTO and runs is not None else told


def last_num_microbatches(config: Config) -> int:
    """Of one step after the ramp; one a pipeline rank where the flags make no batch, which rules tell."""
    schedule = config.batch_schedule_or_none()
    if schedule is None:
        return max(1, config.parallel.pipeline_model_parallel_size)
    return schedule.num_microbatches(schedule.rampup[2] + 1 if schedule.rampup is not None else 0)


def size_fault(config: Config, num_stages: int) -> str | None:
    """Why a step has more forwards than a plan holds; None where it has not. num_stages: of the flags, `auto` looks at
    V's too."""
    schedule, ranks = config.parallel.pipeline_schedule, config.parallel.pipeline_model_parallel_size
    if schedule == AUTO and ranks > 1:
        num_stages = max(num_stages, ranks * max(row.chunks for row in SCHEDULES.values()))
    searched = schedule == AUTO or (schedule in SCHEDULES and SCHEDULES[schedule].searched)
    most = MOST_SEARCHED_FORWARDS if searched else MOST_FORWARDS
    microbatches = last_num_microbatches(config)
    if microbatches * num_stages <= most:
        return None
    return (
        f"--global-batch-size {config.training.global_batch_size} is {microbatches} microbatches a step on each "
        f"replica, through {num_stages} stages {microbatches * num_stages} forwards; a plan of schedule {schedule} "
        f"holds at most {most}"
    )


def schedule_spec(config: Config) -> ScheduleSpec:
    """What every rank of the pipeline does in a step, by the flags.

    Raises StageLayersError where layers do not divide over stages, PlanError where --pipeline-schedule-file is no plan
    for these ranks, where a step is too large for a plan, or where `auto` finds nothing.
    """
    parallel, model = config.parallel, staged_model(config)
    ranks, count = parallel.pipeline_model_parallel_size, last_num_microbatches(config)
    if parallel.pipeline_schedule_file is not None:
        validates = parallel.enable_optimizer_post_validation
        file = load_plan(parallel.pipeline_schedule_file, ranks, post_validation=validates)
        spec = dataclasses.replace(model.spec(file.plan.schedule, file.plan.placement), file=file)
    else:
        named = None if parallel.pipeline_schedule == AUTO else model.spec(parallel.pipeline_schedule)
        fault = size_fault(config, ranks if named is None else named.placement.num_stages)
        if fault is not None:
            raise PlanError(fault)
        spec = named or model.fastest(count)
    if parallel.pipeline_memory_limit is not None:
        spec = model.with_gathered_inputs(spec, count)
    return dataclasses.replace(spec, masked=config.data.reset_attention_mask)


def staged_model(config: Config) -> StagedModel:
    """The model as stages see it."""
    num_layers = config.model.num_layers
    assert num_layers is not None, "the rules ask for --num-layers"
    return StagedModel(config.parallel, num_layers, model_costs(config))


def model_costs(config: Config) -> ModelCosts | None:
    """What costs are estimated from; None where the configuration is not complete, which rules tell."""
    model, batch = config.model, config.training.micro_batch_size
    vocabulary, tp = model.padded_vocab_size, config.parallel.tensor_model_parallel_size
    heads = (model.num_attention_heads, model.kv_channels, model.num_query_groups)
    sizes = (model.hidden_size, model.ffn_hidden_size, *heads, model.seq_length, tp)
    if vocabulary is None or batch is None or any(n is None or n < 1 for n in (*sizes, vocabulary, batch)):
        return None
    on_gpus = config.parallel.distributed_backend == "nccl"
    return ModelCosts(
        model, vocabulary, batch, config.params_dtype, tp, config.parallel.sequence_parallel, on_gpus
    )
