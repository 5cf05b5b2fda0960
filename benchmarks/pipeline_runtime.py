"""How close the pipeline runtime comes to its plans: real ranks, real executor and messages, compute that sleeps.

    python benchmarks/pipeline_runtime.py --schedules 1f1b zb-2p zbv --stages 8 --microbatches 24 \\
        --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6
    python benchmarks/pipeline_runtime.py --schedules 1f1b interleaved --stages 4 --microbatches 12 --time-comm 2
    python benchmarks/pipeline_runtime.py --schedules 1f1b --stages 4 --microbatches 8 --timeline DIR
    python benchmarks/pipeline_runtime.py --schedules zbv gis --stages 2 --microbatches 8 --time-comm 0.6 \\
        --time-f 60 --time-b 60 --time-w 60 --policies memory step budget [--wire-mb-per-s 3] --check

Times are milliseconds of a whole stage, one number or one a stage with commas, divided over a stage's chunks; plans are
made for them. A computation sleeps to an absolute deadline, so that many stages are meaningful on few cores: that the
system wakes a sleeper late is not the runtime's doing and is made up by the next sleep, while all time in the executor
and in messages counts. A message counts as arrived --time-comm after its sender computed it (a timestamp that it
carries) and its receive was posted, or when it really did, if that was later.

The same processes run all schedules, their steps in turn. Printed for each: planned and measured bubble rate and cost,
their difference in points; and the executor's own time an operation. The bubble rate is
(cost - m * max over stages(F+B+W)) / cost, where cost is the most that a rank takes from its first start to its last
end; of the steps' costs the median counts. foreign_cpu: share of the machine that other processes took meanwhile.

--policies: chunks have units, sharded over 2 data parallel ranks (optim_grads_params); the plan's gathers, frees and
reductions are really done by the engine (sleeping_units.py), each step's sums are looked at, and the wire's costs are
measured, or --wire-mb-per-s. Bar: 3 % over the simulated step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sleeping_stages import (
    MS,
    Clock,
    Load,
    SleepingStage,
    duration,
    interleaved,
    median_and_least,
    planned,
    positive,
    share_text,
    times,
)
from benchmarks.sleeping_units import DP, SlowEngine, sharded, wire_of_ranks
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.held.sends import Key
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, PlanError
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P, Arrival, Message
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState
from tests.harness.ranks import RankContext, run_ranks

BAR = 1.03  # a measured step over the simulated one


class SlowChannel:
    """The real channel; a message is there `comm_s` after both of its ends were."""

    def __init__(self, channel: P2P, comm_s: float, clock: Clock) -> None:
        self.channel, self.comm_s, self.clock = channel, comm_s, clock

    def post(self, messages: Sequence[Message]) -> list[Arrival]:
        now = self.clock.now()
        return [SlowArrival(one, now, self) for one in self.channel.post(messages)]

    def release(self, sends: Iterable[Key]) -> None:
        self.channel.release(sends)

    def drain(self) -> None:
        self.channel.drain()


class SlowArrival:
    def __init__(self, arrival: Arrival, posted: float, channel: SlowChannel) -> None:
        self.arrival, self.posted, self.channel = arrival, posted, channel

    def wait(self) -> Tensor:
        tensor = self.arrival.wait()
        computed, late_s = tensor.tolist()
        really = time.monotonic() - late_s
        self.channel.clock.sleep_until(
            max(self.posted + self.channel.comm_s, computed + self.channel.comm_s, really)
        )
        return tensor


class IdleStage:
    """Takes no time: what is left is the executor's own."""

    splits = True

    def forward(self, microbatch: int, hidden: Tensor | None) -> None:
        pass

    backward = backward_input = forward

    def backward_weight(self, microbatch: int) -> None:
        pass

    def check_empty(self) -> None:
        pass


class NoChannel:
    def post(self, messages: Sequence[Message]) -> list[Arrival]:
        return []

    def release(self, sends: Iterable[Key]) -> None:
        pass

    def drain(self) -> None:
        pass


def overhead_us(num_ops: int = 1000, repeat: int = 20) -> float:
    """Microseconds an operation in a row of trivial ones, the best of some runs."""
    plan = build_plan("1f1b", Request(1, num_ops // 2))
    executor = Executor(plan, 0, {0: IdleStage()}, NoChannel())
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        executor.run()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / num_ops * 1e6


@dataclass(frozen=True)
class Step:
    """On one rank. cost_s: first start to last end."""

    cost_s: float
    cpu_s: float


class Contestant:
    """One rank of one schedule."""

    def __init__(
        self, simulation: Simulation, ps: ParallelState, channel: SlowChannel, timeline: Path | None
    ) -> None:
        self.log: list[tuple[float, float]] = []
        self.ps, self.iteration = ps, 0
        plan, costs, rank = simulation.plan, simulation.costs, ps.pp_rank
        place = plan.placement
        readers = [] if timeline is None else [TimelineWriter(timeline, ps)]
        self.recorder = Recorder(ps.device, readers) if readers else None
        mine = [place.stage_of(rank, chunk) for chunk in range(place.num_chunks)]
        sharded = bool(simulation.timeline.lanes)
        self.engine = engine = SlowEngine(simulation, ps, channel.clock, self.log) if sharded else None
        self.executor = Executor(
            plan,
            rank,
            {stage: SleepingStage(stage, costs, channel.clock, self.log) for stage in mine}
            if engine is None
            else engine.stages,
            channel,
            engine,
            units=engine and engine.units,
            boundaries=engine and engine.listener,
            recorder=self.recorder,
        )

    def step(self) -> Step:
        self.log.clear()
        collectives.barrier(self.ps.control_group)
        cpu = time.process_time()
        if self.engine is not None:
            self.engine.engine.begin_step(self.executor.plan.num_microbatches)
        self.executor.run(self.iteration)
        if self.engine is not None:
            self.engine.finish()
        self.iteration += 1
        return Step(self.log[-1][1] - self.log[0][0], time.process_time() - cpu)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


def run_all(
    ctx: RankContext, simulations: dict[str, Simulation], repeat: int, timeline: Path | None
) -> dict[str, list[Step]]:
    """On one rank: every step of every schedule but the first, in which ranks shake hands."""
    dp = DP if next(iter(simulations.values())).timeline.lanes else 1
    ps = ctx.make_ps(pp=ctx.world_size // dp, dp=dp)
    transport, clock = P2P(ps), Clock()
    contestants = {
        name: Contestant(
            one,
            ps,
            SlowChannel(transport, one.costs.comm * MS, clock),
            timeline if timeline is None or len(simulations) == 1 else timeline / name,
        )
        for name, one in simulations.items()
    }
    for one in contestants.values():
        one.step()
    steps: dict[str, list[Step]] = {name: [] for name in contestants}
    for order in interleaved(list(contestants), repeat):
        for name in order:
            steps[name].append(contestants[name].step())
    for one in contestants.values():
        one.close()
    return steps


def figures(simulation: Simulation, by_rank: list[list[Step]]) -> dict[str, Any]:
    """Of one schedule. by_rank: its steps on each rank."""
    measured_ms = [max(step.cost_s for step in steps) / MS for steps in zip(*by_rank, strict=True)]
    median, least = median_and_least(measured_ms)
    rate = (median - simulation.work) / median
    rows = simulation.plan.rows
    return {
        "chunks": simulation.plan.placement.num_chunks,
        "planned_bubble_rate": simulation.bubble_rate,
        "measured_bubble_rate": rate,
        "difference_points": 100 * (rate - simulation.bubble_rate),
        "planned_cost_ms": simulation.cost,
        "measured_cost_ms": median,
        "least_cost_ms": least,
        "measured_costs_ms": measured_ms,
        "peak_activation": max(simulation.peak_activation),
        "computations_per_rank": max(sum(IS_COMPUTE[op[0]] for op in row) for row in rows),
        "messages": simulation.num_messages,
        "measured_over_planned": median / simulation.cost,
        "exposed_ms": max(simulation.exposed, default=0.0),
        "lane_share": max(simulation.lane_share, default=0.0),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures that are printed. Raises PlanError for what cannot be planned."""
    simulations = {
        name: planned(
            name,
            args.stages,
            args.microbatches,
            time_f=args.time_f,
            time_b=args.time_b,
            time_w=args.time_w,
            comm=args.time_comm,
            num_chunks=args.chunks,
        )
        for name in args.schedules
    }
    if args.policies:
        (wire, *_) = run_ranks(wire_of_ranks, args.stages * DP)
        if args.wire_mb_per_s is not None:
            wire = LaneCosts(bandwidth=args.wire_mb_per_s * 1e6 * MS)
        print(f"wire: {1e3 * wire.latency:.0f} us a collective, {wire.bandwidth / 1e6 / MS:.4g} MB/s")
        simulations = {
            f"{name} {policy}": sharded(one, policy, wire)
            for name, one in simulations.items()
            for policy in args.policies
        }
    overhead = overhead_us()
    timeout = 60 + 3 * (args.repeat + 1) * sum(one.makespan for one in simulations.values()) * MS
    with Load() as load:
        num_ranks = args.stages * (DP if args.policies else 1)
        by_rank = run_ranks(run_all, num_ranks, simulations, args.repeat, args.timeline, timeout=timeout)
    own_s = sum(step.cpu_s for steps in by_rank for every in steps.values() for step in every)
    settings = ("stages", "microbatches", "time_f", "time_b", "time_w", "time_comm", "repeat")
    return {
        **{name: getattr(args, name) for name in settings},
        "executor_us_per_op": overhead,
        "foreign_cpu": load.foreign(own_s),
        "schedules": {
            name: figures(one, [steps[name] for steps in by_rank]) for name, one in simulations.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    width = max(map(len, ("schedule", *result["schedules"])))
    lines = [f"{'schedule':{width}} | bubble planned  measured  points | cost ms planned  median   least"]
    for name, one in result["schedules"].items():
        lines.append(
            f"{name:{width}} | {100 * one['planned_bubble_rate']:12.1f} %  {100 * one['measured_bubble_rate']:6.1f} %"
            f"  {one['difference_points']:+6.2f} | {one['planned_cost_ms']:15.1f}  {one['measured_cost_ms']:6.1f}"
            f"  {one['least_cost_ms']:6.1f}"
        )
        if one["exposed_ms"]:
            ratio = one["measured_over_planned"]
            lines[-1] += (
                f" | ratio {ratio:.3f} {'held' if ratio <= BAR else 'MISSED'}  lane busy {one['lane_share']:.0%}, "
                f"exposed {one['exposed_ms']:.1f} ms"
            )
    lines.append(f"CPU of other processes meanwhile: {share_text(result['foreign_cpu'])}")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--schedules",
        "--schedule",
        nargs="+",
        required=True,
        metavar="NAME",
        help="names that tools/show_schedule.py knows, run in turn",
    )
    parser.add_argument("--stages", type=positive, required=True, help="pipeline ranks, each a process")
    parser.add_argument("--microbatches", type=positive, required=True)
    parser.add_argument("--chunks", type=positive, help="chunks a stage, where a schedule has several (2)")
    for name, what in (("f", "forward"), ("b", "input gradient"), ("w", "weight gradient")):
        parser.add_argument(
            f"--time-{name}", type=times, default=[10.0], metavar="MS", help=f"{what} of a whole stage (10)"
        )
    parser.add_argument(
        "--time-comm", type=duration, default=0.0, metavar="MS", help="latency of a message (0)"
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, help="timed steps of each; the median counts (3)"
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="DIR",
        help="write each rank's measured timeline there; of several schedules, to DIR/NAME",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there, not to the console"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=("memory", "step", "budget"),
        default=[],
        help="gather and reduce by these",
    )
    parser.add_argument(
        "--wire-mb-per-s", type=duration, help="of gathers and reductions, not what is measured"
    )
    parser.add_argument("--check", action="store_true", help="status 1 where a step is over the bar")
    args = parser.parse_args(argv)
    args.schedules = list(dict.fromkeys(args.schedules))
    return args


def main(argv: list[str] | None = None) -> int:
    """Status 2 for what cannot be planned, 1 with --check and a step over the bar."""
    args = parse(argv)
    try:
        result = measure(args)
    except PlanError as error:
        print(f"pipeline_runtime: {error}", file=sys.stderr)
        return 2
    print(table(result), flush=True)
    text = json.dumps(result, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    else:
        print(text)
    over = [one for one in result["schedules"].values() if one["measured_over_planned"] > BAR]
    return int(args.check and bool(over))


if __name__ == "__main__":
    sys.exit(main())
