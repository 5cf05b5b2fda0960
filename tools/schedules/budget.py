"""`--rank-memory-limit` of tools/show_schedule.py: what is chosen under it, for a model by the trainer's flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.plan.budget_search import named
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.held.verify_residency import verify_residency
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.words import scaled, time_text
from megatron.training.config.command_line import read_command_line
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.rule_table import spelled
from megatron.training.config.rules import plan_problems
from megatron.training.run.arguments import parse_config
from tools.schedules.flags import names_of
from tools.schedules.residency import Shown

_NOT_BESIDE_IT = tuple(  # other limits, costs and units than the model's, pages of other plans
    "--memory-limit --fsdp-memory-budget --fsdp-reshard-policy --time-f --time-b --time-w --time-comm --time-gather "
    "--memory-after-b --layer-bytes --measured --iteration --pictures".split()
)


class _OnGpus(LaunchEnv):
    """What is planned for, whatever this machine has."""

    def gpu_present(self, dev: Path = Path("/dev")) -> bool:
        return True


def check(args: argparse.Namespace) -> None:
    """Raises PlanError naming the flags that do not go together, or that are missing."""
    limit = "--rank-memory-limit"
    given = {word.partition("=")[0] for word in args.words}
    if found := [one for one in _NOT_BESIDE_IT if one in given]:
        raise PlanError(
            f"{limit} with {', '.join(found)}: it is of all that a rank holds, of the model's own costs"
        )
    if args.data_parallel_size is None or args.data_parallel_size < 2:
        raise PlanError(f"{limit} takes --data-parallel-size N, 2 or more: ranks that share each stage")
    if len(names_of(args)) != 1 or args.stages is None or args.microbatches is None:
        raise PlanError(f"{limit} takes --stages, --microbatches and one --schedule, {AUTO} or by name")
    if args.format not in ("text", "json", "html"):
        raise PlanError(f"{limit} with --format {args.format}: use text, json or html")


def chosen(args: argparse.Namespace) -> tuple[str, Shown, list[str]]:
    """Name and plan of what takes least, on a clock of seconds, and a line a candidate. args.model_words: the trainer's
    flags. Raises PlanError where these describe no model, or where nothing fits the limit."""
    config = _config(args)
    if config.is_complete:
        try:
            from megatron.training.run.describe import described
        except ModuleNotFoundError as error:
            raise PlanError(
                f"--rank-memory-limit describes the model by building it, without memory, and {error.name} is not "
                "there: pip install torch"
            ) from error
        config = described(config)
    costs, budget = config.model_costs, config.rank_budget
    if costs is None or budget is None:
        raise PlanError(
            "--rank-memory-limit takes a model by the trainer's flags: --num-layers, --hidden-size, "
            "--num-attention-heads, --seq-length, --vocab-size"
        )
    if problems := plan_problems(config, LaunchEnv()):
        raise _wrong(problems)
    spec = config.planner().spec
    assert spec.stages_units is not None, spec.schedule
    assert spec.residency is not None, spec.schedule
    plan = plan_for(spec, args.microbatches, PlanPurpose.TRAIN)
    unit = costs.unit_flops / budget.flops  # seconds
    times = {name: tuple(unit * one for one in getattr(spec.costs, name)) for name in ("f", "b", "w")}
    seconds = dataclasses.replace(spec.costs, **times, comm=unit * spec.costs.comm)
    lanes = spec.with_lanes(LaneCosts(bandwidth=budget.bytes_per_s))
    walks = verify_residency(plan, spec.stages_units, spec.residency, spec.costs)
    head = (
        f"{scaled(budget.flops, 'FLOP/s')} and {scaled(budget.bytes_per_s, 'B/s')} to data parallel peers: "
    )
    shown = Shown(simulate(plan, seconds, lanes), spec.residency, spec.stages_units, walks, "bytes")
    return named(spec), shown, [f"{head}F of a layer takes {time_text(unit)}", *spec.reasons]


def _config(args: argparse.Namespace) -> Config:
    """As a run would have it. Raises PlanError with all that is wrong."""
    strategy, name = args.data_parallel_sharding_strategy or AUTO, names_of(args)[0]
    row = SCHEDULES.get(name)  # it says which flag is of its groups
    group = (row and row.group_size) or "microbatch_group_size_per_vp_stage"
    words = ["--use-distributed-optimizer" if strategy == "optim" else "--use-custom-fsdp", "--lr", "1"]
    words += ["--micro-batch-size", "1", "--train-iters", "1", *args.model_words]
    line = read_command_line(words)
    if line.problems:  # before a plan is searched for what is left
        raise _wrong(line.problems)
    said = line.values
    batch = said["micro_batch_size"] * args.microbatches * args.data_parallel_size
    for flag, value in (
        ("--rank-memory-limit", args.rank_memory_limit),
        ("--data-parallel-sharding-strategy", strategy),
        ("--pipeline-schedule", name),
        ("--pipeline-model-parallel-size", args.stages),
        ("--num-layers", args.num_layers),
        ("--global-batch-size", batch),
        ("--num-virtual-stages-per-pipeline-rank", args.chunks),
        (spelled(group), args.group_size),
    ):
        words += [] if value is None else [flag, str(value)]
    world = args.stages * args.data_parallel_size * said.get("tensor_model_parallel_size", 1)
    try:
        return parse_config(words, env=_OnGpus(world_size=world), needs_data=False)
    except ConfigurationError as error:
        raise _wrong(error.problems) from None


def _wrong(problems: Sequence[Problem]) -> PlanError:
    return PlanError("; ".join(f"{one.message}: {one.fix}" for one in problems))
