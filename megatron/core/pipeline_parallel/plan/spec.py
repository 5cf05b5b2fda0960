"""One value from which every plan of a run follows (`build.plan_for`): schedule, stages, costs, what ranks may hold."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import B, W
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES, Schedule
from megatron.core.pipeline_parallel.plan.text import PlanFile
from megatron.core.words import plain, size_text, time_text


class PlanPurpose(enum.Enum):
    """What a plan is run for. ORDER: nothing, it has the computations alone, whatever they hold."""

    ORDER = "order"
    TRAIN = "train"
    TRAIN_AND_STEP = "train and step"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class StageSpec:
    """What one global stage holds: layers by their global numbers from 0, the embedding, the head with the loss."""

    layers: tuple[int, ...]
    embedding: bool
    loss: bool


@dataclass(frozen=True)
class ScheduleSpec:
    """What every rank of the pipeline does in a step.

    schedule: a name of the table, or of a plan from a file. stages: by global stage, () where nobody asks. group_size:
    microbatches that a chunk takes in turn, None without. costs: of stages; estimated: they are the model's, with
    activations in bytes and times in layers, else of equal ranks with F = B = W. measured: times are a run's, in ns.
    keeps_gathered: under sequence parallel F keeps for W what it has gathered, and costs are those of that. masked: all
    stages need batches, for the masks of their layers. limits: by rank, what it may hold of activations; None: what the
    schedule has of itself. limit_in_stages: limits are so many whole stages, of whatever costs; None: they are sizes.
    file: the plan that is run instead of a generator's. rivals: (name, group size) of schedules on the same stages,
    from which `auto` has chosen this one; reasons: why, a line a candidate. stages_units, residency: what data
    parallelism asks of the plan, by global stage and of all ranks; None: its operations are not in the plan. lanes:
    what these take in ns; None while costs are not a run's. groupings: by number of microbatches, which of them a plan
    has summed up together: plans of these sizes keep that, and with it the run's bits. saved_in: the folder in which
    searched orders are kept, None: nowhere.
    """

    schedule: str
    placement: Placement
    costs: CostModel
    stages: tuple[StageSpec, ...] = ()
    group_size: int | None = None
    estimated: bool = False
    measured: bool = False
    keeps_gathered: bool = False
    masked: bool = False
    limits: tuple[float, ...] | None = None
    limit_in_stages: float | None = None
    file: PlanFile | None = None
    rivals: tuple[tuple[str, int | None], ...] = ()
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    stages_units: tuple[StageUnits, ...] | None = None
    residency: Residency | None = None
    lanes: LaneCosts | None = None
    groupings: tuple[tuple[int, Grouping], ...] = ()
    saved_in: str | None = dataclasses.field(default=None, compare=False)

    @property
    def row(self) -> Schedule:
        """Of the table. Not where the plan is a file's."""
        assert self.file is None, f"the plan of a file, {self.schedule}, has no row"
        return SCHEDULES[self.schedule]

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the backward of the input."""
        if self.file is not None:
            return any(op[0] in (B, W) for row in self.file.plan.rows for op in row)
        return self.row.splits

    @property
    def reads_costs(self) -> bool:
        """Whether other costs may make another plan: a schedule that is searched, or `auto`."""
        return self.file is None and (bool(self.rivals) or self.row.searched)

    @property
    def whole_stage(self) -> float:
        """Activations of one microbatch on the rank that has the most of them, see `CostModel.whole_stage`."""
        return self.costs.whole_stage(self.placement)

    @property
    def bare(self) -> ScheduleSpec:
        """Without data parallelism: what plans are saved and compared by."""
        return dataclasses.replace(self, stages_units=None, residency=None, lanes=None)

    def with_lanes(self, costs: LaneCosts | None) -> Lanes | None:
        """What this one's plans are timed by; None without operations of data parallelism, or what these take."""
        if costs is None or self.stages_units is None or self.residency is None:
            return None
        return Lanes(self.stages_units, self.residency, costs)

    def local_stages(self, pp_rank: int) -> tuple[int, ...]:
        """Global stages of a pipeline rank, by chunk."""
        return self.placement.stages_of(pp_rank)

    def held_by(self, pp_rank: int) -> tuple[StageSpec, ...]:
        """What a pipeline rank holds, by chunk."""
        return tuple(self.stages[stage] for stage in self.local_stages(pp_rank))

    def reads_data(self, pp_rank: int) -> bool:
        """Whether a pipeline rank needs batches: for the embedding, the loss, or masks."""
        return self.masked or any(one.embedding or one.loss for one in self.held_by(pp_rank))

    def request(self, num_microbatches: int) -> Request:
        """What the schedule's generator is asked for."""
        p = self.placement
        chunks = p.num_chunks if p.kind != V_SHAPED else None
        return Request(p.num_ranks, num_microbatches, chunks, self.group_size, self.costs, self.limits)

    def describe_time(self, time: float) -> str:
        """In the costs' unit, such as `27.761 ms` of a run and `27.76 x F of a layer` by the model."""
        if self.measured:
            return time_text(time / 1e9, 5)
        return plain(time) + " x F of a layer" * self.estimated

    def describe_activation(self, size: float) -> str:
        """In the costs' unit, such as `12.5 MiB`."""
        return size_text(size, "bytes" if self.estimated else "")

    def under(self, costs: CostModel, lanes: LaneCosts | None = None) -> ScheduleSpec:
        """The same by measured costs; limits in whole stages are those of these costs."""
        limits = self.limits
        if self.limit_in_stages is not None:
            whole = costs.whole_stage(self.placement)
            limits = (self.limit_in_stages * whole,) * self.placement.num_ranks
        return dataclasses.replace(self, costs=costs, measured=True, limits=limits, lanes=lanes)
