"""Interleaved 1F1B: several chunks a rank, groups of microbatches through each in turn (arXiv 2104.04473, 2.2.2)."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import BW, F, Plan, PlanError, RawOp, compute
from megatron.core.pipeline_parallel.plan.placement import LOOPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request

DEFAULT_CHUNKS = 2


def interleaved(request: Request) -> Plan:
    """Groups of request.group_size microbatches (default: one a rank); a remainder is a short last group.

    The order is made for whole groups, and the microbatches that do not exist are dropped: made straight for a
    last group shorter than the pipeline it could deadlock, while a subset of a valid order cannot.
    With one chunk this is the order of 1F1B.
    Raises PlanError for fewer microbatches than a group and for groups smaller than the pipeline.
    """
    num_ranks, total = request.num_ranks, request.num_microbatches
    chunks = DEFAULT_CHUNKS if request.num_chunks is None else request.num_chunks
    group = num_ranks if request.group_size is None else request.group_size
    if group < num_ranks:
        raise PlanError(f"groups of {group} microbatches are smaller than the pipeline of {num_ranks} stages")
    if total < group:
        raise PlanError(f"interleaved needs at least its group size, {group}, of microbatches, not {total}")
    turns = [
        (chunk, microbatch)
        for first in range(0, total, group)
        for chunk in range(chunks)
        for microbatch in range(first, first + group)
    ]
    placement = Placement(LOOPED, num_ranks, chunks)
    rows = tuple(_row(rank, placement, total, group, turns) for rank in range(num_ranks))
    return Plan("interleaved", placement, total, rows)


def _row(
    rank: int, placement: Placement, total: int, group: int, turns: list[tuple[int, int]]
) -> tuple[RawOp, ...]:
    """Forwards in the order of turns, backwards in the same order with the chunks reversed."""
    chunks, num_ranks = placement.num_chunks, placement.num_ranks
    forwards = [compute(F, chunk * num_ranks + rank, m) for chunk, m in turns]
    backwards = [compute(BW, (chunks - 1 - chunk) * num_ranks + rank, m) for chunk, m in turns]
    # With several chunks a rank runs twice as far ahead, so that the way of a microbatch from the last rank back to
    # the first one is covered by other forwards.
    distance = (num_ranks - 1 - rank) * (2 if chunks > 1 else 1)
    ahead = min(distance + (chunks - 1) * group, len(turns))
    row = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards, strict=False):
        row += pair
    row += backwards[len(turns) - ahead :]
    return tuple(op for op in row if op[2] < total)
