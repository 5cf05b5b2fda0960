#!/usr/bin/env python3
"""What pipeline schedules hold of activations in real training, beside what their plans say, and beside 1F1B.

Every rank trains as the trainer does (configuration, plans, engine, runner) on a forked process with one thread. Of
each rank is measured, in the steps after the first one, over what was in use before the step: the most bytes in use
between two operations of the plan, which is what plans count, and the most at any time, temporaries within operations
included. The plan's peak is what `simulate` says by the bytes that `ModelCosts` estimates, by which limits are kept. A
schedule's peak is that of its fullest rank. All schedules train the same model on as many ranks with the same
microbatches; `of 1f1b` sets their fullest ranks against 1F1B's, by plan and as measured, and the bounds are those that
the project promises.

Memory is counted on the C heap (`mallinfo2`): tensors, messages under way, and whatever Python and torch take besides.

    python benchmarks/pipeline_memory.py --ranks 4
    python benchmarks/pipeline_memory.py --ranks 8 --size tiny --check
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, Plan, op_text
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.runtime.profiler import bytes_in_use
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.report.timers import Timers
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.data import StepBatches
from megatron.training.run.describe import described
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.state import StepTask
from tests.harness.live_peak import LivePeak
from tests.harness.ranks import RankContext, run_ranks

BASE = "1f1b"
SCHEDULES = (BASE, "v-half", "v-min", "zbv", "zb-1p")
SIZES = {
    "small": {"hidden": 256, "heads": 4, "seq": 256, "vocab": 256},
    "tiny": {"hidden": 128, "heads": 2, "seq": 128, "vocab": 128},
}
STEPS = 2  # that are measured
WITHIN = 0.10  # a measured peak is within this share of the plan's
# Ranks -> schedule -> the most that its fullest rank may hold of what 1F1B's holds.
BOUNDS = {4: {"v-half": 0.80, "v-min": 0.55}, 8: {"v-half": 0.68, "v-min": 0.55}}


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained. layers: of the whole model. flags: further ones of the trainer."""

    ranks: int
    layers: int
    num_microbatches: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    micro_batch: int = 1
    flags: tuple[str, ...] = ()

    def config(self, schedule: str, rank: int) -> Config:
        """The trainer's, of a launch with these flags. Raises ConfigurationError."""
        samples = self.micro_batch * self.num_microbatches
        words = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads} "
            f"--seq-length {self.seq} --max-position-embeddings {self.seq} --untie-embeddings-and-output-weights "
            "--hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer "
            f"--vocab-size {self.vocab - 1} --padded-vocab-size {self.vocab} --lr 1e-3 --train-iters 10 "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {samples} "
            f"--pipeline-model-parallel-size {self.ranks} --pipeline-schedule {schedule}"
        ).split()
        env = LaunchEnv(world_size=self.ranks, local_world_size=self.ranks, rank=rank, local_rank=rank)
        return described(parse_config([*words, *self.flags], env=env))

    def batches(self) -> list[dict[str, Tensor]]:
        """Of one step: the same in every step, and in memory before it."""
        generator = torch.Generator().manual_seed(5)
        shape = (self.num_microbatches, self.micro_batch, self.seq + 1)
        text = torch.randint(self.vocab, shape, generator=generator)
        positions = torch.arange(self.seq).expand(self.micro_batch, self.seq)
        return [
            {
                "tokens": rows[:, :-1].contiguous(),
                "labels": rows[:, 1:].contiguous(),
                "position_ids": positions,
                "loss_mask": torch.ones(self.micro_batch, self.seq),
            }
            for rows in text
        ]


def forward_step(iterator: Iterator[Mapping[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """As pretrain_gpt.py's."""
    batch = next(iterator)  # nothing on a rank that neither embeds nor has the loss
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, lambda losses: gpt_loss(batch["loss_mask"], losses)


class HeapRecorder:
    """A `Recorder` that looks at the bytes in use behind each operation. peak: the most; place: behind which."""

    def __init__(self, ctx: RankContext) -> None:
        self._device = ctx.device
        self.peak = self.place = 0

    def now(self) -> float:
        return 0.0

    def begin_step(self, plan: Plan, rank: int, iteration: int) -> None:
        self._row = plan.rows[rank]

    def record(self, place: int, start_s: float, end_s: float, wait_s: float, lane_s: float = 0.0) -> None:
        if not IS_COMPUTE[self._row[place][0]]:
            return
        used = bytes_in_use(self._device)
        if used > self.peak:
            self.peak, self.place = used, place

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        pass

    def text(self) -> str:
        return op_text(self._row[self.place])


def measure(ctx: RankContext, work: Work, schedule: str) -> dict[str, Any]:
    """One rank: bytes of its peaks over what was in use before the step, and what the plan says."""
    torch.set_num_threads(1)
    config = work.config(schedule, ctx.rank)
    ps = ctx.make_ps(pp=work.ranks)
    planner = config.planner()
    spec = planner.spec
    engine = build_engine(config, ps, partial(build_gpt_model, config, ps))
    heap = HeapRecorder(ctx)
    session = SimpleNamespace(config=config, ps=ps, timers=Timers(0))
    runner = PipelineRunner(session, engine, forward_step, planner, recorder=heap)
    batches = work.batches()

    def step(iteration: int) -> None:
        drawn = StepBatches(iter(batches), reads=spec.reads_data(ps.pp_rank))
        runner.train(drawn, StepTask(iteration, work.num_microbatches))

    step(1)  # buffers are allocated, routes know their shapes
    found = []
    for iteration in range(2, 2 + STEPS):
        gc.collect()
        before = bytes_in_use(ctx.device)
        heap.peak = 0
        with LivePeak(ctx.device) as live:
            step(iteration)
        found.append((heap.peak - before, live.above_baseline, heap.text()))
    costs = config.model_costs
    assert costs is not None, "the configuration is complete"
    planned = simulate(plan_for(spec, work.num_microbatches, PlanPurpose.TRAIN), costs.of_stages(spec.stages))
    between, anywhere, where = max(found)
    return {
        "planned": round(planned.peak_activation[ps.pp_rank]),
        "between": between,
        "anywhere": max(anywhere, *(one[1] for one in found)),
        "behind": where,
    }


@dataclasses.dataclass(frozen=True)
class Result:
    """A schedule's ranks. planned, between, anywhere: bytes by rank. behind: the operation of the peak."""

    schedule: str
    planned: tuple[int, ...]
    between: tuple[int, ...]
    anywhere: tuple[int, ...]
    behind: tuple[str, ...]

    @property
    def off(self) -> float:
        """What was measured between operations beside the plan, on the rank farthest from it: 0.02 is 2 % more."""
        shares = [found / said - 1 for found, said in zip(self.between, self.planned, strict=True)]
        return max(shares, key=abs)

    def over(self, base: Result, kind: str) -> float:
        """The fullest rank beside 1F1B's."""
        return max(getattr(self, kind)) / max(getattr(base, kind))


def measure_all(work: Work, schedules: Sequence[str], timeout: float) -> list[Result]:
    """Each schedule on processes of its own."""
    results = []
    for schedule in schedules:
        by_rank = run_ranks(measure, work.ranks, work, schedule, timeout=timeout)
        columns = {name: tuple(one[name] for one in by_rank) for name in by_rank[0]}
        results.append(Result(schedule, **columns))
    return results


def problems(results: Sequence[Result], ranks: int) -> list[str]:
    """What is not as promised, a line each."""
    found = [
        f"{one.schedule}: {100 * one.off:+.1f} % of its plan" for one in results if abs(one.off) > WITHIN
    ]
    base = next((one for one in results if one.schedule == BASE), None)
    for one in results:
        bound = BOUNDS.get(ranks, {}).get(one.schedule)
        if bound is not None and base is not None:
            found += [
                f"{one.schedule}: {one.over(base, kind):.3f} of {BASE} ({kind}), more than {bound}"
                for kind in ("between", "anywhere")
                if one.over(base, kind) > bound
            ]
    return found


def table(results: Sequence[Result]) -> str:
    """A line a schedule; MiB."""
    base = next((one for one in results if one.schedule == BASE), None)
    lines = [
        f"{'schedule':9} {'plan':>7} {'between':>8} {'anywhere':>8} {'off plan':>8}"
        f" | of {BASE}: {'plan':>6} {'between':>8} {'anywhere':>8} | measured by rank, MiB"
    ]
    for one in results:
        sizes = [max(of) / 2**20 for of in (one.planned, one.between, one.anywhere)]
        shares = [one.over(base, kind) if base else 0.0 for kind in ("planned", "between", "anywhere")]
        ranks = " ".join(f"{size / 2**20:.1f}" for size in one.between)
        lines.append(
            f"{one.schedule:9} {sizes[0]:7.2f} {sizes[1]:8.2f} {sizes[2]:8.2f} {100 * one.off:+7.1f}%"
            f" | {shares[0]:15.3f} {shares[1]:8.3f} {shares[2]:8.3f} | {ranks}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", choices=SIZES, default="small", help="of a layer")
    parser.add_argument("--layers", type=int, help="of the model (default: 6 a rank, 4 of more than 4)")
    parser.add_argument("--num-microbatches", type=int, help="of a step (default: 3 a rank)")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--flags", default="", help="further flags of the trainer, in one word, as '--bf16'")
    parser.add_argument("--check", action="store_true", help="status 1 where a promise is not kept")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one schedule")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    if args.ranks < 2 or args.micro_batch < 1 or (args.num_microbatches or 1) < 1:
        parser.error("--ranks: at least 2; --micro-batch, --num-microbatches: at least 1")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    work = Work(
        args.ranks,
        args.layers or (6 if args.ranks <= 4 else 4) * args.ranks,
        args.num_microbatches or 3 * args.ranks,
        micro_batch=args.micro_batch,
        flags=tuple(args.flags.split()),
        **SIZES[args.size],
    )
    results = measure_all(work, args.schedules, args.timeout)
    print(table(results))
    broken = problems(results, args.ranks)
    for line in broken:
        print(line)
    if args.json:  # bytes
        described = {
            "work": dataclasses.asdict(work),
            "results": [dataclasses.asdict(one) for one in results],
        }
        args.json.write_text(json.dumps({**described, "problems": broken}, indent=1) + "\n")
    if args.check and broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
