"""What a generator is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import PlanError


@dataclass(frozen=True)
class Request:
    """num_chunks: stages a rank, None = the schedule's default. group_size: of interleaving, None = num_ranks."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise PlanError(f"{name.removeprefix('num_')} must be at least 1, not {value}")

    def one_chunk(self, schedule: str) -> None:
        """Refuse what only interleaving can do."""
        if self.num_chunks not in (None, 1):
            raise PlanError(f"{schedule} has one chunk a stage, not {self.num_chunks}: use interleaved")
        if self.group_size is not None:
            raise PlanError(f"{schedule} has no microbatch groups: use interleaved")
