"""Number 13: the playground shows thin operations in their colours, round ticks, shares of a step that are shares, and
the searched schedules, whose orders take as long as the planner's within 2 %."""

import json
import random
import re
import subprocess

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.search.zero_bubble import problem_of
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.node import node
from tools.schedules.page import playground

SEARCHED = ("zb-1p", "zb-2p", "zbv", "v-half", "v-min")
# A wire that takes no time: the step is the order's own.
FREE = {
    "policy": "step",
    "layers": 4,
    "peers": 2,
    "bandwidth": 1e30,
    "rest": 0,
    "weights": 1,
    "grads": 1,
    "activation": 1,
}
CHECK = """
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(asked.map(s => ({step: planned(s).step, rows: orders_of(s)}))));
function orders_of(s) {
  return searched(s).map(row => row.map(({kind, stage, microbatch}) => [kind, stage, microbatch]));
}
"""


def by_page(asked, driver=CHECK):
    """What the page's own planner says of each of these settings."""
    script = re.search(r'<script id="planner">(.*?)</script>', playground(), re.DOTALL)[1] + driver
    done = subprocess.run([node(), "-e", script], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def settings(chance, number, *, most_ranks, most_microbatches):
    schedule, p = SEARCHED[number % 5], chance.randint(2, most_ranks)
    equal = number % 3 == 0
    times = (
        dict.fromkeys("fbw", 100) if equal else {"f": chance.randint(50, 150), "b": chance.randint(50, 250)}
    )
    times.setdefault("w", chance.randint(30, 200))
    sizes = {"p": p, "m": chance.randint(p, most_microbatches), "group": 1}
    of_schedule = {"schedule": schedule, "chunks": SCHEDULES[schedule].placed(p, None).num_chunks}
    return FREE | sizes | times | of_schedule | {"transfer": chance.choice((0, 1, 5, 20))}


def held_equal(asked):
    for s, found in zip(asked, by_page(asked), strict=True):
        placement = SCHEDULES[s["schedule"]].placed(s["p"], s["chunks"])
        times = {f"time_{name}": (s[name],) for name in "fbw"}
        costs = CostModel.of_ranks(placement, **times, comm=s["transfer"], activation=(1.0,))
        request = Request(s["p"], s["m"], costs=costs)
        limits = problem_of(s["schedule"], request).limits
        plan = build_plan(s["schedule"], request)
        ours = simulate(lower(plan, costs), costs)
        assert found["step"] <= 1.02 * ours.cost, (s, found["step"], ours.cost)
        assert found["step"] >= ours.work * (1 - 1e-9), "no rank computes less"
        for rank, row in enumerate(found["rows"]):
            stages = placement.stages_of(rank)
            expected = {(kind, stage, at) for kind in "FBW" for stage in stages for at in range(s["m"])}
            assert {tuple(op) for op in row} == expected, "each operation once"
            assert len(row) == len(expected)
            held = most = 0
            for kind, *_ in row:
                held += {"F": 1, "B": 0, "W": -1}[kind]
                most = max(most, held)
            assert most <= s["chunks"] * limits[rank] + 1e-9, s


@pytest.mark.grid
def test_searched_orders_take_as_long_as_the_planners():
    chance = random.Random(5)
    held_equal([settings(chance, number, most_ranks=4, most_microbatches=8) for number in range(5)])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_searched_orders_of_larger_pipelines():
    chance = random.Random(6)
    held_equal([settings(chance, number, most_ranks=8, most_microbatches=32) for number in range(60)])


def test_what_is_exposed_is_a_part_of_the_step():
    """Waits behind the last computation were counted twice: 109.8 % of a step."""
    slow = FREE | {
        "bandwidth": 1e-3,
        "weights": 4,
        "grads": 8,
        "group": 4,
        "transfer": 1,
        "f": 1,
        "b": 1,
        "w": 1,
    }
    asked = [
        slow | {"schedule": schedule, "chunks": chunks, "p": 4, "m": 8, "policy": policy}
        for schedule, chunks in (("1f1b", 1), ("gis", 2), ("zbv", 2), ("zb-1p", 1))
        for policy in ("memory", "step")
    ]
    shares = """
const asked = JSON.parse(require("fs").readFileSync(0, "utf8")).map(planned);
console.log(JSON.stringify(asked.map(({step, exposed}) => ({step, exposed}))));
"""
    for s, found in zip(asked, by_page(asked, shares), strict=True):
        assert 0 < max(found["exposed"]) <= found["step"], s


def test_the_page_draws_thin_operations_in_their_colours():
    text = playground()
    assert all(name in text for name in SEARCHED)
    assert re.search(r'< THIN \? `fill="\$\{colour\}" stroke="none"`', text), (
        "no line covers what is narrower than it"
    )
    assert "GiB" in text
    step = re.search(r"function stepOf\(end\) \{.*?\n\}\n", text, re.DOTALL)[0]
    ends = "[0.7, 3.2, 716, 3580, 4020]"
    script = f"{step}console.log(JSON.stringify({ends}.map(end => [stepOf(end), end / stepOf(end)])))"
    done = subprocess.run([node(), "-e", script], capture_output=True, text=True, check=True)
    for step, count in json.loads(done.stdout):
        assert re.fullmatch(r"[125]0*", str(step)), "a round number of ms"
        assert count < 10
