"""What data parallelism holds and moves in a run's steps, by plan and as measured: said in log and record. Which groups
of microbatches a resumed run keeps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Moves
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import rank_units, residency_note
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency, Residency, over_ranks
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.sharding_table import RankGroup
from megatron.core.transport.traffic import NOTHING
from megatron.core.words import counted, share_text, size_text, time_text

_NS_PER_S = 1e9


@dataclass(frozen=True)
class HeldBytes:
    """What one rank holds at one moment of a step, so that kinds add up to what it holds.

    at_rest: its parts of weights, main weights, gradients and moments, as between steps. gathered: whole weights.
    gradients: whole ones that grow, wait or are being reduced. activations: None where they are not counted.
    """

    at_rest: int
    gathered: int
    gradients: int
    activations: int | None

    @property
    def total(self) -> int:
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, int]:
        """Bytes by kind, in the order in which they are told."""
        held = {"at rest": self.at_rest, "gathered": self.gathered, "gradients": self.gradients}
        return held if self.activations is None else {**held, "activations": self.activations}

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in self.kinds().items())
        return f"{size_text(self.total)} ({kinds})"


@dataclass(frozen=True)
class StepMoves:
    """What data parallelism moves in one step of one rank.

    gathers, reductions: collectives over the ranks that share its states. outer_gathers, outer_sums: over instances.
    payload_bytes: of all these, what they gathered or summed, each buffer counted once and whole. lane_share: of the
    step's time, how long the wire was busy. exposed_share: how long computations waited for it. step_s: the step's
    seconds. The last three are None where they are not known: of a plan, seconds are unknown until costs are measured.
    """

    gathers: int
    reductions: int
    outer_gathers: int
    outer_sums: int
    payload_bytes: int
    lane_share: float | None = None
    exposed_share: float | None = None
    step_s: float | None = None

    @classmethod
    def of(cls, moved: Moves, **times: Any) -> StepMoves:
        """times: lane_share, exposed_share, step_s."""
        every = vars(moved)
        calls = {name: one.calls for name, one in every.items()}
        return cls(**calls, payload_bytes=sum(one.payload_bytes for one in every.values()), **times)

    @property
    def exposed_s(self) -> float | None:
        """Seconds in which computations waited."""
        known = self.exposed_share is not None and self.step_s is not None
        return self.exposed_share * self.step_s if known else None  # type: ignore[operator]

    def __str__(self) -> str:
        outer = ((self.outer_gathers, "HSDP all-gather"), (self.outer_sums, "HSDP all-reduce"))
        counts = ((self.gathers, "gather"), (self.reductions, "reduction"), *(one for one in outer if one[0]))
        words = [*(counted(*one) for one in counts), size_text(self.payload_bytes)]
        if self.lane_share is not None:
            words.append(f"lane busy {share_text(self.lane_share, 2)}")
        if self.exposed_share is not None:
            seconds = "" if self.exposed_s is None else f" ({time_text(self.exposed_s)})"
            words.append(f"exposed {share_text(self.exposed_share, 2)}{seconds}")
        return ", ".join(words)


class RankResidency(NamedTuple):
    """What a plan says of a pipeline rank. at_once: at the moment at which it holds the most. states: at that of the
    most weights and gradients, activations not counted. activations: the most of them, None where they are not known.
    """

    rank: int
    at_once: HeldBytes
    states: HeldBytes
    activations: int | None
    moves: StepMoves


@dataclass(frozen=True)
class StepResidency:
    """Plan and measurement of one iteration, on the pipeline rank that is the fullest by plan. measured: weights and
    gradients as in `RankResidency.states`, of the ranks of the world that run its row the one that held the most.
    measured_activations: with messages; None where they are not measured."""

    iteration: int
    planned: RankResidency
    measured: HeldBytes
    measured_activations: int | None
    measured_moves: StepMoves

    def lines(self) -> list[str]:
        """After an interval's line: its last iteration, by plan and as counted."""
        where = f"iteration {self.iteration}, pipeline rank {self.planned.rank}"
        told = [
            f" residency of {where}: weights and gradients at once: planned {self.planned.states}; "
            f"measured {self.measured}"
        ]
        if self.planned.activations is not None:
            measured = self.measured_activations
            found = "not measured" if measured is None else f"measured {size_text(measured)}"
            most = size_text(self.planned.activations)
            told.append(f" activations of {where}: at most: planned {most}; {found}")
        moves = f"planned {self.planned.moves}; measured {self.measured_moves}"
        return [*told, f" moves of {where}: {moves}"]

    def scalars(self) -> dict[str, float]:
        """The same for the record; what is not known has no field."""
        scalars: dict[str, float] = {}
        for prefix, held, activations, moves in (
            ("planned", self.planned.states, self.planned.activations, self.planned.moves),
            ("measured", self.measured, self.measured_activations, self.measured_moves),
        ):
            kinds = {f"{kind.replace(' ', '-')}-bytes": size for kind, size in held.kinds().items()}
            known = {
                "held-bytes": held.total,
                **kinds,
                "activations-bytes": activations,
                "gathers": moves.gathers,
                "reductions": moves.reductions,
                "hsdp-all-gathers": moves.outer_gathers,
                "hsdp-all-reduces": moves.outer_sums,
                "moved-bytes": moves.payload_bytes,
                "lane-share": moves.lane_share,
                "exposed-share": moves.exposed_share,
                "exposed-time": moves.exposed_s,
            }
            scalars |= {f"{prefix}-{name}": value for name, value in known.items() if value is not None}
        return scalars


def start_up_lines(
    schedule: str, asked: Residency, groups: Sequence[RankGroup], planned: RankResidency
) -> list[str]:
    """What the log says at start-up. groups: of ranks that share states. planned: of the fullest pipeline rank."""
    shared = f"{asked.strategy} over {over_ranks(groups)}, policy {asked.policy}"
    unknown = "" if planned.activations is not None else ", activations apart, which are not known"
    return [
        f" > residency: {schedule}, {shared}; pipeline rank {planned.rank} holds the most at once{unknown}: "
        f"{planned.at_once}",
        f" > a step moves on pipeline rank {planned.rank}: {planned.moves}",
    ]


def peak_bytes(spec: ScheduleSpec, plan: Plan) -> tuple[float, ...]:
    """By rank, the most that it holds at once: of states at rest, activations, gathered weights and gradients."""
    assert spec.stages_units is not None, "bytes without units"
    assert spec.residency is not None, "bytes without a residency"
    every = zip(plan.rows, rank_units(plan.placement, spec.stages_units), strict=True)
    return tuple(
        units.bytes_at_rest + walk_row(row, units, spec.residency, spec.costs).peak.total
        for row, units in every
    )


def at_once_lines(spec: ScheduleSpec, num_microbatches: int, purpose: PlanPurpose) -> list[str]:
    """What the log says of a limit: how much of it the fullest rank needs."""
    if spec.residency is None or spec.residency.limit is None:
        return []
    peaks = peak_bytes(spec, plan_for(spec, num_microbatches, purpose))
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    held, limit = map(size_text, (peaks[rank], spec.residency.limit[rank]))
    return [f" > at once pipeline rank {rank} holds at most {held} of the {limit} of --rank-memory-limit"]


@functools.lru_cache(maxsize=4)
def planned_residency(
    spec: ScheduleSpec,
    num_microbatches: int,
    purpose: PlanPurpose,
    at_rest: tuple[int, ...],
    in_bytes: CostModel | None,
    costs: CostModel | None = None,
    lanes: LaneCosts | None = None,
    *,
    weights_changed: bool = True,
    repeated: bool = False,
) -> RankResidency:
    """Of the fullest pipeline rank. at_rest: by pipeline rank, bytes that it holds between steps. in_bytes: by which
    activations are counted; None: they are not known. costs, lanes: as measured, in ns; without, nothing is said of
    times. weights_changed: since the last step. repeated: the step before it was taken back, and forwards ran again."""
    assert spec.stages_units is not None, "a residency without units"
    assert spec.residency is not None, "units without a residency"
    plan, found = plan_for(spec, num_microbatches, purpose), []
    timed = None if costs is None or lanes is None else simulate(plan, costs, spec.with_lanes(lanes))
    every = rank_units(plan.placement, spec.stages_units)
    for rank, (row, units) in enumerate(zip(plan.rows, every, strict=True)):
        walk, times = walk_row(row, units, spec.residency, in_bytes), dict[str, float]()
        if timed is not None:
            times["lane_share"], times["step_s"] = timed.lane_share[rank], timed.cost / _NS_PER_S
            times["exposed_share"] = timed.exposed[rank] / timed.cost
        fullest, peak = (
            HeldBytes(at_rest[rank], one.gathered, one.gradients + one.under_way, None)
            for one in (walk.fullest, walk.peak)
        )
        most = None if in_bytes is None else round(walk.most.activation)
        if in_bytes is not None:
            peak = dataclasses.replace(peak, activations=round(walk.peak.activation))
        moves = walk.moves
        if not weights_changed:  # what instances gather comes once behind each step, and so may all else
            gathers = moves.gathers if spec.residency.weights_sharded else NOTHING
            moves = dataclasses.replace(moves, gathers=gathers, outer_gathers=NOTHING)
        if repeated:
            moves += walk.repeated
        found.append(RankResidency(rank, peak, fullest, most, StepMoves.of(moves, **times)))
    return max(found, key=lambda one: one.at_once.total)


def kept_groupings(
    spec: ScheduleSpec, saved: Mapping[int, PlannedResidency]
) -> tuple[dict[int, PlannedResidency], list[str]]:
    """A resumed run groups microbatches as the saved one did, where it is laid out and asked for alike: those that it
    takes, and a line for the log for each size where it does not, and its own groups are others."""
    if spec.residency is None or spec.stages_units is None:
        return {}, []
    own = residency_note(spec.residency, spec.stages_units, ())
    alike = {size: one for size, one in saved.items() if dataclasses.replace(one, grouping=()) == own}
    lines = []
    for size in (one for one in saved if one not in alike):
        try:
            planned = plan_for(spec, size, PlanPurpose.TRAIN).residency
        except PlanError:
            continue  # steps of this size are not run any more
        if planned is not None and planned.grouping != saved[size].grouping:
            lines.append(
                f" > gradients of {size} microbatches are grouped otherwise than in the saved run: before each "
                "reduction others are added up, so that sums are rounded otherwise (docs/numerics.md)"
            )
    return alike, lines
