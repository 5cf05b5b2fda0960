"""23: under one limit a schedule gets the same search beside others as alone, and begins with what fits."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.activation_share import looks
from megatron.core.pipeline_parallel.plan.budget_search import named
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.candidate import NoFasterError, bound_of, room_of
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.training.planner import within
from tests.harness.budget_settings import SETTINGS, Setting, timed

ROOT = Path(__file__).parents[3]
GB, SHARDED = 1e9, ("optim_grads_params",)
FEW = Setting("70B", 4, 4, 4, 5)  # S1 with few microbatches, whose V does not fit with all the room there is


@functools.cache
def candidates(setting, limit, schedule):
    """Of one schedule, or of all: {schedule}."""
    staged = setting.staged
    parallel = dataclasses.replace(staged.parallel, pipeline_schedule=schedule)
    return within(
        dataclasses.replace(staged, parallel=parallel), setting.budget(limit * GB, SHARDED), staged.costs
    )


def cost_of(spec):
    """Of the plan that the choice ended with."""
    return timed(spec, plan_for(spec, FEW.num_microbatches, PlanPurpose.TRAIN)).cost


@pytest.mark.grid
def test_what_is_solved_alone_is_not_called_impossible_beside_others():
    alone, chosen = (candidates(FEW, 60, name) for name in ("zbv", "auto"))
    (line,) = (one for one in chosen.reasons if one.startswith("zbv, ") and not one.endswith("chosen"))
    assert "not possible" not in line
    cost = cost_of(alone)
    if chosen.schedule == "zbv":
        assert cost_of(chosen) <= cost * (1 + 1e-9)
    else:
        least = re.search(r"zbv, optim_grads_params: (?:takes at least )?(\d+\.?(\d*)) x F", line)
        assert float(least[1]) <= cost + 0.5 * 10 ** -len(least[2])  # as printed, rounded


@pytest.mark.grid
def test_an_order_that_holds_too_much_is_made_again_for_what_fits():
    """Each rank has as much less of activations as it was over the limit by; no share of all ranks is looked for."""
    spec = candidates(FEW, 60, "zbv")
    asked = dataclasses.replace(spec, limits=None)
    found = looks(asked, FEW.num_microbatches, 16, float("inf"))
    assert found
    assert all(max(one.peaks) <= 60 * GB for one in found)
    best = min(found, key=lambda one: one.simulation.merit)
    shares = [limit / room for limit, room in zip(best.spec.limits, room_of(asked), strict=True)]
    assert max(shares) < 1
    assert len({round(share, 3) for share in shares}) > 1  # by rank
    # Where another one is faster than its bound, it says so, and not that it does not fit.
    with pytest.raises(NoFasterError):
        looks(asked, FEW.num_microbatches, 16, bound_of(asked, FEW.num_microbatches))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_s1_at_60_gb_takes_what_the_docs_say():
    setting = SETTINGS["S1"]
    spec, found = setting.chosen(60 * GB)
    assert named(spec) == "zbv, optim_grads_params"
    assert setting.seconds(found.cost) <= 8.93


def test_docs_say_of_how_many_units_the_oracle_is():
    text = " ".join((ROOT / "docs/design/008-one-budget.md").read_text().split())
    (said,) = re.findall(r"[^.]*\b70 of 70\b[^.]*\.", text)
    assert "two units a stage" in said
    assert "python -m tests.harness.joint_oracle 2 3 0" in text
