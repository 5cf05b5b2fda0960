"""Fixed orders of one stage a rank: GPipe (arXiv 1811.06965), 1F1B (arXiv 2104.04473, 2.2.1), and ZB-H1 and ZB-H2,
which are 1F1B with B and W apart (arXiv 2401.10241, section 2)."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request


def gpipe(request: Request) -> Plan:
    """All forwards, then all backwards, in increasing microbatch order, not the paper's reversed one: the same time,
    the bits of one process."""
    return _plan("gpipe", request, lambda left: (request.num_microbatches, None))


def one_f_one_b(request: Request) -> Plan:
    """A backward as soon as there is one, so that stage s of p holds p-s microbatches' activations."""
    return _plan("1f1b", request, lambda left: (left, None))


def zb_h1(request: Request) -> Plan:
    """1F1B's memory and, where m >= p and times are equal, a third of its bubble: (p-1)(F+B-W)."""
    return _plan("zb-h1", request, lambda left: (left, request.num_ranks - left))


def zb_h2(request: Request) -> Plan:
    """At most 2p-1 activations instead of p for a bubble of (p-1)(F+B-2W): none where times are equal, m >= 2p-1."""
    return _plan("zb-h2", request, lambda left: (2 * left - 1, 2 * (request.num_ranks - left)))


def _plan(schedule: str, request: Request, depths: Callable[[int], tuple[int, int | None]]) -> Plan:
    """depths: of a stage that, with those behind it, is one of so many: how many forwards it runs ahead, and how many
    weight gradients it lets wait, to fill the end of its row with them; None: backwards are not split."""
    request.one_chunk(schedule)
    num_ranks, total = request.num_ranks, request.num_microbatches
    rows = tuple(_row(stage, total, *depths(num_ranks - stage)) for stage in range(num_ranks))
    return Plan(schedule, Placement(LINEAR, num_ranks), total, rows)


def _row(stage: int, total: int, ahead: int, late: int | None) -> tuple[RawOp, ...]:
    """`ahead` forwards, then turns of B, W (from the B on that leaves more than `late` of them waiting) and F."""
    ahead = min(ahead, total)
    row = [compute(F, stage, m) for m in range(ahead)]
    for m in range(total):
        row.append(compute(BW if late is None else B, stage, m))
        if late is not None and m >= late:
            row.append(compute(W, stage, m - late))
        if ahead + m < total:
            row.append(compute(F, stage, ahead + m))
    row += [compute(W, stage, m) for m in range(max(total - late, 0), total)] if late is not None else []
    return tuple(row)
