"""How close the pipeline runtime comes to its plan: real ranks, real executor and messages, compute that sleeps.

    python benchmarks/pipeline_runtime.py --schedule 1f1b --stages 8 --microbatches 24 \\
        --time-f 18 --time-b 18 --time-w 9
    python benchmarks/pipeline_runtime.py --schedule interleaved --chunks 2 --stages 4 --microbatches 12 --time-comm 2
    python benchmarks/pipeline_runtime.py --schedule 1f1b --stages 4 --microbatches 8 --timeline DIR

Times are milliseconds of a whole stage, one number or one a stage with commas, divided over a stage's chunks. A
computation sleeps to an absolute deadline, so that many stages are meaningful on few cores: that the system wakes a
sleeper late is not the runtime's doing and is made up by the next sleep, while all time in the executor and in messages
counts. A message counts as arrived --time-comm after its sender computed it (a timestamp that it carries) and its
receive was posted, or when it really did, if that was later.

Prints one JSON object: planned and measured bubble rate and cost, their difference in points, and the executor's own
time an operation. The bubble rate is (cost - m * max over stages(F+B+W)) / cost, where cost is the most that a rank
takes from its first start to its last end. foreign_cpu: share of the machine that other processes took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core import collectives
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.echoes import Key
from megatron.core.pipeline_parallel.plan.ir import BW, LAST_COMPUTE, B, F, Plan, PlanError, W
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.registry import build_plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.runtime.channel import Arrival, Message
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from tests.harness.ranks import RankContext, run_ranks

MS = 1e-3


class Clock:
    """The time of one rank, less `late_s`: how late the system woke it from its last sleep."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self.late_s

    def sleep_until(self, deadline: float) -> None:
        """Afterwards it is `deadline`, unless it was later already."""
        deadline = max(deadline, self.now())
        left = deadline - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.late_s = time.monotonic() - deadline


class SleepingStage:
    """`protocols.Stage` whose computations take a given time. Its tensors say when they were computed, and how late
    their sender is."""

    splits = True

    def __init__(self, stage: int, costs: CostModel, clock: Clock, log: list[tuple[float, float]]) -> None:
        self.times = {kind: costs.durations()[kind][stage] * MS for kind in (F, B, W, BW)}
        self.clock, self.log = clock, log

    def _compute(self, kind: int) -> Tensor:
        start = self.clock.now()
        end = start + self.times[kind]
        message = np.array(
            [end, 0.0]
        )  # shares its memory with the tensor: little is left to do after the sleep
        tensor = torch.from_numpy(message)
        self.log.append((start, end))
        self.clock.sleep_until(end)
        message[1] = self.clock.late_s
        return tensor

    def forward(self, microbatch: int, hidden: Tensor | None) -> Tensor:
        return self._compute(F)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor:
        return self._compute(BW)

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor:
        return self._compute(B)

    def backward_weight(self, microbatch: int) -> None:
        self._compute(W)

    def check_empty(self) -> None:
        pass


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


def run_plan(
    ctx: RankContext, plan: Plan, costs: CostModel, repeat: int, timeline: str | None
) -> list[tuple[float, float]]:
    """(first start to last end, CPU time) of every step but the first on this rank; seconds."""
    ps = ctx.make_ps(pp=ctx.world_size)
    clock, log = Clock(), list[tuple[float, float]]()
    place = plan.placement
    stages = [place.stage_of(ctx.rank, chunk) for chunk in range(place.num_chunks)]
    writer = None if timeline is None else TimelineWriter(Path(timeline), ps)
    executor = Executor(
        plan,
        ctx.rank,
        {stage: SleepingStage(stage, costs, clock, log) for stage in stages},
        SlowChannel(P2P(ps), costs.comm * MS, clock),
        recorder=writer,
    )
    steps = []
    for iteration in range(repeat + 1):
        collectives.barrier(ps.control_group)
        log.clear()
        cpu = time.process_time()
        executor.run(iteration)
        steps.append((log[-1][1] - log[0][0], time.process_time() - cpu))
    if writer is not None:
        writer.close()
    return steps[1:]  # the first step shakes hands


def machine_busy_s() -> float | None:
    """CPU seconds that all processes of this machine have used, where the system tells (Linux)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures that are printed. Raises PlanError for what cannot be planned."""
    request = Request(args.stages, args.microbatches, args.chunks)
    plan = build_plan(args.schedule, request)
    costs = CostModel.of_ranks(
        plan.placement, time_f=args.time_f, time_b=args.time_b, time_w=args.time_w, comm=args.time_comm
    )
    plan = lower(plan, costs)
    planned = simulate(plan, costs)
    overhead = overhead_us()
    before, start = machine_busy_s(), time.monotonic()
    timeout = 60 + 3 * (args.repeat + 1) * planned.makespan * MS
    by_rank = run_ranks(run_plan, args.stages, plan, costs, args.repeat, args.timeline, timeout=timeout)
    elapsed, after = time.monotonic() - start, machine_busy_s()
    own = sum(cpu for steps in by_rank for _, cpu in steps)
    costs_ms = [max(span for span, _ in step) / MS for step in zip(*by_rank, strict=True)]
    work = args.microbatches * max(costs.rank_times(plan.placement))
    measured = statistics.median(costs_ms)
    rate = (measured - work) / measured
    return {
        "schedule": args.schedule,
        "stages": args.stages,
        "chunks": plan.placement.num_chunks,
        "microbatches": args.microbatches,
        "planned_bubble_rate": planned.bubble_rate,
        "measured_bubble_rate": rate,
        "difference_points": 100 * (rate - planned.bubble_rate),
        "planned_cost_ms": planned.cost,
        "measured_cost_ms": measured,
        "measured_costs_ms": costs_ms,
        "executor_us_per_op": overhead,
        "computations_per_rank": max(sum(op[0] <= LAST_COMPUTE for op in row) for row in plan.rows),
        "messages": planned.num_messages,
        "foreign_cpu": None
        if before is None or after is None
        else max(0.0, (after - before - own) / elapsed / (os.cpu_count() or 1)),
    }


def times(text: str) -> list[float]:
    """`18` or `18,18,20`."""
    values = [float(word) for word in text.split(",")]
    if not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"times are finite and at least 0, not {text}")
    return values


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {text}")
    return value


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--schedule", required=True, help="a name that tools/show_schedule.py knows")
    parser.add_argument("--stages", type=positive, required=True, help="pipeline ranks, each a process")
    parser.add_argument("--microbatches", type=positive, required=True)
    parser.add_argument("--chunks", type=positive, help="chunks a stage; default: the schedule's")
    for name, what in (("f", "forward"), ("b", "input gradient"), ("w", "weight gradient")):
        parser.add_argument(
            f"--time-{name}", type=times, default=[10.0], metavar="MS", help=f"{what} of a whole stage (10)"
        )
    parser.add_argument("--time-comm", type=float, default=0.0, metavar="MS", help="latency of a message (0)")
    parser.add_argument("--repeat", type=positive, default=3, help="timed steps; the median counts (3)")
    parser.add_argument("--timeline", metavar="DIR", help="write each rank's measured timeline there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Status 2 for what cannot be planned."""
    args = parse(argv)
    try:
        print(json.dumps(measure(args), indent=1))
    except PlanError as error:
        print(f"pipeline_runtime: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
