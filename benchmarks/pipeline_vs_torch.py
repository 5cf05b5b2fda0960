"""Our pipeline runtime against torch.distributed.pipelining on stages that sleep: real gloo, the same processes.

    python benchmarks/pipeline_vs_torch.py         # 8 blocks, 8 microbatches, 10 ms each, 64 KiB, 2 and 4 ranks
    python benchmarks/pipeline_vs_torch.py --ranks 4 --ours zbv --torch ZBVZeroBubble --repeat 10 --json out.json

A model of blocks is divided evenly over the stages; forward, input gradient and weight gradient of a block sleep for a
time each (benchmarks/sleeping_blocks.py). Sleeps are plain, and shortened by how late the system wakes a sleeper, which
all ranks measure together before (median; `late`). Contestants:

    ours NAME    a schedule of ours; stages under autograd, as a model's are
    plain NAME   the same plan over stages that sleep and do nothing else: what the runtime itself adds
    torch NAME   torch's schedule over modules of the same blocks under autograd, with torch's own split of B and W

A step's time is that of the whole pipeline, from the first rank's start behind a barrier to the last rank's return.
planned: for ours the time that simulating the plan gives if messages take none; for torch's GPipe, 1F1B and
Interleaved1F1B the closed formulas (m + p - 1)(F + B + W) and (m + (p - 1) / 2)(F + B + W). work: what each rank has to
compute, without any bubble. late sleeps: by how much the sleeps of a step took longer than they should have, on the
rank where that was most; it is part of a step's time, and no runtime is to blame.

Steps of all contestants are in turn, each round begun by another one; of each one's steps the median counts.
foreign_cpu: share of the machine that other processes took. On a busy machine, with the right to: `chrt -f 5 python
benchmarks/pipeline_vs_torch.py` (ranks nearly always sleep). Stops where the gradients of two contestants differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sleeping_blocks import OurStage, PlainStage, Sleeper, Times, TorchStage
from benchmarks.sleeping_stages import (
    MS,
    Load,
    duration,
    interleaved,
    median_and_least,
    planned,
    positive,
    share_text,
)
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState
from tests.harness.ranks import RankContext, run_ranks

WIDTH = 128  # of hidden states, fp32
CALIBRATING_SLEEPS = 30
# Torch's schedules: placement of their stages. One stage a rank where it is linear, else two.
TORCH: dict[str, str] = {
    "GPipe": LINEAR,
    "1F1B": LINEAR,
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": V_SHAPED,
    "DualPipeV": V_SHAPED,
}


@dataclass(frozen=True)
class Step:
    """On one rank; start and end on the machine's clock."""

    start_s: float
    end_s: float
    cpu_s: float
    slept_over_s: float


class Contestant(Protocol):
    """One rank of a pipeline."""

    def step(self) -> None:
        """All microbatches forwards and backwards, all messages through."""

    def grads(self) -> dict[str, Tensor] | None:
        """By block, summed over all steps; None where none are computed."""


def stages_of(place: Placement, rank: int) -> list[int]:
    """Of a pipeline rank, by chunk."""
    return [place.stage_of(rank, chunk) for chunk in range(place.num_chunks)]


class Ours:
    """A plan of ours under the executor."""

    def __init__(
        self,
        simulation: Simulation,
        num_blocks: int,
        inputs: Sequence[Tensor],
        times: Times,
        ps: ParallelState,
    ) -> None:
        place = simulation.plan.placement
        last = place.num_stages - 1
        self._chunks = {
            stage: OurStage(
                blocks_of(stage, place, num_blocks), inputs, times, begins=stage == 0, ends=stage == last
            )
            for stage in stages_of(place, ps.pp_rank)
        }
        self._executor = Executor(
            simulation.plan, ps.pp_rank, {stage: one.stage for stage, one in self._chunks.items()}, P2P(ps)
        )

    def step(self) -> None:
        self._executor.run()

    def grads(self) -> dict[str, Tensor]:
        return {key: grad for one in self._chunks.values() for key, grad in one.grads.items()}


class OursPlain:
    """The same plan over stages without autograd."""

    def __init__(
        self,
        simulation: Simulation,
        num_blocks: int,
        inputs: Sequence[Tensor],
        times: Times,
        ps: ParallelState,
    ) -> None:
        place = simulation.plan.placement
        last = place.num_stages - 1
        mine = stages_of(place, ps.pp_rank)
        each = num_blocks // place.num_stages
        stages = {stage: PlainStage(each, inputs[0], times, ends=stage == last) for stage in mine}
        self._executor = Executor(simulation.plan, ps.pp_rank, stages, P2P(ps))

    def step(self) -> None:
        self._executor.run()

    def grads(self) -> None:
        """None: nothing is computed."""


class Torchs:
    """One of torch's schedules, over stages of the same blocks."""

    def __init__(
        self, schedule: str, num_blocks: int, inputs: Sequence[Tensor], times: Times, ps: ParallelState
    ) -> None:
        place = torch_placement(schedule, ps.pp_group.size)
        mine = stages_of(place, ps.pp_rank)
        self._modules = [TorchStage(blocks_of(stage, place, num_blocks), WIDTH, times) for stage in mine]
        pipeline_stages = [
            PipelineStage(module, stage, place.num_stages, torch.device("cpu"))
            for module, stage in zip(self._modules, mine, strict=True)
        ]
        make = getattr(torch_schedules, f"Schedule{schedule}")
        self._schedule = make(
            pipeline_stages[0] if place.kind == LINEAR else pipeline_stages,
            len(inputs),
            loss_fn=lambda output, target: output.mean(),
            scale_grads=False,
        )
        self._inputs = (torch.cat(list(inputs)),) if 0 in mine else ()
        self._ends = place.num_stages - 1 in mine
        self._targets = torch.zeros(sum(map(len, inputs)), 1)

    def step(self) -> None:
        if self._ends:
            self._schedule.step(*self._inputs, target=self._targets, losses=[], return_outputs=False)
        else:
            self._schedule.step(*self._inputs, return_outputs=False)

    def grads(self) -> dict[str, Tensor]:
        return {key: grad for module in self._modules for key, grad in module.grads.items()}


def torch_placement(schedule: str, num_ranks: int) -> Placement:
    kind = TORCH[schedule]
    return Placement(kind, num_ranks, 1 if kind == LINEAR else 2)


def blocks_of(stage: int, place: Placement, num_blocks: int) -> range:
    each = num_blocks // place.num_stages
    return range(stage * each, (stage + 1) * each)


def run_all(
    ctx: RankContext, simulations: dict[str, Simulation], args: argparse.Namespace
) -> tuple[dict[str, list[Step]], dict[str, dict[str, Tensor] | None], float]:
    """On one rank: the timed steps of every contestant, its gradients, and how late sleepers wake. The first step of
    each is a warm-up."""
    ps = ctx.make_ps(pp=ctx.world_size)
    sleeper = Sleeper()
    collectives.barrier(ps.control_group)
    sleeper.calibrate(min(args.time_f, args.time_b, args.time_w) * MS, CALIBRATING_SLEEPS)
    times = Times(sleeper, args.time_f * MS, args.time_b * MS, args.time_w * MS)
    inputs = [
        torch.full((args.message_kib * 1024 // 4 // WIDTH, WIDTH), 1.0) for _ in range(args.microbatches)
    ]
    build: dict[str, Callable[[], Contestant]] = {
        **{
            f"ours {name}": partial(Ours, simulations[name], args.blocks, inputs, times, ps)
            for name in args.ours
        },
        **{
            f"plain {name}": partial(OursPlain, simulations[name], args.blocks, inputs, times, ps)
            for name in args.plain
        },
        **{f"torch {name}": partial(Torchs, name, args.blocks, inputs, times, ps) for name in args.torch},
    }
    contestants = {name: make() for name, make in build.items()}
    for one in contestants.values():
        timed(one, sleeper, ps)
    steps: dict[str, list[Step]] = {name: [] for name in contestants}
    for order in interleaved(list(contestants), args.repeat):
        for name in order:
            steps[name].append(timed(contestants[name], sleeper, ps))
    return steps, {name: one.grads() for name, one in contestants.items()}, sleeper.late_s


def timed(contestant: Contestant, sleeper: Sleeper, ps: ParallelState) -> Step:
    collectives.barrier(ps.control_group)
    before, cpu, start = sleeper.slept_over_s, time.process_time(), time.monotonic()
    contestant.step()
    end = time.monotonic()
    return Step(start, end, time.process_time() - cpu, sleeper.slept_over_s - before)


def measure(num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one number of ranks. Raises PlanError for what cannot be planned."""
    each = args.blocks / num_ranks
    simulations = {
        name: planned(
            name,
            num_ranks,
            args.microbatches,
            time_f=[args.time_f * each],
            time_b=[args.time_b * each],
            time_w=[args.time_w * each],
            comm=args.time_comm,
        )
        for name in dict.fromkeys([*args.ours, *args.plain])
    }
    work_ms = args.microbatches * each * (args.time_f + args.time_b + args.time_w)
    timeout = (
        60 + 10 * (args.repeat + 1) * (len(args.ours) + len(args.plain) + len(args.torch)) * work_ms * MS
    )
    with Load() as load:
        by_rank = run_ranks(run_all, num_ranks, simulations, args, timeout=timeout)
    check_same([grads for _, grads, _ in by_rank])
    free_ms = {name: without_latency(one) for name, one in simulations.items()}
    expected: dict[str, float | None] = {f"ours {name}": free_ms[name] for name in args.ours}
    expected |= {f"plain {name}": free_ms[name] for name in args.plain}
    simulated = {name: simulations[name.split(" ", 1)[1]].makespan for name in expected}
    expected |= {
        f"torch {name}": closed_formula(name, num_ranks, args.microbatches, work_ms) for name in args.torch
    }
    own_s = sum(step.cpu_s for steps, _, _ in by_rank for every in steps.values() for step in every)
    return {
        "ranks": num_ranks,
        "work_ms": work_ms,
        "late_us": [late_s * 1e6 for _, _, late_s in by_rank],
        "foreign_cpu": load.foreign(own_s),
        "contestants": {
            name: {
                "simulated_ms": simulated.get(name),  # with the latency that was planned with
                **figures([steps[name] for steps, _, _ in by_rank], planned_ms, work_ms),
            }
            for name, planned_ms in expected.items()
        },
    }


def without_latency(simulation: Simulation) -> float:
    """The plan's time if messages took none; all of its costs else."""
    costs = simulation.costs
    free = CostModel(costs.f, costs.b, costs.w, costs.activation, costs.held_after_b)
    return simulate(simulation.plan, free).makespan


def closed_formula(schedule: str, num_ranks: int, num_microbatches: int, work_ms: float) -> float | None:
    chunks = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}.get(schedule)
    return None if chunks is None else work_ms * (1 + (num_ranks - 1) / chunks / num_microbatches)


def figures(by_rank: list[list[Step]], planned_ms: float | None, work_ms: float) -> dict[str, Any]:
    rounds = list(zip(*by_rank, strict=True))
    steps_ms = [(max(one.end_s for one in each) - min(one.start_s for one in each)) / MS for each in rounds]
    median, least = median_and_least(steps_ms)
    over_ms, _ = median_and_least([max(one.slept_over_s for one in each) / MS for each in rounds])
    cpu_ms, _ = median_and_least([sum(one.cpu_s for one in each) / MS for each in rounds])
    return {
        "planned_ms": planned_ms,
        "median_ms": median,
        "least_ms": least,
        "over_planned": None if planned_ms is None else median / planned_ms - 1,
        "over_work": median / work_ms - 1,
        "slept_over_ms": over_ms,
        "cpu_ms": cpu_ms,
        "steps_ms": steps_ms,
    }


def check_same(by_rank: list[dict[str, dict[str, Tensor] | None]]) -> None:
    """All who compute gradients have done the same work: those of all blocks are there, and equal."""
    whole: dict[str, dict[str, Tensor]] = {}
    for name, grads in ((name, grads) for rank in by_rank for name, grads in rank.items()):
        if grads is not None:
            whole.setdefault(name, {}).update(grads)
    for name, grads in whole.items():
        first_name, first = next(iter(whole.items()))
        same = grads.keys() == first.keys() and all(
            torch.allclose(grads[key], first[key], rtol=1e-5, atol=0) for key in first
        )
        if not same:
            raise SystemExit(f"not the same work: the gradients of {name} differ from those of {first_name}")


def table(result: dict[str, Any]) -> str:
    names = result["contestants"]
    width = max(map(len, names))
    late = ", ".join(f"{one:.0f}" for one in result["late_us"])
    lines = [
        f"{result['ranks']} ranks: work {result['work_ms']:.0f} ms; sleepers wake late by us {late}; CPU of other"
        f" processes meanwhile: {share_text(result['foreign_cpu'])}",
        f"{'':{width}} | planned   median    least ms | over planned  over work | late sleeps ms  CPU ms of all ranks",
    ]
    for name, one in names.items():
        plan = "      -" if one["planned_ms"] is None else f"{one['planned_ms']:7.1f}"
        over = "     - " if one["over_planned"] is None else f"{100 * one['over_planned']:5.1f} %"
        lines.append(
            f"{name:{width}} | {plan}  {one['median_ms']:7.1f}  {one['least_ms']:7.1f}    |      {over}   "
            f" {100 * one['over_work']:5.1f} % | {one['slept_over_ms']:14.1f}  {one['cpu_ms']:7.0f}"
        )
    best = {
        side: min((one["median_ms"], name) for name, one in names.items() if name.startswith(side))
        for side in ("ours", "torch")
        if any(name.startswith(side) for name in names)
    }
    if len(best) == 2:
        ours, torchs = best["ours"], best["torch"]
        lines.append(
            f"best: {ours[1]} {ours[0]:.1f} ms, {torchs[1]} {torchs[0]:.1f} ms: {ours[0] / torchs[0]:.3f}"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], help="pipeline ranks (2 4)")
    parser.add_argument("--blocks", type=positive, default=8)
    parser.add_argument("--microbatches", type=positive, default=8)
    for name, what in (("f", "forward"), ("b", "input gradient"), ("w", "weight gradient")):
        parser.add_argument(
            f"--time-{name}", type=duration, default=10.0, metavar="MS", help=f"{what} of a block (10)"
        )
    parser.add_argument(
        "--time-comm", type=duration, default=0.2, metavar="MS", help="latency that ours plans with (0.2)"
    )
    parser.add_argument("--message-kib", type=positive, default=64, help="of hidden states (64)")
    parser.add_argument(
        "--ours", nargs="*", default=["1f1b", "zb-2p", "zbv"], metavar="NAME", help="(1f1b zb-2p zbv)"
    )
    parser.add_argument(
        "--plain", nargs="*", default=["1f1b", "zbv"], metavar="NAME", help="without autograd (1f1b zbv)"
    )
    parser.add_argument(
        "--torch",
        nargs="*",
        choices=TORCH,
        default=["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"],
        metavar="NAME",
        help=f"of {', '.join(TORCH)} (1F1B InterleavedZeroBubble ZBVZeroBubble)",
    )
    parser.add_argument("--repeat", type=positive, default=5, help="timed steps of each (5)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there, not to the console"
    )
    args = parser.parse_args(argv)
    for side in ("ours", "plain", "torch"):
        setattr(args, side, list(dict.fromkeys(getattr(args, side))))
    if not (args.ours or args.plain or args.torch):
        parser.error("--ours, --plain and --torch are all empty: name a schedule")
    if any(args.blocks % (2 * ranks) for ranks in args.ranks):
        parser.error(
            f"--blocks {args.blocks}: a multiple of twice every number of --ranks, for two stages a rank"
        )
    if 1 in args.ranks:
        parser.error("--ranks 1: a pipeline has at least 2")
    if args.message_kib * 1024 % (4 * WIDTH):
        parser.error(f"--message-kib {args.message_kib}: rows of {WIDTH} fp32 numbers do not fill it")
    return args


def main(argv: list[str] | None = None) -> int:
    """Status 2 for what cannot be planned."""
    args = parse(argv)
    results = []
    for num_ranks in args.ranks:
        try:
            results.append(measure(num_ranks, args))
        except PlanError as error:
            print(f"pipeline_vs_torch: {error}", file=sys.stderr)
            return 2
        print(table(results[-1]), flush=True)
    settings = ("blocks", "microbatches", "time_f", "time_b", "time_w", "time_comm", "message_kib", "repeat")
    text = json.dumps({**{name: getattr(args, name) for name in settings}, "cases": results}, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
