"""The flags of tools/show_schedule.py, what they say of costs, limits and requests, and what does not go by them."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from megatron.core.parallelism_config import bytes_of
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import MeasuredStep
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import LOOPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import POLICIES
from megatron.core.pipeline_parallel.plan.schedules import AUTO, MOST_FORWARDS, SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import Simulation, over_limit
from megatron.core.sharding_table import STRATEGIES
from megatron.core.words import plain
from tools.flags import add_flags, script_parser
from tools.schedules.held_over_time import size_of

ALL = "all"
# Beyond these a float's range leaves no room for sums, and for scaling them to columns, pixels or microseconds.
SMALLEST, LARGEST = 1e-150, 1e150


def numbers(text: str) -> list[float]:
    """`1.5` or `1,2,1`, each finite, 0 or more (T_W = 0 is a case of interest)."""
    return [at_least_0(word, text) for word in text.split(",")]


def at_least_0(word: str, text: str = "") -> float:
    """A finite number, 0 or more, that is not absurd. text: the flag's whole."""
    value = float(word)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text or word}: must be finite and at least 0")
    if value and not SMALLEST <= value <= LARGEST:
        limits = f"must be 0, or from {SMALLEST:g} to {LARGEST:g}"
        raise argparse.ArgumentTypeError(f"{text or word}: {limits}: give it in another unit")
    return value


def whole_number(text: str) -> int:
    """An integer, 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def parser(description: str | None, formats: Sequence[str]) -> argparse.ArgumentParser:
    """The command line."""
    made = script_parser("show_schedule.py", description)
    names = f"{', '.join(SCHEDULES)}; {AUTO}: the fastest that fits, with its reasons; {ALL}: each of them"
    plan = {
        "--schedule NAME...": names,
        "--stages N": "pipeline ranks",
        "--microbatches N": "",
        "--chunks N": "chunks a stage; default: the schedule's",
    }
    add_flags(made, plan)
    group = "microbatches that a chunk takes in turn, of interleaving; default: one a stage"
    add_flags(made, {"--microbatch-group-size-per-virtual-pipeline-stage N": group}, dest="group_size")
    time = "time of a whole stage's {}: one number, or one a stage, with blanks or commas (default 1)"
    by_stage = {
        "--time-f T...": time.format("forward"),
        "--time-b T...": time.format("input gradient"),
        "--time-w T...": time.format("weight gradient"),
        "--memory-limit A...": "most activation of a rank, in units of one microbatch's whole-stage activation: one "
        "number, or one a rank; searched schedules are made for it, the others must fit",
    }
    add_flags(made, by_stage, type=numbers)
    costs = {
        "--time-comm T": "latency of a transfer (default 0)",
        "--memory-after-b SHARE=1": "what is held between B and W, as a share of an activation; may be above 1",
    }
    add_flags(made, costs, type=at_least_0)
    message = (
        "bytes of a transfer: micro-batch x sequence x hidden x 2 in bf16, over --tensor-model-parallel-size under "
        "sequence parallel; for p2p_bytes of json, which is null without"
    )
    add_flags(made, {"--message-bytes N": message}, type=whole_number)
    kinds = {"--format NAME=text": "several schedules: text, json, table, html, svg"}
    add_flags(made, kinds, choices=formats, metavar=None)
    files = {
        "--html FILE": "compare the schedules on one page",
        "--pictures DIR": "a small NAME.svg a schedule, on one axis",
        "--playground FILE": "a page with sliders, of nothing else",
        "--measured DIR": "set this run's timeline beside the plan",
    }
    add_flags(made, files, type=Path)
    add_flags(made, {"--iteration N": "of --measured; default: the last one"})
    _add_data_parallel_flags(made)
    return made


def _add_data_parallel_flags(made: argparse.ArgumentParser) -> None:
    """Named as the trainer's."""
    group = made.add_argument_group("gathers and reductions, of one schedule, as text, json or page")
    budget = (
        "of policy budget: what a rank may keep whole beyond policy memory; in layers without --layer-bytes"
    )
    sizes = {
        "--data-parallel-size N": "ranks that share each stage",
        "--num-layers N": "layers of the model, each a unit; all are equal",
        "--fsdp-memory-budget BYTES": budget,
        "--layer-bytes N": "of a layer's weights, and of its gradients",
    }
    add_flags(group, sizes, type=whole_number)
    cut = f"what is cut (default optim_grads_params; under --rank-memory-limit {AUTO}, which tries them)"
    strategies = (*STRATEGIES, AUTO)
    add_flags(group, {"--data-parallel-sharding-strategy NAME": cut}, choices=strategies, metavar=None)
    policy = {"--fsdp-reshard-policy NAME=memory": "how long units stay whole"}
    add_flags(group, policy, choices=POLICIES, metavar=None)
    limit = "what a rank may hold in all, as in 75G: choose under it, of a model by the trainer's flags"
    add_flags(group, {"--rank-memory-limit BYTES": limit}, type=bytes_of)
    add_flags(
        group, {"--time-gather T=0": "time of one layer's gather, and of its reduction"}, type=at_least_0
    )


def given(values: list[list[float]] | None) -> list[float]:
    """The numbers of a flag; 1 where it is not given."""
    return [1.0] if values is None else [*chain.from_iterable(values)]


def costs_of(args: argparse.Namespace, placement: Placement) -> CostModel:
    """The cost model that the flags describe."""
    return CostModel.of_ranks(
        placement,
        time_f=given(args.time_f),
        time_b=given(args.time_b),
        time_w=given(args.time_w),
        comm=args.time_comm or 0.0,
        memory_after_b=args.memory_after_b,
    )


def limits_of(args: argparse.Namespace, stages: int) -> tuple[float, ...] | None:
    """--memory-limit by rank, None without. Raises PlanError for another number of ranks."""
    if args.memory_limit is None:
        return None
    limits = given(args.memory_limit)
    if len(limits) not in (1, stages):
        raise PlanError(f"--memory-limit: {len(limits)} numbers for {stages} ranks; give 1 or all")
    return tuple(limits * (stages if len(limits) == 1 else 1))


def names_of(args: argparse.Namespace) -> list[str]:
    """The schedules asked for, `all` written out. Raises PlanError for one that is unknown, or named twice."""
    names = [*chain.from_iterable(SCHEDULES if name == ALL else [name] for name in args.schedule or [])]
    for name in names:
        if name not in (*SCHEDULES, AUTO):
            raise PlanError(f"schedule {name!r} is unknown; there are {', '.join([*SCHEDULES, AUTO, ALL])}")
        if names.count(name) > 1:
            raise PlanError(f"--schedule names {name} twice")
    return names


def chunks_of(args: argparse.Namespace, name: str, *, several: bool) -> tuple[int | None, int | None]:
    """(chunks, group size) of a schedule: among several, what only interleaving has is only for interleaving."""
    if several and SCHEDULES[name].placement != LOOPED:
        return None, None
    return args.chunks, args.group_size


def request_of(args: argparse.Namespace, name: str, *, several: bool = False) -> tuple[Request, CostModel]:
    """What a schedule is asked for, and its costs. Raises PlanError naming a flag that is missing."""
    missing = [flag for flag in ("stages", "microbatches") if getattr(args, flag) is None]
    if missing or not args.schedule:
        raise PlanError(f"--{' and --'.join(missing or ['schedule'])} must be given")
    chunks, group = chunks_of(args, name, several=several)
    if (forwards := args.stages * (chunks or 1) * args.microbatches) > MOST_FORWARDS:
        raise PlanError(
            f"--stages {args.stages} x chunks {chunks or 1} x --microbatches {args.microbatches} are {forwards} "
            f"forwards; a plan holds at most {MOST_FORWARDS}: lower one of them"
        )
    request = Request(args.stages, args.microbatches, chunks, group)
    costs = costs_of(args, SCHEDULES[name].placed(args.stages, chunks))
    return dataclasses.replace(request, costs=costs, memory_limit=limits_of(args, args.stages)), costs


def drawable(simulation: Simulation) -> Simulation:
    """Raises PlanError for times that cannot be drawn."""
    if not simulation.makespan > 0:
        raise PlanError("all of --time-f, --time-b, --time-w and --time-comm are 0: nothing takes time")
    return simulation


def fitting(simulation: Simulation, limits: tuple[float, ...] | None) -> Simulation:
    """Raises PlanError for more activations than the limit."""
    over = over_limit(simulation, limits)
    if over is not None and limits is not None:
        rank, peak = over
        searched = sorted(name for name, row in SCHEDULES.items() if row.searched)
        fix = "" if simulation.plan.schedule in searched else f"{', '.join(searched)} keep to a limit; "
        raise PlanError(
            f"{simulation.plan.schedule} needs {plain(peak)} activations on rank {rank}, more than --memory-limit "
            f"{plain(limits[rank])}: {fix}--schedule {AUTO} takes the fastest that does, or give {plain(peak, 6)} or "
            "more"
        )
    return simulation


def expect_plan(args: argparse.Namespace, names: Sequence[str], step: MeasuredStep) -> None:
    """Where flags describe a plan, it must be the one that ran. Raises PlanError with both hashes."""
    words = (args.schedule, args.stages, args.microbatches, args.chunks, args.group_size)
    if all(word is None for word in words):
        return
    if len(names) > 1 or AUTO in names:
        raise PlanError(
            "--measured is of one schedule, that of the run; with --html others are compared with it"
        )
    request, _ = request_of(args, names[0] if names else "1f1b")
    # As a run makes it: searched and lowered by the default costs, whatever the computations take later.
    request = dataclasses.replace(request, costs=None, memory_limit=None)
    expected = build_plan(names[0], request)
    expected = lower(expected, CostModel.of_ranks(expected.placement))
    if plan_hash(expected) != plan_hash(step.plan):
        raise PlanError(
            f"the run's plan is not that of the flags: its hash is {plan_hash(step.plan)} ({step.plan.schedule}, "
            f"{size_of(step.plan)}), that of the flags {plan_hash(expected)}"
        )
