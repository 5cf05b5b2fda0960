"""DualPipeV: forwards of one direction of the V beside backwards of the other (DeepSeek's DualPipe, "cut in half")."""

from __future__ import annotations

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
    row = _Row(placement.stage_of(rank, 0), placement.stage_of(rank, 1))
    below, place = placement.num_ranks - 1 - rank, rank + 1
    for _ in range(2 * below):
        row.add(F, 0)
    for _ in range(place):
        row.add(F, 0)
        row.add(F, 1)
    for _ in range(below):
        row.add(B, 1)
        row.weight_gradient()
        row.add(F, 1)
    for turn in range(total - 2 * placement.num_ranks + place):
        if turn == 0 and below == 0:
            # Its output is the input that the rank itself and the one before wait for: beside a backward it is late.
            row.add(F, 0)
            row.add(BW, 1)
        else:
            row.overlap(0, 1)
        row.overlap(1, 0)
    for _ in range(below):
        row.add(BW, 1)
        row.overlap(1, 0)
    for backward in range(2 * place):
        # The latter half is split, so that the first ranks need not wait for weight gradients of the others.
        row.add(BW if backward < place else B, 1 - backward % 2)
    for _ in range(below):
        row.weight_gradient()
        row.add(B, 0)
    for _ in range(place):
        row.weight_gradient()
    assert not row.waiting, row.waiting
    return tuple(row.ops)


class _Row:
    """A row as it grows: next microbatch of each chunk's F and B, and weight gradients that wait, oldest first."""

    def __init__(self, first_stage: int, second_stage: int) -> None:
        self.stages = (first_stage, second_stage)
        self.ops: list[RawOp] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.waiting: list[tuple[int, int]] = []
        self.pairs = 0

    def add(self, kind: int, chunk: int) -> None:
        """The chunk's next F, B or BW."""
        counts = self.forwards if kind == F else self.backwards
        stage, microbatch = self.stages[chunk], counts[chunk]
        self.ops.append(compute(kind, stage, microbatch))
        counts[chunk] += 1
        if kind == B:
            self.waiting.append((stage, microbatch))

    def weight_gradient(self) -> None:
        """The W that waits longest."""
        self.ops.append(compute(W, *self.waiting.pop(0)))

    def overlap(self, forward: int, backward: int) -> None:
        """An F of one chunk beside a BW of the other."""
        self.add(F, forward)
        self.add(BW, backward)
        self.ops[-2:] = [(*op[:7], self.pairs) for op in self.ops[-2:]]
        self.pairs += 1
