"""`--rank-memory-limit` of tools/show_schedule.py: what is chosen under it, for a model by the trainer's flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from megatron.core.distributed.sharding import ShardPlace, residency_of, sharding_of
from megatron.core.models.gpt.stage_costs import DTYPE_BYTES
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.joint import named
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.rank_budget import RankBudget
from megatron.core.pipeline_parallel.plan.residency import LaneCosts
from megatron.core.pipeline_parallel.plan.schedules import AUTO
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import Purpose, plan_for
from megatron.core.pipeline_parallel.plan.verify_residency import verify_residency
from megatron.training.arguments import parse_config
from megatron.training.command_line import read_command_line
from megatron.training.config import Config
from megatron.training.launch_env import LaunchEnv
from megatron.training.problems import ConfigurationError
from megatron.training.state_bytes import state_bytes
from tools.schedule_flags import names_of
from tools.schedule_residency import Shown

_TRIED = ("optim", "optim_grads", "optim_grads_params")
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_TFLOPS, _GB_PER_S = 450.0, 45.0  # of a GPU while it computes, and of its wire to data parallel peers
_OTHER_LIMITS = (  # of one kind, which one limit of all replaces; of the tool and of the trainer
    "--memory-limit",
    "--fsdp-memory-budget",
    "--pipeline-memory-limit",
    "--zero-bubble-max-pending-backward",
    "--zero-bubble-adaptive-memory-limit-percentile",
)
_OTHER_COSTS = tuple(
    "--time-f --time-b --time-w --time-comm --time-gather --memory-after-b --layer-bytes --fsdp-reshard-policy".split()
)
_OTHER_PAGES = ("--measured", "--iteration", "--pictures")


def check(args: argparse.Namespace) -> None:
    """Raises PlanError naming the flags that do not go together."""
    limit = "--rank-memory-limit"
    given = {word.partition("=")[0] for word in args.words}
    for others, why in (
        (_OTHER_LIMITS, "limits a part of what it limits in all"),
        (_OTHER_COSTS, "describes what follows from the model's flags"),
        (_OTHER_PAGES, "is of plans without it"),
    ):
        if found := [one for one in others if one in given]:
            raise PlanError(f"{found[0]} with {limit}: {found[0]} {why}; leave one of the two out")
    if args.data_parallel_size is None or args.data_parallel_size < 2:
        raise PlanError(f"{limit} takes --data-parallel-size N, of 2 or more: ranks that share each stage")
    if len(names_of(args)) != 1 or args.stages is None or args.microbatches is None:
        raise PlanError(f"{limit} takes --stages, --microbatches and one --schedule, {AUTO} or by name")
    if args.format not in ("text", "json"):
        raise PlanError(f"{limit} with --format {args.format}: use text or json, or --html")


def chosen(args: argparse.Namespace) -> tuple[str, Shown, list[str]]:
    """Name and plan of what takes least, on a clock of seconds, and a line a candidate. args.model_words: the trainer's flags.
    Raises PlanError where these describe no model, or where nothing fits the limit."""
    config = _config(args)
    costs = config.model_costs
    if costs is None:
        raise PlanError(
            "--rank-memory-limit takes a model by the trainer's flags: --num-layers, --hidden-size, "
            "--num-attention-heads, --seq-length, --vocab-size"
        )
    tflops = config.parallel.achieved_tflops or _TFLOPS
    gb_per_s = config.parallel.dp_bandwidth_gb_per_s or _GB_PER_S
    strategy = args.data_parallel_sharding_strategy or AUTO
    budget = _budget(args, config, _TRIED if strategy == AUTO else (strategy,), tflops, gb_per_s)
    parallel = dataclasses.replace(config.parallel, pipeline_schedule=names_of(args)[0])
    model = dataclasses.replace(
        config.staged_model, parallel=parallel, num_microbatches=args.microbatches, budget=budget
    )
    try:
        spec = model.asked()
        plan = plan_for(spec, args.microbatches, Purpose.TRAIN)
    except StageLayersError as error:
        raise PlanError(str(error)) from None
    assert spec.stages_units is not None, spec.schedule
    assert spec.residency is not None, spec.schedule
    unit, by_layer = costs.layer().f / budget.flops, spec.costs
    seconds = dataclasses.replace(
        by_layer,
        **{name: tuple(unit * one for one in getattr(by_layer, name)) for name in ("f", "b", "w")},
        comm=unit * by_layer.comm,
    )
    lanes = Lanes(spec.stages_units, spec.residency, LaneCosts(bandwidth=budget.bytes_per_s))
    walks = verify_residency(plan, spec.stages_units, spec.residency, spec.costs)
    head = f"{tflops:g} TFLOP/s, {gb_per_s:g} GB/s to data parallel peers: F of a layer takes {1e3 * unit:.4g} ms"
    shown = Shown(simulate(plan, seconds, lanes), spec.residency, spec.stages_units, walks, "bytes")
    return named(spec), shown, [head, *spec.reasons]


def _config(args: argparse.Namespace) -> Config:
    """As a run would have it on GPUs, of any length. Raises PlanError with what is wrong."""
    words = [*("--micro-batch-size 1 --train-iters 1 --lr 1".split()), *args.model_words]
    words += ["--pipeline-model-parallel-size", str(args.stages)]
    for flag, value in (
        ("--num-layers", args.num_layers),
        ("--num-virtual-stages-per-pipeline-rank", args.chunks),
        ("--microbatch-group-size-per-virtual-pipeline-stage", args.group_size),
    ):
        words += [] if value is None else [flag, str(value)]
    tensor_ranks = read_command_line(words).values.get("tensor_model_parallel_size", 1)
    world = LaunchEnv(world_size=args.stages * args.data_parallel_size * tensor_ranks)
    try:
        return parse_config(words, env=world, needs_data=False).replace(distributed_backend="nccl")
    except ConfigurationError as error:
        raise PlanError("; ".join(f"{one.message}: {one.fix}" for one in error.problems)) from None


def _budget(
    args: argparse.Namespace, config: Config, strategies: Sequence[str], tflops: float, gb_per_s: float
) -> RankBudget:
    place = ShardPlace(inner_size=args.data_parallel_size)
    dtype = config.params_dtype
    rows = []
    for strategy in strategies:
        sharding = sharding_of(strategy)
        asked = residency_of(
            config.ddp,
            sharding,
            place,
            args.stages,
            element_bytes=DTYPE_BYTES[dtype],
            limit=args.rank_memory_limit,
        )
        rows.append((asked, state_bytes(config.ddp, sharding, place, _DTYPES[dtype])))
    return RankBudget(tuple(rows), flops=1e12 * tflops, bytes_per_s=1e9 * gb_per_s)
