"""--pipeline-schedule-file: a saved plan that is run instead of a schedule by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.core import safe_files
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, PlanError
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE
from megatron.core.pipeline_parallel.plan.text import from_json
from megatron.core.pipeline_parallel.plan.verify import verify

MAX_BYTES = 1 << 24  # 64 ranks with 1024 microbatches on a V


@dataclass(frozen=True)
class PlanFile:
    """A plan, and where it was read."""

    path: str
    plan: Plan = dataclasses.field(hash=False)  # plans may be large

    @property
    def steps(self) -> bool:
        """Whether it has the operations of post-validation."""
        return any(op[0] == Kind.STEP for row in self.plan.rows for op in row)

    def order(self, num_microbatches: int) -> Plan:
        """Its computations. Raises PlanError for another number of microbatches."""
        if self.plan.num_microbatches != num_microbatches:
            raise PlanError(
                f"{_told(self.path)} is a plan for {self.plan.num_microbatches} microbatches a step, this one has "
                f"{num_microbatches}: change --global-batch-size, or save a plan for it"
            )
        rows = tuple(tuple(op for op in row if IS_COMPUTE[op[0]]) for row in self.plan.rows)
        return dataclasses.replace(self.plan, rows=rows, residency=None)


def load_plan(path: str, num_ranks: int, *, post_validation: bool) -> PlanFile:
    """A saved plan in JSON, for a pipeline of these ranks. post_validation: the run validates steps afterwards.

    Raises PlanError naming the file.
    """
    try:
        plan = from_json(safe_files.read_text(path, max_bytes=MAX_BYTES, follow=True))
        verify(plan)
    except OSError as error:
        raise PlanError(f"{_told(path)} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{_told(path)}: {error}") from None
    if plan.forward_only:
        raise PlanError(f"{_told(path)} is the plan of an evaluation: save one for training")
    if plan.placement.num_ranks != num_ranks:
        raise PlanError(
            f"{_told(path)} is a plan for {plan.placement.num_ranks} pipeline ranks, --pipeline-model-parallel-size is "
            f"{num_ranks}"
        )
    file = PlanFile(path, plan)
    if file.steps and not post_validation:
        raise PlanError(
            f"{_told(path)} makes and validates the optimizer's steps: give --enable-optimizer-post-validation"
        )
    return file


def _told(path: str) -> str:
    return f"--pipeline-schedule-file {path}"
