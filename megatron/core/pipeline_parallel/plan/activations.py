"""What a row's activations take, computation by computation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import F, PlanError, Row, W, op_text
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE


def activations(
    row: Row, costs: CostModel, *, forward_only: bool = False
) -> Iterator[tuple[int, float, float]]:
    """For each computation its place, what is held while it runs, and behind it; in the cost model's unit.

    F takes its activation at its start, B, W and BW free it at their ends; a B that leaves more than F did
    takes the difference at its start. Of a W in parts the last one frees. forward_only: F itself frees at its
    end.
    """
    num_units = units_of_parts(row)
    left: dict[tuple[int, int], int] = {}  # of a W in parts, units still to come
    held = 0.0
    for place, op in enumerate(row):
        kind, stage = op[0], op[1]
        if not IS_COMPUTE[kind]:
            continue
        if kind == F:
            after = held + costs.activation[stage]
            yield place, after, held if forward_only else after
            held = held if forward_only else after
            continue
        if kind == W and op[4] >= 0:
            left[stage, op[2]] = left.get((stage, op[2]), num_units[stage]) - (op[5] - op[4])
            if left[stage, op[2]]:
                yield place, held, held
                continue
        after = held - costs.released(kind, stage)
        yield place, max(held, after), after
        held = after


def units_of_parts(row: Row) -> dict[int, int]:
    """How many units a stage has, where a row tells it by W's in parts."""
    found: dict[int, int] = {}
    for op in row:
        if op[0] == W and op[4] >= 0:
            found[op[1]] = max(found.get(op[1], 0), op[5])
    return found


def peak_activation(rank: int, row: Row, costs: CostModel, *, forward_only: bool = False) -> float:
    """The most that a rank's activations take. Raises PlanError where more is freed than is held."""
    peak = 0.0
    for place, during, after in activations(row, costs, forward_only=forward_only):
        peak = max(peak, during)
        if after < -1e-6:
            raise PlanError(
                f"rank {rank}, place {place}, {op_text(row[place])}: frees more activation than is held"
            )
    return round(peak, 9)
