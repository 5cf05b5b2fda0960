"""Schedules by name. A new schedule is a file with a generator and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.core.pipeline_parallel.plan.dualpipe_v import dualpipe_v
from megatron.core.pipeline_parallel.plan.gpipe import gpipe
from megatron.core.pipeline_parallel.plan.grouped import grouped
from megatron.core.pipeline_parallel.plan.hand_orders import zb_h1, zb_h2
from megatron.core.pipeline_parallel.plan.interleaved import interleaved
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.one_f_one_b import one_f_one_b
from megatron.core.pipeline_parallel.plan.one_f_one_b_v import one_f_one_b_v
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.zero_bubble import v_half, v_min, zb_1p, zb_2p, zbv

SCHEDULES: Mapping[str, Callable[[Request], Plan]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "gis": grouped,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-1p": zb_1p,
    "zb-2p": zb_2p,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "1f1b-v": one_f_one_b_v,
    "dualpipe-v": dualpipe_v,
}
# Where stages lie; and which schedules are made for costs and memory limits, the others are fixed orders.
PLACEMENTS: Mapping[str, str] = {
    **dict.fromkeys(SCHEDULES, LINEAR),
    **dict.fromkeys(("interleaved", "gis"), LOOPED),
    **dict.fromkeys(("zbv", "v-half", "v-min", "1f1b-v", "dualpipe-v"), V_SHAPED),
}
SEARCHED = frozenset(("zb-1p", "zb-2p", "zbv", "v-half", "v-min"))
# Schedules of F and BW only: for models whose weight gradients cannot wait.
FUSED = frozenset(("gpipe", "1f1b", "interleaved", "1f1b-v"))


def build_plan(schedule: str, request: Request) -> Plan:
    """The computations of a schedule, without transfers. Raises PlanError for what the schedule cannot do."""
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](request)
