"""DualPipeV: forwards of one direction of the V beside backwards of the other (DeepSeek's DualPipe, arXiv
2412.19437, 3.2.1, "cut in half")."""

from __future__ import annotations

import itertools
from collections import deque

from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, PlanError, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request


def dualpipe_v(request: Request) -> Plan:
    """Each rank's steps are counted, not searched; an F and a BW that overlap are a pair.

    With chunk times F = B and W, and a pair as long as both, the bubble is (p-1)(F+2B-W). Every rank holds 2p+1 chunks'
    activations at its peak. Gradients of a stage come in microbatch order: a rank that has begun to split its last
    backwards stays with it, and its weight gradients wait in one queue.
    Raises PlanError for fewer than two microbatches a rank.
    """
    placement = request.on_v("dualpipe-v")
    num_ranks, total = request.num_ranks, request.num_microbatches
    if total < 2 * num_ranks:
        raise PlanError(
            f"dualpipe-v needs at least two microbatches a rank, {2 * num_ranks}, not {total}: raise the global batch"
            " size, or use zbv"
        )
    rows = tuple(_row(rank, placement, total) for rank in range(num_ranks))
    return Plan("dualpipe-v", placement, total, rows)


def _row(rank: int, placement: Placement, total: int) -> tuple[RawOp, ...]:
    """The steps: fill the first chunk, both chunks, drain the second while it fills; pairs; then the same backwards."""
    stages, ops = placement.stages_of(rank), list[RawOp]()
    below, place = placement.num_ranks - 1 - rank, rank + 1
    microbatches = [[itertools.count() for _ in stages] for _ in ("forward", "backward")]
    pairs, waiting = itertools.count(), deque[RawOp]()  # B's whose weight gradients wait, oldest first

    def add(kind: int, chunk: int) -> None:  # the chunk's next F, B or BW
        ops.append(compute(kind, stages[chunk], next(microbatches[kind != F][chunk])))
        waiting.extend(ops[-1:] if kind == B else ())

    def add_w() -> None:
        ops.append(compute(W, *waiting.popleft()[1:3]))

    def overlap(forward: int, backward: int) -> None:  # an F of one chunk beside a BW of the other
        add(F, forward)
        add(BW, backward)
        pair = next(pairs)
        ops[-2:] = [(*op[:7], pair) for op in ops[-2:]]

    for _ in range(2 * below):
        add(F, 0)
    for _ in range(place):
        add(F, 0)
        add(F, 1)
    for _ in range(below):
        add(B, 1)
        add_w()
        add(F, 1)
    for turn in range(total - 2 * placement.num_ranks + place):
        if turn == 0 and below == 0:
            # Its output is the input that the rank itself and the one before wait for: beside a backward it is late.
            add(F, 0)
            add(BW, 1)
        else:
            overlap(0, 1)
        overlap(1, 0)
    for _ in range(below):
        add(BW, 1)
        overlap(1, 0)
    for backward in range(2 * place):
        # The latter half is split, so that the first ranks need not wait for weight gradients of the others.
        add(BW if backward < place else B, 1 - backward % 2)
    for _ in range(below):
        add_w()
        add(B, 0)
    for _ in range(place):
        add_w()
    assert not waiting, waiting
    return tuple(ops)
