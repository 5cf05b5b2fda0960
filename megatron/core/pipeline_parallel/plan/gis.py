"""Grouped interleaving: interleaved 1F1B that runs less far ahead, with B and W apart (arXiv 2503.01328, GIS)."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import B, F, Plan, PlanError, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.placement import LOOPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request

DEFAULT_CHUNKS = 2


def grouped(request: Request) -> Plan:
    """Groups of ceil(p/2) to p microbatches (request.group_size; default p) go through each chunk in turn.

    Rank r of p, with v chunks and groups of g, runs g(v-1)+p-r forwards before its first backward, and so holds that
    many: 1/v of 1F1B's whole stages for each, at most p + (v-1)(g-p)/v of them. Bubble with chunk times F and B and
    whole groups: (p-1)(F+B), for g < p a little more, where the first and the last chunks wait for the way around.

    Why this cannot deadlock: rank 0 runs its turn k of F once its turns of backward before k-g(v-1)-p are done, and
    needs turn k-g of the last rank, which needs turns before k-gv-1 of that rank's backward, those turns before
    k-g(v+1)-1 of rank 0's, and these again rank 0's forwards before k-2g+p-1: turns before k where 2g >= p. Smaller
    groups would wait for themselves. A short last group is a whole one without the microbatches that do not exist:
    a subset of a valid order is one.

    Raises PlanError for one chunk, and for groups of another size.
    """
    num_ranks, total = request.num_ranks, request.num_microbatches
    chunks = DEFAULT_CHUNKS if request.num_chunks is None else request.num_chunks
    group = num_ranks if request.group_size is None else request.group_size
    least = -(-num_ranks // 2)
    if chunks < 2:
        raise PlanError("gis interleaves at least 2 chunks a rank, not 1: use zb-h1, or give more chunks")
    if not least <= group <= num_ranks:
        raise PlanError(
            f"gis on {num_ranks} ranks has groups of {least} to {num_ranks} microbatches, not {group}"
        )
    turns = [
        (chunk, microbatch)
        for first in range(0, total, group)
        for chunk in range(chunks)
        for microbatch in range(first, first + group)
    ]
    placement = Placement(LOOPED, num_ranks, chunks)
    rows = tuple(
        _row(rank, placement, total, group * (chunks - 1) + num_ranks - rank, turns)
        for rank in range(num_ranks)
    )
    return Plan("gis", placement, total, rows)


def _row(
    rank: int, placement: Placement, total: int, ahead: int, turns: list[tuple[int, int]]
) -> tuple[RawOp, ...]:
    """`ahead` forwards, then turns of B, W and F, then the backwards that are left."""
    ahead = min(ahead, len(turns))
    row = [compute(F, placement.stage_of(rank, chunk), m) for chunk, m in turns[:ahead]]
    for turn, (chunk, m) in enumerate(turns):
        stage = placement.stage_of(rank, placement.num_chunks - 1 - chunk)
        row += (compute(B, stage, m), compute(W, stage, m))
        if ahead + turn < len(turns):
            next_chunk, next_m = turns[ahead + turn]
            row.append(compute(F, placement.stage_of(rank, next_chunk), next_m))
    return tuple(op for op in row if op[2] < total)
