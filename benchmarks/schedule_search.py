"""How far searched schedules are from their proven bounds, over sizes and costs; without torch.

python benchmarks/schedule_search.py
python benchmarks/schedule_search.py --ranks 8 32 --draws 20 --schedules zb-2p

Costs of whole ranks: two settings, and draws of a committed seed (F 1, B 0.7 to 1.6, W 0.4 to 1.2, a transfer 0 to 0.1,
0.3 to 0.6 of an activation left after B). The gap is the plan's bubble less the bound's, in points; each draw meets one
number of microbatches, 2, 4 or 8 a rank in turn. Seconds are of CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.search.zero_bubble import bound_of
from megatron.core.pipeline_parallel.plan.simulate import simulate

SEED = 15
SETTINGS = ((18.5, 18.1, 9.3, 0.6, 0.37), (1.0, 1.2, 0.8, 0.05, 0.5))  # F, B, W, transfer, left after B
MICROBATCHES_A_RANK = (2, 4, 8)


def drawn(count: int, seed: int = SEED) -> list[tuple[float, ...]]:
    """The two settings and so many draws."""
    rng = random.Random(seed)
    spans = ((0.7, 1.6), (0.4, 1.2), (0.0, 0.1), (0.3, 0.6))
    return [*SETTINGS, *((1.0, *(round(rng.uniform(*span), 3) for span in spans)) for _ in range(count))]


def request_of(schedule: str, ranks: int, microbatches: int, setting: Sequence[float]) -> Request:
    """Of whole ranks' times."""
    f, b, w, comm, left = setting
    placement = SCHEDULES[schedule].placed(ranks)
    costs = CostModel.of_ranks(
        placement, time_f=(f,), time_b=(b,), time_w=(w,), comm=comm, memory_after_b=left
    )
    return Request(ranks, microbatches, costs=costs)


def gaps(schedule: str, ranks: int, settings: Sequence[Sequence[float]]) -> Iterator[tuple[float, float]]:
    """Gap in points and CPU seconds of each setting."""
    for place, setting in enumerate(settings):
        microbatches = ranks * MICROBATCHES_A_RANK[place % len(MICROBATCHES_A_RANK)]
        request, begin = request_of(schedule, ranks, microbatches, setting), time.process_time()
        plan = build_plan(schedule, request)
        seconds = time.process_time() - begin
        assert request.costs is not None
        simulation = simulate(plan, request.costs)
        # A plan at its bound may differ from it in the last bit.
        yield max(0.0, 100 * bound_of(schedule, request).gap(simulation.cost, simulation.work)), seconds


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--schedules", nargs="+", default=["zb-1p", "zb-2p", "zbv"])
    line.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64])
    line.add_argument("--draws", type=int, default=200)
    line.add_argument("--seed", type=int, default=SEED, help="another one for experiments")
    args = line.parse_args(argv)
    print(
        "| schedule | ranks | median gap | 90th percentile | worst | slowest (s) |\n|---|---|---|---|---|---|"
    )
    for schedule in args.schedules:
        for ranks in args.ranks:
            found, seconds = zip(*gaps(schedule, ranks, drawn(args.draws, args.seed)), strict=True)
            ordered = sorted(found)
            ninety = ordered[int(0.9 * (len(ordered) - 1))]
            print(
                f"| {schedule} | {ranks} | {statistics.median(found):.2f} | {ninety:.2f} | {ordered[-1]:.2f} | "
                f"{max(seconds):.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
