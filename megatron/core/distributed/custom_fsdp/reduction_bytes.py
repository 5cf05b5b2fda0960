"""What reductions take beside gradients while they are under way, by what starts them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

from megatron.core.distributed.custom_fsdp.grad_reduce_pipeline import GradReducePipeline, GradState, Sum
from megatron.core.distributed.custom_fsdp.transient_memory import with_memory
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.lanes import UnderWay, lane_of
from megatron.core.transport import collectives


def exchange_bytes(unit: GradState, *, outer: bool = False, again: bool = False) -> int:
    """Of summing a unit, by the tracker's "exchange". again: it was summed in this step before."""
    add = again and unit.is_sharded and not outer
    return _temporary_bytes(unit, unit.outer if outer else unit.sums, accumulate=add)


def finish_bytes(reductions: GradReducePipeline) -> dict[str, int]:
    """Of `finish` behind a plan's last operation, by the tracker's categories: sums that wait for it, and those over
    model parallel ranks."""
    under_way, most = UnderWay[int](), 0
    units = reductions.units
    late = [(ir.REDUCE, unit, unit.last_sums) for unit in units if unit.last_sums]
    late += [(ir.HSDP_ALL_REDUCE, unit, unit.last_outer) for unit in units if unit.last_outer]
    for kind, unit, sums in late:
        under_way.of(unit)
        under_way.before_one_more(lane_of(kind))
        under_way.begin(lane_of(kind), unit, _temporary_bytes(unit, sums, accumulate=False))
        most = max(most, sum(size for _, _, size in under_way.entries))
    return dict(Counter(exchange=most) | Counter(reductions.model_parallel_sums.most_bytes()))


def _temporary_bytes(unit: GradState, sums: Sequence[Sum], *, accumulate: bool) -> int:
    with contextlib.ExitStack() as stack:
        for grads in (*unit.fulls, *unit.shards):
            stack.enter_context(with_memory(grads))
        return sum(collectives.temporary_bytes(what, group, accumulate=accumulate) for group, what in sums)
