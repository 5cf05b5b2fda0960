"""Plan, time and draw pipeline schedules, without torch; compare them; or set a measured step beside its plan.

python tools/show_schedule.py --schedule zbv --stages 4 --microbatches 8
python tools/show_schedule.py --schedule auto --stages 4 --microbatches 8 --memory-limit 3
python tools/show_schedule.py --schedule 1f1b zb-1p zbv --stages 4 --microbatches 8 --html compared.html
python tools/show_schedule.py --schedule zbv --stages 2 --microbatches 3 --data-parallel-size 2 --num-layers 8
python tools/show_schedule.py --schedule auto --stages 4 --microbatches 16 --data-parallel-size 4 \\
    --rank-memory-limit 60G --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\
    --max-position-embeddings 4096 --vocab-size 32000 --bf16 --html chosen.html
python tools/show_schedule.py --measured TIMELINE_DIR [--iteration N] --format svg

Times are unitless: whole-stage times, one number for all stages or one a stage. BW takes B + W. With --measured, the
folder of a run's --log-pipeline-timeline, times are seconds, the plan is that of the run unless --schedule says
which it should be, and the planned times are what the simulator expects from the measured median of each computation;
a --time flag puts its own in place. With --measured and --html, the other schedules named are planned from the run's
measured times.

With --rank-memory-limit the model and its precision are described by the trainer's flags, which this tool takes then
beside its own (--hidden-size, --tensor-model-parallel-size, --bf16, --achieved-tflops, --dp-bandwidth-gb-per-s, ...):
--schedule, chunks, groups, sharding and what stays gathered are chosen together where no flag says them, for GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.build import build_plan, plan_for
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, PlanError, plan_hash, row_texts
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.pipeline_summary import bound_line
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import Simulation, over_limit, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.plan.text import to_json, to_torch_csv
from megatron.core.safe_files import SHARED_MODE, publish_text
from megatron.core.words import plain
from tools.schedules import overlay, residency
from tools.schedules.flags import (
    chunks_of,
    costs_of,
    drawable,
    expect_plan,
    fitting,
    limits_of,
    names_of,
    parser,
    request_of,
)
from tools.schedules.held_over_time import summary
from tools.schedules.page import Entry, entry_of, longest, of_rank_totals, playground, table, to_html
from tools.schedules.picture import HeldCurves, beside_svg, pipeline_title, several_svg, to_picture, to_svg
from tools.schedules.residency import Shown
from tools.schedules.text import columns_per_unit, overlay_figures, overlay_text, to_text
from tools.schedules.trace import overlay_trace, to_trace


def figures(
    simulation: Simulation, solve_seconds: float, message_bytes: int | None = None
) -> dict[str, object]:
    """The figures and each rank's order of computations. message_bytes: of one transfer; None: not known."""
    plan = simulation.plan
    return {
        "schedule": plan.schedule,
        "stages": plan.placement.num_ranks,
        "microbatches": plan.num_microbatches,
        "makespan": simulation.makespan,
        "bubble_time": simulation.bubble_time,
        "bubble_rate": simulation.bubble_rate,
        "peak_activation": list(simulation.peak_activation),
        "order": [row_texts([op for op in row if IS_COMPUTE[op[0]]]) for row in plan.rows],
        "p2p_messages": simulation.num_messages,
        "p2p_bytes": None if message_bytes is None else simulation.num_messages * message_bytes,
        "solve_seconds": solve_seconds,
    }


# Of one schedule; json, text and svg are also of several.
FORMATS: Mapping[str, Callable[[Simulation], str]] = {
    "text": to_text,
    "json": lambda simulation: json.dumps(figures(simulation, 0.0)),
    "plan": lambda simulation: to_json(simulation.plan),
    "torch-csv": lambda simulation: to_torch_csv(simulation.plan),
    "svg": to_svg,
    "picture": to_picture,
    "trace": to_trace,
}
COMPARED = ("text", "json", "table", "html", "svg")


# Plans -------------------------------------------------------------------------------------------------


def run_playground(args: argparse.Namespace) -> str:
    """The page of `--playground`, which takes no other flag."""
    alone = argparse.Namespace(words=args.words, model_words=[])  # as main sets them
    if args != parser(None, [*FORMATS, "table", "html"]).parse_args(
        [f"--playground={args.playground}"], alone
    ):
        raise PlanError(
            "--playground writes a page that asks for everything itself: leave the other flags out"
        )
    return f"wrote {write(args.playground, playground(), '--playground')}\n"


def run(args: argparse.Namespace) -> str:
    """What to print. Raises PlanError for what cannot be planned or does not fit."""
    if args.playground is not None:
        return run_playground(args)
    if args.rank_memory_limit is not None:
        from tools.schedules import budget  # with all that the trainer knows of flags

        budget.check(args)
    else:
        residency.check(args)
    if args.measured is not None:
        return run_measured(args)
    if args.iteration is not None:
        raise PlanError("--iteration chooses a step of --measured, which is not given")
    names = names_of(args)
    if not names:
        request_of(args, "1f1b")  # which says what is missing
    is_alone = args.data_parallel_size is not None  # of one schedule, with its gathers and reductions
    compares = args.html is not None or args.pictures is not None or args.format in ("table", "html")
    if not is_alone and (len(names) > 1 or compares):
        return run_compared(args, names)
    begin = time.perf_counter()
    reasons: list[str] = []
    shown: Shown | None
    bound = None
    if args.rank_memory_limit is not None:
        name, shown, reasons = budget.chosen(args)
        simulation = drawable(shown.simulation)
        drawn = Entry(name, simulation, time_name="seconds")
    else:
        if names == [AUTO]:
            entry, reasons = chosen(args)
        else:
            request, costs = request_of(args, names[0])
            entry = Entry(names[0], simulate(lower(build_plan(names[0], request), costs), costs))
        assert entry.simulation is not None, entry.name
        simulation = fitting(drawable(entry.simulation), limits_of(args, args.stages))
        schedule = simulation.plan.schedule
        bound = bound_line(schedule, request_of(args, schedule, several=names == [AUTO])[0], simulation)
        shown = residency.shown(args, simulation)
        drawn = entry if shown is None else Entry(entry.name, shown.simulation)
    solve_seconds = time.perf_counter() - begin
    if args.html is not None and shown is not None:
        file = write_page(args, [drawn], reasons, limits_of(args, args.stages), unit=shown.unit)
        print(f"wrote {file}", file=sys.stderr)
    if args.format == "html" and shown is not None:
        return page_of([drawn], reasons, limits_of(args, args.stages), unit=shown.unit)
    if args.format == "json":
        more: dict[str, object] = {"reasons": reasons} if reasons else {}
        if bound is not None:
            more["bound"] = bound
        if shown is not None:
            more["residency"] = residency.figures(shown)
        said = {**figures(simulation, solve_seconds, args.message_bytes), **more}
        return json.dumps(said, allow_nan=False) + "\n"
    told = "".join(f"{line}\n" for line in reasons)
    if args.format == "text":
        grid = summary(simulation) + "\n" if args.html is not None else FORMATS["text"](simulation)
        rows = args.html is None
        grid += "" if bound is None else f"{bound}\n"
        return told + grid + ("" if shown is None else residency.told(shown, rows=rows))
    print(told, end="", file=sys.stderr)  # what is printed is a file
    return FORMATS[args.format](simulation)


def chosen(args: argparse.Namespace) -> tuple[Entry, list[str]]:
    """The fastest schedule that fits, and a line on each. Raises PlanError where none does."""
    candidates = []
    for name in SCHEDULES:
        request, costs = request_of(args, name, several=True)
        placement = SCHEDULES[name].placed(request.num_ranks, request.num_chunks)
        group, limits = request.group_size, request.memory_limit
        candidates.append(ScheduleSpec(name, placement, costs, group_size=group, limits=limits))
    best = fastest(candidates, args.microbatches)
    simulation = simulate(plan_for(best, args.microbatches, PlanPurpose.TRAIN), best.costs)
    return Entry(best.schedule, simulation, remarks=(f"chosen by {AUTO}",)), list(best.reasons)


def run_compared(args: argparse.Namespace, names: Sequence[str]) -> str:
    """Several schedules: as text, JSON, a table, a page, pictures. One that is not possible says so in its place."""
    entries: list[Entry] = []
    notes: list[str] = []
    for name in names:
        if name == AUTO:
            entry, notes = chosen(args)
            entry = dataclasses.replace(entry, name=f"{AUTO}: {entry.name}")
        else:
            request, costs = request_of(args, name, several=len(names) > 1)
            entry = entry_of(name, request, costs, request.memory_limit)
        if entry.simulation is not None:
            drawable(entry.simulation)
        entries.append(entry)
    return compared(args, entries, notes, limits_of(args, args.stages))


def compared(
    args: argparse.Namespace, entries: Sequence[Entry], notes: Sequence[str], limits: tuple[float, ...] | None
) -> str:
    """Write the page and the pictures that are asked for, and say the figures."""
    if not any(entry.simulation is not None for entry in entries):
        raise PlanError("; ".join(f"{entry.name}: {entry.problem}" for entry in entries))
    if args.format not in COMPARED or (args.format == "svg" and args.measured is not None):
        raise PlanError(f"--format {args.format} is of one schedule: use {', '.join(COMPARED)}, or --html")
    written = []
    if args.html is not None:
        written.append(write_page(args, entries, notes, limits))
    if args.pictures is not None:
        span = longest(entries)
        for entry in entries:
            if entry.simulation is not None:
                file = args.pictures / f"{entry.name.replace(': ', '-')}.svg"
                written.append(write(file, to_picture(entry.simulation, span=span), "--pictures"))
    if args.format == "json":
        all_of_it = [
            {"name": entry.name, "problem": entry.problem}
            | (figures(entry.simulation, 0.0, args.message_bytes) if entry.simulation is not None else {})
            for entry in entries
        ]
        return json.dumps(all_of_it, allow_nan=False) + "\n"
    print("".join(f"wrote {file}\n" for file in written), end="", file=sys.stderr)
    if args.format == "html":
        return page_of(entries, notes, limits)
    if args.format == "svg":
        missing = (f"{entry.name}: {entry.problem}\n" for entry in entries if entry.problem)
        print("".join([*(f"{line}\n" for line in notes), *missing]), end="", file=sys.stderr)
        return several_svg([entry.simulation for entry in entries if entry.simulation is not None])
    told = "".join(f"{line}\n" for line in notes)
    if args.format == "text" and not written:
        simulations = [entry.simulation for entry in entries if entry.simulation is not None]
        scale = max(columns_per_unit(one) for one in simulations)
        told += "".join(f"{to_text(one, scale)}\n" for one in simulations)
    return told + table(entries)


def write_page(
    args: argparse.Namespace,
    entries: Sequence[Entry],
    notes: Sequence[str],
    limits: tuple[float, ...] | None,
    unit: str = "",
) -> Path:
    """The page of --html. unit: of gathered weights, where there are any."""
    return write(args.html, page_of(entries, notes, limits, unit), "--html")


def page_of(
    entries: Sequence[Entry], notes: Sequence[str], limits: tuple[float, ...] | None, unit: str = ""
) -> str:
    """The page of --html and --format html."""
    plan = next(entry.simulation.plan for entry in entries if entry.simulation is not None)
    return to_html(pipeline_title(plan), entries, limits, units_in=unit, notes=notes)


def write(file: Path, text: str, flag: str) -> Path:
    """Raises PlanError naming the flag."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        publish_text(file, text, mode=SHARED_MODE)
    except OSError as error:
        raise PlanError(f"{flag} {file}: {error}") from None
    return file


# Measured ----------------------------------------------------------------------------------------------


def run_measured(args: argparse.Namespace) -> str:
    """The overlay of a run's step. Raises PlanError for what is no timeline, or one of another plan."""
    try:
        step = overlay.chosen_step(args.measured, args.iteration)
    except PlanError as error:
        raise PlanError(f"--measured {error}") from None
    names, is_page = names_of(args), args.html is not None or args.format == "html"
    if not is_page:
        expect_plan(args, names, step)
    figures = overlay.figures_of_ranks(step)
    medians = overlay.median_times(figures, step.plan.placement.num_stages)
    costs = overlay.measured_costs(figures, step.plan, args.time_comm)
    flags = costs_of(args, step.plan.placement)
    costs = dataclasses.replace(
        costs,
        f=costs.f if args.time_f is None else flags.f,
        b=costs.b if args.time_b is None else flags.b,
        w=costs.w if args.time_w is None else flags.w,
        held_after_b=flags.held_after_b,
    )
    planned = drawable(simulate(step.plan, costs, step.lanes))
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    limits = limits_of(args, step.plan.placement.num_ranks)
    held = None
    if step.lanes is not None and (is_page or args.format == "svg"):
        in_bytes = simulate(step.plan, overlay.in_bytes(costs, step), step.lanes)
        held = HeldCurves(in_bytes, at_rest=step.at_rest)
    if is_page:
        return measured_page(args, names, planned, measured, limits, held)
    fitting(planned, limits)
    if args.format == "text":
        head = f"iteration {step.iteration}, ranks {', '.join(map(str, step.pipeline))}, seconds\n"
        return head + overlay_text(planned, measured)
    if args.format == "svg":
        return beside_svg(planned, measured, held)
    if args.format == "trace":
        return overlay_trace(planned, measured, step.spans)
    if args.format == "json":
        told = {"iteration": step.iteration, "ranks": list(step.pipeline), "hash": plan_hash(step.plan)}
        return json.dumps({**told, **overlay_figures(planned, measured, medians)}, allow_nan=False) + "\n"
    raise PlanError(
        f"--format {args.format} says nothing of times: use text, json, svg or trace with --measured"
    )


def measured_page(
    args: argparse.Namespace,
    names: Sequence[str],
    planned: Simulation,
    measured: Simulation,
    limits: tuple[float, ...] | None,
    held: HeldCurves | None,
) -> str:
    """The run beside its plan, and the other schedules named, planned from what the run measured. held: by the run's
    units, where it has them."""
    plan, costs = planned.plan, planned.costs
    ran = plan.placement
    over = over_limit(planned, limits)
    problem = "" if over is None else f"needs {plain(over[1])} activations on rank {over[0]}"
    entries = [Entry(plan.schedule, planned, problem, measured, time_name="seconds", held=held)]
    for name in names:
        if name == AUTO:
            raise PlanError(f"--measured compares schedules by name, not {AUTO}")
        if name == plan.schedule:
            continue
        chunks, group = chunks_of(args, name, several=True)
        placement = SCHEDULES[name].placed(ran.num_ranks, chunks)
        own, remark = costs, "From the run's measured times of each stage."
        if placement != ran:
            own = of_rank_totals(costs, ran, placement)
            remark = "From the run's measured times of each rank, divided evenly over its chunks here."
        request = Request(ran.num_ranks, plan.num_microbatches, chunks, group, own, limits)
        entry = entry_of(name, request, own, limits)
        entries.append(dataclasses.replace(entry, remarks=(remark,), time_name="seconds"))
    return compared(args, entries, [], limits)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 for what cannot be planned."""
    line = parser(__doc__, [*FORMATS, "table", "html"])
    args, model_words = line.parse_known_args(argv)
    args.model_words = model_words
    args.words = sys.argv[1:] if argv is None else argv
    if args.model_words and args.rank_memory_limit is None:
        line.error(f"unrecognized arguments: {' '.join(args.model_words)}")
    try:
        print(run(args), end="")
    except PlanError as error:
        print(f"{line.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
