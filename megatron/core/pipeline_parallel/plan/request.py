"""What a generator is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement


@dataclass(frozen=True)
class Request:
    """num_chunks: stages a rank, None = the schedule's default. group_size: of interleaving, None = num_ranks.

    costs: by global stage of the schedule's placement, for schedules that are searched; None: F, B and W of a rank take
    1 each, transfers nothing, and a rank's microbatch holds 1 until its W. memory_limit: by rank, in the unit of the
    costs' activations, what it may hold; None = the schedule's own.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None
    group_size: int | None = None
    costs: CostModel | None = None
    memory_limit: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks", "group_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name.removeprefix('num_')} must be at least 1, not {value}")
        if self.memory_limit is not None and len(self.memory_limit) != self.num_ranks:
            raise PlanError(
                f"{len(self.memory_limit)} memory limits for {self.num_ranks} ranks: give one a rank"
            )

    def costs_on(self, placement: Placement) -> CostModel:
        """The costs, or the equal ones. Raises PlanError for costs of another placement."""
        if self.costs is None:
            return CostModel.of_ranks(placement)
        if len(self.costs.f) != placement.num_stages:
            raise PlanError(f"costs of {len(self.costs.f)} stages for a schedule of {placement.num_stages}")
        return self.costs

    def one_chunk(self, schedule: str) -> None:
        """Refuse what only interleaving can do."""
        if self.num_chunks not in (None, 1):
            raise PlanError(f"{schedule} has one chunk a stage, not {self.num_chunks}: use interleaved")
        if self.group_size is not None:
            raise PlanError(f"{schedule} has no microbatch groups: use interleaved")

    def on_v(self, schedule: str) -> Placement:
        """Two chunks a rank on a V. Raises PlanError for a request of more or fewer, or of microbatch groups."""
        if self.num_chunks not in (None, 2):
            raise PlanError(
                f"{schedule} has two chunks a rank, not {self.num_chunks}: leave the number of chunks out, or use"
                " interleaved"
            )
        if self.group_size is not None:
            raise PlanError(f"{schedule} has no microbatch groups: use interleaved or gis")
        return Placement(V_SHAPED, self.num_ranks, 2)
