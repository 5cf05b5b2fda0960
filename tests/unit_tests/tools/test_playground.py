"""The page's own planner, run by node, comes to the figures of the Python planner."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.node import node
from tests.harness.unit_stages import shares, unit
from tools.drawing.page import PLOT_STYLE
from tools.schedules.picture import colours

TOOL = Path(__file__).resolve().parents[3] / "tools" / "show_schedule.py"
ORDERS = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("gis", 2), ("gis", 4))
COUNT = 50
DRIVER = """
const told = JSON.parse(require("fs").readFileSync(0, "utf8")).map(planned);
console.log(JSON.stringify(told.map(({done, ranks, ...figures}) => figures)));
"""


def drawn(chance, number):
    """Settings number `number`: each order and policy comes about as often. Of policy limit without one."""
    schedule, chunks = ORDERS[number % len(ORDERS)]
    p, layers = chance.randint(1, 4), 4 * chance.randint(1, 3)
    s = {
        "schedule": schedule,
        "chunks": chunks,
        "p": p,
        "m": chance.randint(p, 10),
        "layers": layers,
        "peers": 4,
    }
    s["policy"] = ("memory", "limit", "step", "limit")[number // len(ORDERS) % 4]
    s["group"] = {"interleaved": p, "gis": chance.randint(-(-p // 2), p)}.get(schedule, 1)
    s |= {name: chance.randint(0 if name == "w" else 1, 40) / 4 for name in "fbw"}
    s |= {name: 4 * chance.randint(1, 30) for name in ("weights", "grads", "activation")}
    s |= {"rest": layers * chance.randint(0, 99), "bandwidth": chance.choice((8, 40, 200))}
    return s | {"transfer": chance.choice((0, 0.5, 1.25))}


def by_python(s):
    """The planner's figures. Policy limit is `budget`, with what `memory` leaves below the limit on each rank."""
    placement, count = SCHEDULES[s["schedule"]].placed(s["p"], s["chunks"]), s["layers"] // s["chunks"]
    times = {f"time_{name}": (s[name],) for name in "fbw"}
    costs = CostModel.of_ranks(placement, **times, comm=s["transfer"], activation=(s["activation"],))
    order = tuple((place,) for place in range(count))
    sizes = shares(s["weights"], s["grads"], s["rest"] // s["layers"], ways=s["peers"])
    stages = tuple(
        StageUnits(tuple(unit(f"{stage}.{place}", shares=sizes) for (place,) in order), order, order[::-1])
        for stage in range(placement.num_stages)
    )
    words = {"policy": s["policy"]}
    if s["policy"] == "limit":
        least = by_python({**s, "policy": "memory"})["peaks"]
        words = {"policy": "budget", "budget": tuple(max(0, s["limit"] - peak) for peak in least)}
    asked = Residency("optim_grads_params", **words)
    interleaving = (s["chunks"], s["group"]) if s["chunks"] > 1 else ()
    plan = lower(build_plan(s["schedule"], Request(s["p"], s["m"], *interleaving)), costs)
    plan = add_residency(plan, stages, asked, costs)
    found = simulate(plan, costs, Lanes(stages, asked, LaneCosts(bandwidth=s["bandwidth"])))
    ranks = [(row, RankUnits(rank, placement, stages)) for rank, row in enumerate(plan.rows)]
    walks = [walk_row(row, units, asked, costs) for row, units in ranks]
    return {
        "step": found.cost,
        "bubble": found.bubble_time,
        "exposed": list(found.exposed),
        "peaks": [s["rest"] + walk.peak.total for walk in walks],
        "gathers": [walk.moves.gathers.calls for walk in walks],
        "reductions": [walk.moves.reductions.calls for walk in walks],
    }


@pytest.mark.grid
def test_its_figures_are_those_of_the_planner(tmp_path):
    page, chance = tmp_path / "page.html", random.Random(2)
    subprocess.run([sys.executable, str(TOOL), "--playground", str(page)], check=True)
    text = page.read_text()
    assert not re.search("http|src=|import", text), "it needs nothing else"
    assert PLOT_STYLE in text, "it looks like the other pages"
    told = json.loads(re.search(r"const COLOURS = ({.*?});", text)[1])
    assert colours().items() <= told.items(), "their legend"
    drawn_ones = [drawn(chance, number) for number in range(COUNT)]
    for s in (s for s in drawn_ones if s["policy"] == "limit"):
        low, high = (max(by_python({**s, "policy": one})["peaks"]) for one in ("memory", "step"))
        s["limit"] = low + round(chance.uniform(-0.3, 1.0) * (high - low))
    script = re.search(r'<script id="planner">(.*?)</script>', text, re.DOTALL)[1] + DRIVER
    done = subprocess.run(
        [node(), "-e", script], input=json.dumps(drawn_ones), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    over = 0
    for s, told in zip(drawn_ones, json.loads(done.stdout), strict=True):
        for name, value in by_python(s).items():
            assert told[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (name, s)
        if s["policy"] == "limit" and max(by_python({**s, "policy": "memory"})["peaks"]) > s["limit"]:
            assert max(told["peaks"]) > s["limit"], s
            over += 1
    assert 0 < over < COUNT / 5
