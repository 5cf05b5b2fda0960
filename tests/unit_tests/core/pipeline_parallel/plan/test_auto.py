"""The choice among schedules: the fastest that fits, and the reasons."""

import pytest

from megatron.core.pipeline_parallel.plan.auto import Words, choose
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.gpipe import gpipe
from megatron.core.pipeline_parallel.plan.interleaved import interleaved
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.one_f_one_b import one_f_one_b
from megatron.core.pipeline_parallel.plan.placement import LINEAR, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.zero_bubble import v_half, v_min, zb_1p, zb_2p, zbv

ALL = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-1p": zb_1p,
    "zb-2p": zb_2p,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
}


def test_of_equally_fast_ones_the_smaller_is_chosen():
    choice = choose(ALL, Request(4, 12))
    assert choice.best.name == "zbv"  # zb-2p has no bubble either, and holds 7 where zbv holds 4
    assert choice.plan.schedule == "zbv"
    lines = choice.lines()
    assert any(
        line.startswith("zb-2p: cost 36") and line.endswith("as fast as zbv, and holds no less")
        for line in lines
    )
    assert "zbv: cost 36, bubble 0.0%, peak 4 (rank 0): chosen" in lines
    assert any(
        line.startswith("1f1b: cost 45, bubble 20.0%, peak 4") and "25.0% slower" in line for line in lines
    )


def test_searches_use_the_limit_and_fixed_orders_are_held_to_it():
    choice = choose(ALL, Request(4, 12, memory_limit=(3.0,) * 4))
    fitting = {one.name: one for one in choice.candidates if one.fits}
    assert set(fitting) == {"zb-1p", "zb-2p", "zbv", "v-half", "v-min"}
    assert choice.best.name in ("zbv", "v-half", "v-min")
    assert all(peak <= 3 for peak in choice.best.simulation.peak_activation)
    assert "too much memory: rank 0 would hold 12 of 3" in next(
        line for line in choice.lines() if line.startswith("gpipe")
    )
    assert "peak 3 of 3 (rank" in next(line for line in choice.lines() if line.endswith("chosen"))


def test_times_and_activations_are_told_in_the_callers_words():
    words = Words(time=lambda value: f"{value / 2:g} ms", activation=lambda value: f"{10 * value:g} MiB")
    schedules = {"gpipe": gpipe, "1f1b": one_f_one_b, "zbv": zbv}
    lines = choose(schedules, Request(4, 12, memory_limit=(4.0,) * 4), words=words).lines()
    assert lines[0].startswith("zbv: cost 18 ms, bubble 0.0%, peak 40 MiB of 40 MiB (rank 0): chosen")
    gpipe_line = next(line for line in lines if line.startswith("gpipe: "))
    assert "cost 22.5 ms" in gpipe_line
    assert "rank 0 would hold 120 MiB of 40 MiB" in gpipe_line
    assert "peak 40 MiB (rank 0)" in next(
        line for line in choose(schedules, Request(4, 12), words=words).lines() if line.startswith("1f1b: ")
    )
    with pytest.raises(PlanError, match="rank 0 would hold 120 MiB of 5 MiB"):
        choose({"gpipe": gpipe}, Request(4, 12, memory_limit=(0.5,) * 4), words=words)


def test_1f1b_wins_where_transfers_cost_much():
    """On the V every microbatch crosses ranks twice as often."""
    figures = {"comm": 20.0}

    def costs(name, plan):
        return CostModel.of_ranks(plan.placement, **figures)

    schedules = {"1f1b": one_f_one_b, "v-min": v_min}
    assert choose(schedules, Request(4, 4), costs).best.name == "1f1b"


def test_schedules_that_cannot_be_had_say_why():
    choice = choose({"1f1b": one_f_one_b, "interleaved": interleaved}, Request(4, 2))
    assert choice.best.name == "1f1b"
    assert choice.lines()[-1].startswith("interleaved: not possible: ")


def test_nothing_that_fits_is_an_error_with_all_reasons():
    with pytest.raises(
        PlanError, match=r"no pipeline schedule .*gpipe: rank 0 would hold .*zbv: rank 0 may hold"
    ):
        choose({"gpipe": gpipe, "zbv": zbv}, Request(4, 8, memory_limit=(0.5,) * 4))


def test_a_schedule_with_a_placement_of_its_own_has_its_own_request():
    linear, v = Placement(LINEAR, 4), Placement(V_SHAPED, 4, 2)
    requests = {
        "1f1b": Request(4, 8, costs=CostModel.of_ranks(linear, time_w=(0.5,))),
        "zbv": Request(4, 8, costs=CostModel.of_ranks(v, time_w=(0.5,))),
    }
    choice = choose({"1f1b": one_f_one_b, "zbv": zbv}, Request(4, 8), requests=requests)
    assert choice.best.name == "zbv"
    assert choice.best.simulation.work == pytest.approx(8 * 2.5)
