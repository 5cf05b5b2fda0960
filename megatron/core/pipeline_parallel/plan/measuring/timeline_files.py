"""Measured timelines: the files in which each rank says when its operations ran, and their reader.

A directory holds one file a rank of the world, `rank-00003.jsonl`: JSON objects, one a line. A *header* opens the
file, and comes again where the rank goes on with another plan:

    {"version": 1, "plan": SHA-256, "schedule": "1f1b", "placement": {"kind": ..., "ranks": ..., "chunks": ...},
     "num_microbatches": 8, "bitwise": true, "forward_only": false, "rank": place in the pipeline,
     "pipeline": [world ranks], "stages": [global stages], "num_ops": length of the row, "clock_unix_s": ...,
     "link_ns": of a message on the slowest of the rank's links}

Where a row has operations of data parallelism, "residency" is what the plan was made for, "at_rest" the bytes that the
rank holds between steps, and the pipeline's first rank has "lanes": the units of all stages, what they are cut by, and
what the wire costs in ns. Behind a header comes a line an operation, in the order of the row:

    {"iteration": 7, "op": "2F0", "start_s": 0.5, "end_s": 0.6, "wait_s": 0.02}

Times count from the header's clock, which is in unix time, so that ranks of one machine line up. wait_s is the part
at the beginning of the operation in which it waited for a message. Overlapped computations carry their pair as
`"pair": 3`. Operations of one batch of transfers share start and end.

Where a row has operations of data parallelism, its computations carry `"lane_s": 0.001`, the part in which they did
operations in their middle or waited for weights. Such an operation lasts from its call to the return of the last one
that waited for it, which took wait_s of computations and, of those before it, of their lane_s.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core import safe_files, schema
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, Share, StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, RawOp
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import POLICIES, PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.core.sharding_table import STRATEGIES, RankGroup

VERSION = 1
LONGEST_LINE_BYTES = 1 << 20
LONGEST_S = 2**40
_NS_PER_S = 1e9

_SIZE, _SECONDS = schema.number(0.0, float(1 << 60)), schema.number(-LONGEST_S, LONGEST_S)
_ACCESSES = schema.array(schema.array(schema.integer()))
_SHARE = schema.fields_of(Share, group=schema.fields_of(RankGroup))
_TIMES = dict.fromkeys(("f", "b", "w", "activation", "held_after_b"), _SIZE)
_UNIT = schema.fields_of(UnitCosts, shares=schema.array(_SHARE), **_TIMES)
_LANES = {
    "stages": schema.array({"units": schema.array(_UNIT), "forward": _ACCESSES, "backward": _ACCESSES}),
    "residency": schema.fields_of(
        Residency,
        strategy=schema.one_of(*STRATEGIES),
        policy=schema.one_of(*POLICIES),
        budget=schema.or_null(schema.array(schema.integer())),
        limit=schema.or_null(schema.array(_SIZE)),
    ),
    "costs": schema.fields_of(LaneCosts, latency=_SIZE, bandwidth=schema.number(1e-300, float(1 << 60))),
}


@dataclass(frozen=True)
class Header:
    """The fields of a header, see the module. at_rest: None without residency."""

    version: int
    plan: str
    schedule: str
    placement: dict[str, Any]
    num_microbatches: int
    bitwise: bool
    forward_only: bool
    rank: int
    pipeline: Sequence[int]
    stages: Sequence[int]
    num_ops: int
    clock_unix_s: float
    link_ns: int = 0
    residency: Any = None
    at_rest: int | None = None
    lanes: Any = None


_RANKS = schema.array(schema.integer())
_HEADER = schema.fields_of(
    Header,
    version=schema.one_of(VERSION),
    placement={"kind": schema.text(), "ranks": schema.integer(), "chunks": schema.integer()},
    pipeline=_RANKS,
    stages=_RANKS,
    num_ops=schema.integer(1),
    clock_unix_s=_SECONDS,
    residency=schema.anything,
    at_rest=schema.integer(),
    lanes=_LANES,
)


@dataclass(frozen=True, slots=True)
class OpTimes:
    """One operation as it ran. wait_s: the part at its beginning in which it waited for a message; of an operation of
    data parallelism, for how long computations waited for it. lane_s: what a computation spent on these."""

    start_s: float
    end_s: float
    wait_s: float = 0.0
    lane_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """In a computation."""
        return self.end_s - self.start_s - self.wait_s - self.lane_s


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one pipeline. pipeline: its world ranks, first stage first. spans: by pipeline rank and place in its
    row, when an operation ran; seconds on one clock, 0 at the first start of any rank in this step. lanes: what gathers
    and reductions are about, and cost in seconds; None where there are none. at_rest: by pipeline rank, then, bytes.
    link_ns: by pipeline rank, what a message takes."""

    iteration: int
    pipeline: tuple[int, ...]
    plan: Plan
    lanes: Lanes | None
    spans: tuple[tuple[OpTimes, ...], ...]
    at_rest: tuple[int, ...] | None
    link_ns: tuple[int, ...] = ()


def file_name(world_rank: int) -> str:
    """The file of a rank of the world."""
    return f"rank-{world_rank:05d}.jsonl"


def header_line(
    plan: Plan,
    rank: int,
    pipeline: tuple[int, ...],
    clock_unix_s: float,
    lanes: Lanes | None = None,
    at_rest: int = 0,
    link_ns: int = 0,
) -> str:
    """Opens what a rank writes about a plan. rank: its place in the pipeline. lanes: in ns. at_rest: its bytes.
    link_ns: of a message."""
    placement, residency = plan.placement, plan.residency
    header = Header(
        VERSION,
        ir.plan_hash(plan),
        plan.schedule,
        placement.as_json(),
        plan.num_microbatches,
        plan.bitwise,
        plan.forward_only,
        rank,
        pipeline,
        placement.stages_of(rank),
        len(plan.rows[rank]),
        clock_unix_s,
        link_ns,
        *(() if residency is None else (residency.as_json(), at_rest, None if rank else lanes)),
    )
    told = dataclasses.asdict(header)
    return json.dumps({name: value for name, value in told.items() if value is not None}) + "\n"


def op_lines(row: tuple[RawOp, ...]) -> list[str]:
    """A template for each operation of a row, to be filled by `%` with (iteration, start_s, end_s, wait_s), of
    computations beside operations of data parallelism with lane_s too."""
    lines = []
    has_lane = any(ir.IS_BESIDE[op[0]] for op in row)
    for op in row:
        pair = f', "pair": {op[7]}' if op[7] >= 0 and "#" not in ir.op_text(op) else ""
        lane = ', "lane_s": %.9f' if has_lane and ir.IS_COMPUTE[op[0]] else ""
        lines.append(
            f'{{"iteration": %d, "op": "{ir.op_text(op)}"{pair}, '
            f'"start_s": %.9f, "end_s": %.9f, "wait_s": %.9f{lane}}}\n'
        )
    return lines


def read_timeline(directory: Path) -> list[MeasuredStep]:
    """Every step that all ranks of a pipeline have finished, by iteration, then by pipeline.

    A step that a rank did not finish (the run died in it) is left out. Raises PlanError naming the file and line of
    what is no timeline, the ranks whose files are missing, and plans that do not have the hash their header says.
    """
    files = sorted(directory.glob("rank-*.jsonl"))
    if not files:
        raise PlanError(f"{directory}: no timeline, that is no files rank-00000.jsonl, rank-00001.jsonl, ...")
    # (iteration, pipeline, hash of the plan) -> by pipeline rank
    steps: dict[tuple[int, tuple[int, ...], str], dict[int, _RankPart]] = defaultdict(dict)
    pipelines: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for part in (part for file in files for part in _parts(file)):
        header, pipeline = part.header, tuple(part.header.pipeline)
        pipelines[pipeline].add(header.rank)
        if len(part.ops) == header.num_ops:
            steps[part.iteration, pipeline, header.plan][header.rank] = part
    for pipeline, ranks in pipelines.items():
        missing = [file_name(world) for rank, world in enumerate(pipeline) if rank not in ranks]
        if missing:
            raise PlanError(
                f"{directory}: {', '.join(missing)} is missing of the pipeline of ranks {pipeline}"
            )
    plans: dict[str, tuple[Plan, Lanes | None]] = {}
    read = []
    for (iteration, pipeline, of_plan), by_rank in sorted(steps.items()):
        if len(by_rank) < len(pipeline):
            continue
        parts = [by_rank[rank] for rank in range(len(pipeline))]
        if of_plan not in plans:
            try:
                plans[of_plan] = _plan(parts)
            except PlanError as error:
                raise PlanError(f"iteration {iteration}: {error}") from None
        plan, lanes = plans[of_plan]
        # Seconds since 1970 have no room for nanoseconds in a float: each rank's clock counts from the first one's.
        clocks = [round(part.header.clock_unix_s - parts[0].header.clock_unix_s, 9) for part in parts]
        begin = min(
            part.spans[0].start_s + clock for part, clock in zip(parts, clocks, strict=True) if part.spans
        )
        spans = tuple(
            tuple(
                OpTimes(one.start_s + clock - begin, one.end_s + clock - begin, one.wait_s, one.lane_s)
                for one in part.spans
            )
            for part, clock in zip(parts, clocks, strict=True)
        )
        at_rest = None if lanes is None else tuple(part.header.at_rest or 0 for part in parts)
        links = tuple(part.header.link_ns for part in parts)
        read.append(MeasuredStep(iteration, pipeline, plan, lanes, spans, at_rest, links))
    return read


class _RankPart(NamedTuple):
    """What one rank did in one step, of the last one of a file as far as it came."""

    iteration: int
    header: Header
    ops: list[RawOp]
    spans: list[OpTimes]


def _parts(file: Path) -> list[_RankPart]:
    """The steps of one file; a last line that is not finished is left out. A rank runs a plan's row from its beginning:
    a row that is full is followed by another step."""
    parts: list[_RankPart] = []
    header: Header | None = None
    with safe_files.opened(file) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE_BYTES), b""), 1):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
                break
            try:
                content = json.loads(line)
                if "version" in content:
                    header = _header(content)
                    continue
                if header is None:
                    raise PlanError("an operation before the header")
                iteration, op, times = _operation(content)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise PlanError(f"{file}, line {number}: no line of a timeline: {error}") from None
            last = parts[-1] if parts else None
            if (
                last is None
                or last.iteration != iteration
                or last.header is not header
                or len(last.ops) == header.num_ops
            ):
                last = _RankPart(iteration, header, [], [])
                parts.append(last)
            last.ops.append(op)
            last.spans.append(times)
    return parts


def _header(content: dict[str, Any]) -> Header:
    """Raises PlanError for what `header_line` does not write."""
    if content["version"] != VERSION:
        raise PlanError(f"version {content['version']!r:.40}; this program reads {VERSION}")
    schema.check(_HEADER, content, schema.Place(Path("header"), error=PlanError))
    header = Header(**content)
    if header.rank >= len(header.pipeline):
        raise PlanError(f"rank {header.rank} of the pipeline {header.pipeline!r:.80}")
    return header


def _operation(content: dict[str, Any]) -> tuple[int, RawOp, OpTimes]:
    """Iteration, operation and times of a line. Raises PlanError, KeyError or TypeError for what is none."""
    iteration, op = content["iteration"], ir.parse_op(content["op"])
    pair = content.get("pair", op[7])
    times = [content["start_s"], content["end_s"], content["wait_s"], content.get("lane_s", 0.0)]
    if type(iteration) is not int or type(pair) is not int:
        raise PlanError(f"iteration {iteration!r:.40} and pair {pair!r:.40} are not both int")
    for one in times:  # an integer may be too large for a float, and a float no number
        if type(one) not in (int, float) or not -LONGEST_S <= one <= LONGEST_S:
            raise PlanError(f"{one!r:.40} is not seconds")
    return iteration, (*op[:7], pair), OpTimes(*map(float, times))


def _plan(parts: Sequence[_RankPart]) -> tuple[Plan, Lanes | None]:
    """What all ranks of a pipeline ran. Raises PlanError for what no run can have written."""
    header, rows = parts[0].header, tuple(tuple(part.ops) for part in parts)
    try:
        residency, place = None, header.placement
        placement = Placement(place["kind"], place["ranks"], place["chunks"])
        if header.residency is not None:
            residency = PlannedResidency.from_json(header.residency, sum(map(len, rows)))
    except ValueError as error:
        raise PlanError(f"the header's placement or residency is wrong: {error}") from None
    flags = header.bitwise, header.forward_only
    plan = Plan(header.schedule, placement, header.num_microbatches, rows, *flags, residency)
    if ir.plan_hash(plan) != header.plan:
        raise PlanError("the operations do not have the hash that the header says")
    try:
        verify(plan)
    except PlanError as error:
        raise PlanError(f"no plan that could have run: {error}") from None
    try:
        return plan, None if header.lanes is None else _lanes(header.lanes, plan)
    except (ValueError, AssertionError) as error:
        raise PlanError(f"the header's lanes are wrong: {error!r:.200}") from None


def _lanes(content: dict[str, Any], plan: Plan) -> Lanes:
    """What `dataclasses.asdict` made of lanes in ns, in seconds."""
    stages = tuple(map(StageUnits.of_dict, content["stages"]))
    asked, wire = content["residency"], LaneCosts(**content["costs"])
    limits = {name: one and tuple(one) for name, one in asked.items() if name in ("budget", "limit")}
    residency = Residency(**{**asked, **limits})
    for rank, row in enumerate(plan.rows):
        walk_row(row, RankUnits(rank, plan.placement, stages), residency, forward_only=plan.forward_only)
    return Lanes(stages, residency, LaneCosts(wire.latency / _NS_PER_S, wire.bandwidth * _NS_PER_S))
