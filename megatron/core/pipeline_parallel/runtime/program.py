"""A row of a plan as calls: checked once before the first step, and put together to what runs as one."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.ir import B, F, Kind, Plan, PlanError, RawOp, Row, W
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import Placed
from megatron.core.protocols import Stage


class Step(NamedTuple):
    """A call: of a computation, a batch of transfers, a `Placed` operation of data parallelism, or another operation.
    places: in the row."""

    call: Callable[[Any], None]
    argument: Any
    places: tuple[int, ...]


def check_row(
    plan: Plan, rank: int, stages: Mapping[int, Stage], known: Container[int], *, units: bool
) -> None:
    """Raises PlanError where a rank's row asks for what nobody here does. known: kinds with a handler, transfers apart.
    units: whether those of stages are known."""
    local = [one == rank for one in plan.placement.ranks()]
    mine = {stage for stage, here in enumerate(local) if here}
    assert set(stages) == mine, f"rank {rank} has stages {sorted(mine)}, given {sorted(stages)}"
    for op in plan.rows[rank]:
        kind, problem = Kind(op[0]), ""
        if kind not in known and not ir.IS_TRANSFER[kind]:
            needed = "a data parallel engine" if ir.IS_BESIDE[kind] else "a handler"
            needed = "a validation" if kind == Kind.VALIDATE else needed
            problem = f"nothing here does {kind.name}; it needs {needed}"
        elif ir.HAS_MICROBATCH[kind] and (op[3] or (op[4] >= 0 and not (kind == W and units))):
            problem = (
                "stages compute whole microbatches of all their units; only W may have parts, where a data parallel "
                "engine knows units"
            )
        elif kind in (B, W) and not stages[op[1]].splits:
            problem = (
                f"stage {op[1]} cannot split B from W, because autograd accumulates its gradients; use a schedule of F "
                "and BW, such as 1f1b, or layers that put them into a sink"
            )
        elif kind == F and op[1] > 0 and not local[op[1] - 1] and not plan.has_transfers:
            problem = "the plan has no transfers; `lower` adds them"
        if problem:
            raise PlanError(f"rank {rank}: {ir.op_text(op)}: {problem}")


def compile_row(
    row: Row,
    table: Mapping[int, Callable[[Any], None]],
    transfer: Callable[[Any], None],
    computation: Callable[[RawOp, list[Placed]], Any],
) -> list[Step]:
    """The row with each operation's handler from the table; neighbouring transfers are one step. An operation of data
    parallelism that waits for accesses to begin is done in the middle of the computation behind it, whose argument
    (`computation`) takes it. Raises PlanError where there is none."""
    program: list[Step] = []
    within: list[Placed] = []
    for place, op in enumerate(row):
        kind = op[0]
        if ir.IS_TRANSFER[kind]:
            batch: tuple[RawOp, ...] = ()
            places: tuple[int, ...] = ()
            if program and program[-1].call == transfer:
                _, batch, places = program.pop()
            program.append(Step(transfer, (*batch, op), (*places, place)))
        elif ir.IS_BESIDE[kind] and op[3]:
            within.append((place, op))
        else:
            argument: Any = (place, op) if ir.IS_BESIDE[kind] else op
            if ir.IS_COMPUTE[kind]:
                argument = computation(op, within)
                within = []
            program.append(Step(table[kind], argument, (place,)))
    if within:
        raise PlanError(f"{ir.op_text(within[0][1])}: no computation comes behind it")
    return program
