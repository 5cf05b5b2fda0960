"""Interleaved schedules: several chunks a rank, groups of microbatches through each in turn. Interleaved 1F1B (arXiv
2104.04473, 2.2.2), and grouped interleaving, which runs less far ahead, with B and W apart (arXiv 2503.01328, GIS)."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, PlanError, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.placement import LOOPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request

DEFAULT_CHUNKS = 2


def interleaved(request: Request) -> Plan:
    """Groups of request.group_size microbatches (default: one a rank); with one chunk this is the order of 1F1B.

    With several chunks a rank runs twice as far ahead, so that the way of a microbatch from the last rank back to the
    first one is covered by other forwards.
    Raises PlanError for fewer microbatches than a group and for groups smaller than the pipeline.
    """
    num_ranks, total, chunks, group = _sizes(request)
    if group < num_ranks:
        raise PlanError(f"groups of {group} microbatches are smaller than the pipeline of {num_ranks} stages")
    if total < group:
        raise PlanError(f"interleaved needs at least its group size, {group}, of microbatches, not {total}")
    far = 2 if chunks > 1 else 1
    ahead = [(num_ranks - 1 - rank) * far + (chunks - 1) * group + 1 for rank in range(num_ranks)]
    return _plan("interleaved", request, ahead, (BW,))


def grouped(request: Request) -> Plan:
    """Groups of ceil(p/2) to p microbatches (request.group_size; default p) go through each chunk in turn.

    Rank r of p, with v chunks and groups of g, runs g(v-1)+p-r forwards before its first backward, and so holds that
    many: 1/v of 1F1B's whole stages for each, at most p + (v-1)(g-p)/v of them. Bubble with chunk times F and B and
    whole groups: (p-1)(F+B), for g < p a little more, where the first and the last chunks wait for the way around.

    Why this cannot deadlock: rank 0 runs its turn k of F once its turns of backward before k-g(v-1)-p are done, and
    needs turn k-g of the last rank, which needs turns before k-gv-1 of that rank's backward, those turns before
    k-g(v+1)-1 of rank 0's, and these again rank 0's forwards before k-2g+p-1: turns before k where 2g >= p. Smaller
    groups would wait for themselves.

    Raises PlanError for one chunk, and for groups of another size.
    """
    num_ranks, _, chunks, group = _sizes(request)
    least = -(-num_ranks // 2)
    if chunks < 2:
        raise PlanError("gis interleaves at least 2 chunks a rank, not 1: use zb-h1, or give more chunks")
    if not least <= group <= num_ranks:
        raise PlanError(
            f"gis on {num_ranks} ranks has groups of {least} to {num_ranks} microbatches, not {group}"
        )
    return _plan(
        "gis", request, [group * (chunks - 1) + num_ranks - rank for rank in range(num_ranks)], (B, W)
    )


def _sizes(request: Request) -> tuple[int, int, int, int]:
    """Ranks, microbatches, chunks a rank, microbatches a group."""
    num_ranks, chunks, group = request.num_ranks, request.num_chunks, request.group_size
    return num_ranks, request.num_microbatches, chunks or DEFAULT_CHUNKS, group or num_ranks


def _plan(schedule: str, request: Request, ahead: list[int], backward: tuple[int, ...]) -> Plan:
    """ahead: by rank, forwards before its first backward. backward: one is these operations.

    The order is made for whole groups, and the microbatches that do not exist are dropped: made straight for a last
    group shorter than the pipeline it could deadlock, while a subset of a valid order cannot.
    """
    num_ranks, total, chunks, group = _sizes(request)
    turns = [
        (chunk, microbatch)
        for first in range(0, total, group)
        for chunk in range(chunks)
        for microbatch in range(first, first + group)
    ]
    placement = Placement(LOOPED, num_ranks, chunks)
    rows = tuple(_row(rank, placement, ahead[rank], backward, turns, total) for rank in range(num_ranks))
    return Plan(schedule, placement, total, rows)


def _row(
    rank: int,
    placement: Placement,
    ahead: int,
    backward: tuple[int, ...],
    turns: list[tuple[int, int]],
    total: int,
) -> tuple[RawOp, ...]:
    """`ahead` forwards, then a backward and a forward in turns, then the backwards that are left: in the order of the
    forwards, with the chunks reversed."""
    forwards = [compute(F, placement.stage_of(rank, chunk), m) for chunk, m in turns]
    row, left = forwards[:ahead], iter(forwards[ahead:])
    for chunk, m in turns:
        stage = placement.stage_of(rank, placement.num_chunks - 1 - chunk)
        row += [compute(kind, stage, m) for kind in backward]
        row += [op for op in (next(left, None),) if op is not None]
    return tuple(op for op in row if op[2] < total)
