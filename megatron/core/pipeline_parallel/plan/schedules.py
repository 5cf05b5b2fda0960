"""The schedules in one table, which flags, rules, tools and `auto` read: a new one is a generator and a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.generators.dualpipe_v import dualpipe_v
from megatron.core.pipeline_parallel.plan.generators.linear import gpipe, one_f_one_b, zb_h1, zb_h2
from megatron.core.pipeline_parallel.plan.generators.looped import grouped, interleaved
from megatron.core.pipeline_parallel.plan.generators.one_f_one_b_v import one_f_one_b_v
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request

AUTO = "auto"  # instead of a name: the fastest schedule that fits

# [Note: size of plans] A plan is a list of operations that Python makes and checks before the first step: some
# microseconds and half a kilobyte for each forward. A search weighs its candidates too, in a time that grows faster.
MOST_FORWARDS = 2**18
MOST_SEARCHED_FORWARDS = 2**16


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    placement: where its stages lie. generate: the computations of a fixed order, raises PlanError for what it cannot
    do; None: it is searched for, by costs and memory limits. splits: it has B and W apart, which not every model can
    run. chunks: on each rank, where nothing says how many. group_size: the field of ModelParallelConfig that says how
    many microbatches a chunk takes in turn (by default as many as there are ranks). whole_group: a step has as many at
    least. microbatches_a_rank: a step has so many a pipeline rank at least. alone: it runs on one rank too. like: under
    the same memory limits it comes to what this one comes to. about: what it is, in a few words.
    """

    name: str
    placement: str
    generate: Callable[[Request], Plan] | None = None
    splits: bool = True
    chunks: int = 1
    group_size: str | None = None
    whole_group: bool = False
    microbatches_a_rank: int = 0
    alone: bool = False
    like: str | None = None
    about: str = ""

    @property
    def searched(self) -> bool:
        return self.generate is None

    def placed(self, num_ranks: int, num_chunks: int | None = None) -> Placement:
        """Its stages on so many ranks. num_chunks: None = its own; a linear placement has one."""
        return Placement(
            self.placement, num_ranks, 1 if self.placement == LINEAR else num_chunks or self.chunks
        )

    def least_microbatches(self, num_ranks: int, group_size: int | None = None) -> int:
        """The fewest of a step that it can be planned for."""
        group = (group_size or num_ranks) if self.whole_group else 1
        return max(group, self.microbatches_a_rank * num_ranks)


SCHEDULES: Mapping[str, Schedule] = {
    one.name: one
    for one in (
        Schedule("gpipe", LINEAR, gpipe, splits=False, alone=True, about="all forwards, then all backwards"),
        Schedule("1f1b", LINEAR, one_f_one_b, splits=False, alone=True, about="forward, backward in turns"),
        Schedule(
            "interleaved",
            LOOPED,
            interleaved,
            splits=False,
            chunks=2,
            group_size="microbatch_group_size_per_vp_stage",
            whole_group=True,
            about="1f1b over several chunks a rank",
        ),
        Schedule(
            "gis",
            LOOPED,
            grouped,
            chunks=2,
            group_size="interleave_group_size",
            about="interleaving in groups, about 1f1b's memory",
        ),
        Schedule("zb-h1", LINEAR, zb_h1, about="1f1b that puts weight gradients off"),
        Schedule("zb-h2", LINEAR, zb_h2, about="zb-h1 in twice the memory, without a bubble"),
        Schedule("zb-1p", LINEAR, about="zero-bubble in 1f1b's memory"),
        Schedule("zb-2p", LINEAR, like="zb-1p", about="zero-bubble in twice 1f1b's memory"),
        Schedule("zbv", V_SHAPED, chunks=2, about="zero-bubble on a V of two chunks"),
        Schedule("v-half", V_SHAPED, chunks=2, like="zbv", about="zbv in half the memory"),
        Schedule(
            "v-min",
            V_SHAPED,
            chunks=2,
            like="zbv",
            about="zbv in a third of the memory",
        ),
        Schedule("1f1b-v", V_SHAPED, one_f_one_b_v, splits=False, chunks=2, about="1f1b on a V"),
        Schedule(
            "dualpipe-v", V_SHAPED, dualpipe_v, chunks=2, microbatches_a_rank=2, about="DualPipe on a V"
        ),
    )
}


def known(schedule: str) -> Schedule:
    """The row of a name. Raises PlanError where there is none."""
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]
