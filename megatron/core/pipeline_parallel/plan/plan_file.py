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
                f"--pipeline-schedule-file {self.path} is a plan for {self.plan.num_microbatches} microbatches a step, "
                f"this one has {num_microbatches}: change --global-batch-size, or save a plan for it"
            )
        rows = tuple(tuple(op for op in row if IS_COMPUTE[op[0]]) for row in self.plan.rows)
        return dataclasses.replace(self.plan, rows=rows, residency=None)


def load_plan(path: str, num_ranks: int, *, post_validation: bool) -> PlanFile:
    """A saved plan in JSON, for a pipeline of these ranks. post_validation: the run validates steps afterwards.

    Raises PlanError naming the file.
    """
    flag = f"--pipeline-schedule-file {path}"
    try:
        plan = from_json(safe_files.read_text(path, max_bytes=MAX_BYTES, follow=True))
        verify(plan)
    except OSError as error:
        raise PlanError(f"{flag} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{flag}: {error}") from None
    file, ranks = PlanFile(path, plan), plan.placement.num_ranks
    if plan.forward_only:
        raise PlanError(f"{flag} is the plan of an evaluation: save one for training")
    if ranks != num_ranks:
        raise PlanError(
            f"{flag} is a plan for {ranks} pipeline ranks, --pipeline-model-parallel-size is {num_ranks}"
        )
    if file.steps and not post_validation:
        raise PlanError(
            f"{flag} makes and validates the optimizer's steps: give --enable-optimizer-post-validation"
        )
    return file
