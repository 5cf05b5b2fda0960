"""Plan, time and draw a pipeline schedule, without torch; or set a measured step beside its plan.

python tools/show_schedule.py --schedule 1f1b --stages 4 --microbatches 8 --format text
python tools/show_schedule.py --measured TIMELINE_DIR [--iteration N] --format svg

Times are unitless: whole-stage times, one number for all stages or one a stage. BW takes B + W. With --measured, the
folder of a run's --log-pipeline-timeline, times are seconds, the plan is that of the run unless --schedule says
which it should be, and the planned times are what the simulator expects from the measured mean of each computation;
a --time flag puts its own in place.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.pipeline_parallel.plan import overlay
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import LAST_COMPUTE, Plan, PlanError, plan_hash, row_texts
from megatron.core.pipeline_parallel.plan.measured import MeasuredStep, read_timeline
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.registry import PLANNED, SCHEDULES, build_plan
from megatron.core.pipeline_parallel.plan.render import to_svg, to_text, to_trace
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.plan.text import to_csv, to_torch_csv

SHORTEST_MAKESPAN, LONGEST_MAKESPAN = 1e-300, 1e300


def to_json(simulation: Simulation, solve_seconds: float) -> str:
    """The figures and each rank's order of computations."""
    plan = simulation.plan
    content = {
        "schedule": plan.schedule,
        "stages": plan.placement.num_ranks,
        "microbatches": plan.num_microbatches,
        "makespan": simulation.makespan,
        "bubble_time": simulation.bubble_time,
        "bubble_rate": simulation.bubble_rate,
        "peak_activation": list(simulation.peak_activation),
        "order": [row_texts([op for op in row if op[0] <= LAST_COMPUTE]) for row in plan.rows],
        "p2p_messages": simulation.num_messages,
        "p2p_bytes": simulation.num_messages,  # each carries one boundary tensor
        "solve_seconds": solve_seconds,
    }
    return json.dumps(content, allow_nan=False) + "\n"


FORMATS: Mapping[str, Callable[[Simulation, float], str]] = {
    "text": lambda simulation, _: to_text(simulation),
    "json": to_json,
    "csv": lambda simulation, _: to_csv(simulation.plan),
    "torch-csv": lambda simulation, _: to_torch_csv(simulation.plan),
    "svg": lambda simulation, _: to_svg(simulation),
    "trace": lambda simulation, _: to_trace(simulation),
}


def numbers(text: str) -> list[float]:
    """`1.5` or `1,2,1`, each finite, 0 or more (T_W = 0 is a case of interest)."""
    values = [float(word) for word in text.split(",")]
    if not all(0 <= value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"{text}: must be finite and at least 0")
    return values


def at_least_0(text: str) -> float:
    """A finite number, 0 or more."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be finite and at least 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="show_schedule.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = f"{', '.join(SCHEDULES)}; planned: {', '.join(PLANNED)}"
    made.add_argument("--schedule", metavar="NAME", help=names)
    made.add_argument("--stages", type=int, metavar="P", help="pipeline ranks")
    made.add_argument("--microbatches", type=int, metavar="M")
    made.add_argument("--chunks", type=int, metavar="V", help="chunks a stage; default: the schedule's")
    made.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        dest="group_size",
        metavar="G",
        help="microbatches that a chunk takes in turn, of interleaving; default: one a stage",
    )
    for name, what in (("f", "forward"), ("b", "input gradient"), ("w", "weight gradient")):
        made.add_argument(
            f"--time-{name}",
            type=numbers,
            nargs="+",
            metavar="T",
            help=f"time of a whole stage's {what}: one number, or one a stage, with blanks or commas (default 1)",
        )
    made.add_argument("--time-comm", type=at_least_0, metavar="T", help="latency of a transfer (default 0)")
    made.add_argument(
        "--memory-limit",
        type=at_least_0,
        metavar="A",
        help="most activation of a stage, in units of one microbatch's whole-stage activation",
    )
    made.add_argument(
        "--memory-after-b",
        type=at_least_0,
        default=1.0,
        metavar="SHARE",
        help="share of an activation still held between B and W (default 1)",
    )
    made.add_argument("--format", choices=list(FORMATS), default="text")
    made.add_argument("--measured", type=Path, metavar="DIR", help="set this run's timeline beside the plan")
    made.add_argument("--iteration", type=int, metavar="N", help="of --measured; default: the last one")
    return made


def costs_of(args: argparse.Namespace, plan: Plan) -> CostModel:
    """The cost model that the flags describe."""

    def given(values: list[list[float]] | None) -> list[float]:
        return [1.0] if values is None else [*chain.from_iterable(values)]

    return CostModel.of_ranks(
        plan.placement,
        time_f=given(args.time_f),
        time_b=given(args.time_b),
        time_w=given(args.time_w),
        comm=args.time_comm or 0.0,
        memory_after_b=args.memory_after_b,
    )


def request_of(args: argparse.Namespace) -> Request:
    """What the flags ask for. Raises PlanError naming a flag that is missing."""
    missing = [flag for flag in ("schedule", "stages", "microbatches") if getattr(args, flag) is None]
    if missing:
        raise PlanError(f"--{' and --'.join(missing)} must be given")
    return Request(args.stages, args.microbatches, args.chunks, args.group_size)


def run(args: argparse.Namespace) -> str:
    """What to print. Raises PlanError for what cannot be planned or does not fit."""
    if args.measured is not None:
        return run_measured(args)
    if args.iteration is not None:
        raise PlanError("--iteration chooses a step of --measured, which is not given")
    request = request_of(args)
    begin = time.perf_counter()
    plan = build_plan(args.schedule, request)
    costs = costs_of(args, plan)
    plan = lower(plan, costs)
    solve_seconds = time.perf_counter() - begin
    simulation = checked(simulate(plan, costs), args.memory_limit)
    return FORMATS[args.format](simulation, solve_seconds)


def run_measured(args: argparse.Namespace) -> str:
    """The overlay of a run's step. Raises PlanError for what is no timeline, or one of another plan."""
    step = measured_step(args.measured, args.iteration)
    expect_plan(args, step)
    means = overlay.mean_times(step.plan, step.spans)
    costs = overlay.measured_costs(step.plan, means, args.time_comm or 0.0)
    flags = costs_of(args, step.plan)
    costs = dataclasses.replace(
        costs,
        f=costs.f if args.time_f is None else flags.f,
        b=costs.b if args.time_b is None else flags.b,
        w=costs.w if args.time_w is None else flags.w,
        memory_after_b=args.memory_after_b,
    )
    planned = checked(simulate(step.plan, costs), args.memory_limit)
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    if args.format == "text":
        head = f"iteration {step.iteration}, ranks {', '.join(map(str, step.pipeline))}, seconds\n"
        return head + overlay.overlay_text(planned, measured)
    if args.format == "svg":
        return overlay.overlay_svg(planned, measured)
    if args.format == "trace":
        return overlay.overlay_trace(planned, measured, step.spans)
    if args.format == "json":
        told = {"iteration": step.iteration, "ranks": list(step.pipeline), "hash": plan_hash(step.plan)}
        return (
            json.dumps({**told, **overlay.overlay_figures(planned, measured, means)}, allow_nan=False) + "\n"
        )
    raise PlanError(
        f"--format {args.format} says nothing of times: use text, json, svg or trace with --measured"
    )


def measured_step(directory: Path, iteration: int | None) -> MeasuredStep:
    """A step of the first pipeline, the last one of training unless an iteration is asked for. Raises PlanError."""
    if not directory.is_dir():
        raise PlanError(f"--measured {directory}: there is no such folder")
    try:
        steps = read_timeline(directory)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--measured {directory}: {error}") from None
    steps = [step for step in steps if not step.plan.forward_only] or steps
    if not steps:
        raise PlanError(f"--measured {directory}: no step that all ranks of a pipeline have finished")
    there = sorted({step.iteration for step in steps})
    wanted = there[-1] if iteration is None else iteration
    chosen = [step for step in steps if step.iteration == wanted]
    if not chosen:
        raise PlanError(
            f"--iteration {wanted}: {directory} has {len(there)} iterations from {there[0]} to {there[-1]}, not this"
        )
    return min(chosen, key=lambda step: step.pipeline)


def expect_plan(args: argparse.Namespace, step: MeasuredStep) -> None:
    """Where flags describe a plan, it must be the one that ran. Raises PlanError with both hashes."""
    words = (args.schedule, args.stages, args.microbatches, args.chunks, args.group_size)
    if all(word is None for word in words):
        return
    request = request_of(args)
    expected = build_plan(args.schedule, request)
    # As a run makes it: transfers are placed by the default costs, whatever the computations take later.
    expected = lower(expected, CostModel.of_ranks(expected.placement))
    if plan_hash(expected) != plan_hash(step.plan):
        placement = step.plan.placement
        raise PlanError(
            f"the run's plan is not that of the flags: its hash is {plan_hash(step.plan)} ({step.plan.schedule}, "
            f"{placement.num_ranks} stages x {placement.num_chunks} chunks, "
            f"{step.plan.num_microbatches} microbatches), that of the flags {plan_hash(expected)}"
        )


def checked(simulation: Simulation, memory_limit: float | None) -> Simulation:
    """Raises PlanError for times that cannot be drawn, and for more activations than the limit."""
    # Beyond these a float's range leaves no room to scale times to columns, pixels or microseconds.
    if not SHORTEST_MAKESPAN <= simulation.makespan <= LONGEST_MAKESPAN:
        raise PlanError(
            f"makespan {simulation.makespan:g} is outside {SHORTEST_MAKESPAN:g} to {LONGEST_MAKESPAN:g}: "
            "give --time-f, --time-b, --time-w and --time-comm in another unit"
        )
    peak = max(simulation.peak_activation)
    if memory_limit is not None and peak > memory_limit + 1e-9:
        stage = simulation.peak_activation.index(peak)
        raise PlanError(
            f"{simulation.plan.schedule} needs {peak:g} activations on stage {stage}, "
            f"more than --memory-limit {memory_limit:g}"
        )
    return simulation


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 for what cannot be planned."""
    args = parser().parse_args(argv)
    try:
        print(run(args), end="")
    except PlanError as error:
        print(f"show_schedule.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
