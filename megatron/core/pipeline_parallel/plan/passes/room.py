"""How much of weights and gradients a policy keeps: bytes by moment, and the gaps that are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron.core.pipeline_parallel.plan.activations import activations
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, PlanError
from megatron.core.pipeline_parallel.plan.passes.keep import keep_gaps
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.row_uses import Gap, RowUses, Span


def room_to_keep(uses: RowUses, residency: Residency) -> list[float]:
    """By moment, bytes of weights and gradients that may be kept over gaps where no limit says so (see `fit_limit`)."""
    room = math.inf if residency.policy == "step" else 0.0
    if residency.budget is not None:
        room = float(residency.budget[uses.units.rank])
    return [room] * uses.num_moments


def room_beside_activations(
    uses: RowUses, residency: Residency, costs: CostModel, *, forward_only: bool
) -> list[float]:
    """By moment, bytes of a limit that states at rest and activations leave: C(t) of docs/design/007-one-plan.md."""
    assert residency.limit is not None, residency
    free = residency.limit[uses.units.rank] - uses.units.shard_bytes
    ends = [first for _, first in uses.computations[1:]] + [uses.num_moments]
    held = activations(uses.row, costs, forward_only=forward_only)
    room: list[float] = []
    for (_, used, _), (_, first), end in zip(held, uses.computations, ends, strict=True):
        room += [free - used] * (end - first)
    return room


def kept_gaps(
    uses: RowUses,
    residency: Residency,
    room: Sequence[float],
    grouping: Grouping | None,
    *,
    grads_alone: bool = False,
) -> set[Gap]:
    """The gaps over which weights and gradients are kept. grouping: which gradients are, whatever the policy
    says. grads_alone: of what comes and goes."""
    weights, grads = uses.gaps()
    if grads_alone and residency.weights_cut:
        weights = []
    kept: set[Gap] = set()
    if not residency.weights_cut:  # whole at rest
        kept, weights = set(weights), []
    if not residency.grads_cut:
        kept, grads = kept | set(grads), []
    elif grouping is not None:
        kept, grads = kept | set(_grouped(uses, grads, grouping)), []
    elif residency.policy == "backward":
        grads = []
    if residency.policy == "backward":
        return kept | {gap for gap in weights if _to_backward(uses.reads[gap.unit], gap)}
    if residency.policy == "step":
        return kept | {*weights, *grads}
    if residency.policy == "memory":
        return kept
    left = list(room)
    if residency.grads_cut:
        for gap in (gap for gap in kept if not gap.weights):
            for moment in range(gap.start, gap.end):
                left[moment] -= gap.size
    return kept | keep_gaps(weights + grads, left)


def bytes_kept(uses: RowUses, kept: Iterable[Gap]) -> list[int]:
    """By moment."""
    change = [0] * (uses.num_moments + 1)
    for gap in kept:
        change[gap.start] += gap.size
        change[gap.end] -= gap.size
    total, found = 0, []
    for one in change[:-1]:
        total += one
        found.append(total)
    return found


def _to_backward(spans: Sequence[Span], gap: Gap) -> bool:
    """Whether a gap is between the F and the backward of one microbatch."""
    forward, backward = spans[gap.index].end, spans[gap.index + 1].begin
    return forward[0] == F and backward[0] in (B, BW) and forward[2] == backward[2]


def _grouped(uses: RowUses, gaps: Sequence[Gap], grouping: Grouping) -> list[Gap]:
    """Of the gaps between contributions those inside a group. Raises PlanError where the row's order forbids
    them."""
    kept = []
    by_place = {(gap.unit, gap.index): gap for gap in gaps}
    for unit, spans in enumerate(uses.adds):
        groups = _groups_of(uses, unit, spans, grouping)
        for index in range(len(groups) - 1):
            if groups[index] == groups[index + 1]:
                kept.append(by_place[unit, index])
            elif groups[index] > groups[index + 1]:
                raise PlanError(
                    f"rank {uses.units.rank}: two stages share unit {uses.units.unit(unit).name}, and this order adds "
                    "their gradients in another order than the stored grouping, which keeps a run's bits, allows"
                )
    return kept


def _groups_of(uses: RowUses, unit: int, spans: Sequence[Span], grouping: Grouping) -> list[int]:
    """For each contribution of a unit the number of its REDUCE."""
    left: dict[int, list[int]] = {}
    for stage in {span.begin[1] for span in spans}:
        sizes = grouping[stage][uses.units.of[stage].index(unit)]
        left[stage] = [number for number, size in enumerate(sizes) for _ in range(size)][::-1]
    found = []
    for span in spans:
        mine = left[span.begin[1]]
        if not mine:
            raise PlanError(
                f"rank {uses.units.rank}: the stored grouping of unit {uses.units.unit(unit).name} has fewer"
                " microbatches than the plan"
            )
        found.append(mine.pop())
    return found
