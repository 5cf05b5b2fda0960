#!/usr/bin/env python3
"""Fully sharded data parallelism in zero-bubble pipelines: real training on 4 ranks, PP 2 x DP 2, under ZBV.

    python benchmarks/fsdp_pipelines.py                                  # time, fp32 and bf16
    python benchmarks/fsdp_pipelines.py --memory                         # peaks of live bytes, in runs of their own
    python benchmarks/fsdp_pipelines.py --size tiny --dtypes fp32 --steps 3 --check

Contestants: `ours optim`, the sharded optimizer (weights and gradients whole while a step runs); `ours step` and `ours
memory`, weights, gradients and optimizer sharded (optim_grads_params) under these --fsdp-reshard-policy; `torch fsdp2`,
torch's FSDP2 under torch's ScheduleZBVZeroBubble. All train one GPT (untied head) on the same tokens from the same
weights: forward, backward, clip by the norm over all ranks, fused AdamW; their losses after every step must agree. Four
forked ranks over gloo, one thread each, hold all contestants and run one step of each in turn, back and forth, with a
barrier before each. A step's wall time is that of the slowest rank, its CPU time the sum over ranks; ratios are medians
over turns. bf16: ours holds bf16 weights with fp32 main weights and gradients, torch's fp32 shards and bf16 weights,
gradients reduced in fp32. foreign: the share of the machine that other processes took meanwhile.

Memory: each contestant in ranks of its own. Of each of ours and each rank, what its plan holds where it is fullest, by
kind, and the most whole weights and gradients, as planned and as the engine has counted: the same to the byte. Of all,
the peak of live bytes over what was alive before the contestant was built, in steps after the warm-up. `below optim`:
how much lower the fullest rank's peak is than that of `ours optim`, and what plans say. Both print which bars are held.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine_load import live_bytes
from benchmarks.pipeline_contestants import NUM_RANKS, OurPipeline, TorchPipeline, Work
from benchmarks.pipeline_training import (
    DTYPES,
    TOLERANCES,
    Step,
    Trainer,
    check_same_work,
    show,
    timed,
    timing,
)
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.held.lanes import Held as Boundary
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import Kind, Row
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.transport.mesh import device_mesh
from megatron.core.transport.parallel_state import ParallelState
from tests.harness.live_peak import LivePeak
from tests.harness.ranks import RankContext, run_ranks

DP = 2
SIZES = {
    "small": {"layers": 8, "hidden": 512, "heads": 8, "seq": 256, "vocab": 4096},
    "deep": {"layers": 24, "hidden": 384, "heads": 6, "seq": 128, "vocab": 1024},
    "tiny": {"layers": 8, "hidden": 128, "heads": 4, "seq": 128, "vocab": 1024},
}
FSDP = ("--use-custom-fsdp", "--data-parallel-sharding-strategy")
OURS = {
    "ours optim": (*FSDP, "optim", "--overlap-grad-reduce", "--overlap-param-gather"),
    "ours step": (*FSDP, "optim_grads_params", "--fsdp-reshard-policy", "step"),
    "ours memory": (*FSDP, "optim_grads_params"),
}
TORCH = "torch fsdp2"
CONTESTANTS = (*OURS, TORCH)
# Ours over another one, at most. `step` holds what torch's schedules hold: whole weights and gradients for a step.
CPU_BARS = {"ours step / ours optim": 1.10, "ours memory / ours optim": 1.25, "ours step / torch fsdp2": 0.85}
LIVE_BARS = {"ours step / torch fsdp2": 0.90, "ours memory / ours step": 1.0}
MEMORY_BAR = 0.02  # of the peak of `ours optim`: how far what is saved may be from what plans say
WARM_UP, MEMORY_STEPS = 2, 3


def build(name: str, work: Work, ps: ParallelState) -> Trainer:
    if name == TORCH:
        return TorchPipeline(work, "zbv", ps.pp_rank, mesh=device_mesh(ps, "pp", "dp"))
    return OurPipeline(work, "zbv", ps, flags=OURS[name])


def timed_ranks(ctx: RankContext, work: Work, names: Sequence[str], steps: int) -> dict[str, list[Step]]:
    """On each rank, every step of every contestant, those of the warm-up first."""
    ps = ctx.make_ps(pp=NUM_RANKS, dp=DP)
    trainers = {name: build(name, work, ps) for name in names}
    gc.collect()
    gc.freeze()
    runs: dict[str, list[Step]] = {name: [] for name in names}
    for turn in range(WARM_UP + steps):
        for name in names if turn % 2 == 0 else tuple(reversed(names)):
            runs[name].append(timed(trainers[name]))
    return runs


@dataclasses.dataclass(frozen=True)
class Held:
    """A rank's memory, in bytes. live: at most, over what was alive before. planned, most: `planned_and_counted`."""

    live: int
    losses: tuple[float, ...]
    planned: dict[str, int]
    most: dict[str, tuple[int, int]]


def memory_ranks(ctx: RankContext, work: Work, name: str) -> Held:
    ps = ctx.make_ps(pp=NUM_RANKS, dp=DP)
    gc.collect()
    before = live_bytes(ps.device)
    trainer = build(name, work, ps)
    losses = [trainer.step() for _ in range(WARM_UP)]
    dist.barrier()
    with LivePeak(ps.device) as live:
        losses += [trainer.step() for _ in range(MEMORY_STEPS)]
    planned, most = planned_and_counted(trainer) if isinstance(trainer, OurPipeline) else ({}, {})
    known = tuple(loss for loss in losses if loss is not None)  # by ranks with the last stage, or by all
    return Held(live.peak_bytes - before, known, planned, most)


def planned_and_counted(ours: OurPipeline) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Bytes of a rank: by kind where its plan holds the most, and of whole weights and gradients the most, as
    planned and as the engine has counted. Activations are the plan's estimate; the engine knows nothing of them.
    """
    spec, rank = ours.runner.spec, ours.ps.pp_rank
    assert spec.stages_units is not None, "one data parallel rank shares nothing"
    assert spec.residency is not None, "units without a residency"
    plan = plan_for(spec, ours.count, PlanPurpose.TRAIN)
    row, units = plan.rows[rank], RankUnits(rank, plan.placement, spec.stages_units)
    walk = walk_row(row, units, spec.residency, spec.costs, boundaries=True)
    # Cut gradients have no memory at rest before their unit's first reduction.
    shards = [
        size // ours.ps.dp_reduce_group.size * spec.residency.grads_sharded for size in units.grad_bytes
    ]
    summed_at = first_reductions(row, units)
    at_rest = ours.engine.persistent_bytes() - sum(shards)

    def by_kind(moment: Boundary) -> dict[str, int]:
        summed = sum(shards[unit] for unit, place in summed_at.items() if place <= moment.place)
        return {
            "at rest": at_rest + summed,
            "gathered": moment.gathered,
            "gradients": moment.gradients + moment.under_way,
            "activations": round(moment.activation),
        }

    moments = [by_kind(moment) for moment in walk.boundaries]
    tracker = ours.engine.memory_tracker
    counted = {
        "gathered": tracker.peak("gathered"),
        "gradients": tracker.peak("grads") + tracker.peak("extra"),
    }
    most = {kind: (max(one[kind] for one in moments), size) for kind, size in counted.items()}
    return max(moments, key=lambda one: sum(one.values())), most


def first_reductions(row: Row, units: RankUnits) -> dict[int, int]:
    """Number of a rank's unit -> place of the operation that reduces it first."""
    found: dict[int, int] = {}
    for place, op in enumerate(row):
        if op[0] == Kind.REDUCE:
            for number in units.of[op[1]][op[4] : op[5]]:
                found.setdefault(number, place)
    return found


def run_time(work: Work, names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    dtype = dtype_of(work)
    by_rank = run_ranks(timed_ranks, NUM_RANKS * DP, work, names, args.steps, timeout=args.timeout)
    case = {"dtype": dtype, "work": dataclasses.asdict(work), **timing(by_rank, WARM_UP, TOLERANCES[dtype])}
    show(case, work.micro_batch * work.num_microbatches * DP * work.seq)
    case["missed"] = judged(f"{dtype}: CPU time", case["cpu_ratios"], CPU_BARS)
    return case


def judged(what: str, ratios: dict[str, float], bars: dict[str, float]) -> list[str]:
    """Print of each bar whether it is held, where both took part; those that are not."""
    lines = {
        f"{what} of {pair}: {ratios[pair]:.3f}, at most {bar}": ratios[pair] <= bar
        for pair, bar in bars.items()
        if pair in ratios
    }
    for line, held in lines.items():
        print(f"{'held' if held else 'MISSED'}: {line}", flush=True)
    return [line for line, held in lines.items() if not held]


def run_memory(work: Work, names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    dtype = dtype_of(work)
    held: dict[str, list[Held]] = {
        name: run_ranks(memory_ranks, NUM_RANKS * DP, work, name, timeout=args.timeout) for name in names
    }
    losses = {
        name: [
            statistics.fmean(told) for told in zip(*(one.losses for one in ranks if one.losses), strict=True)
        ]
        for name, ranks in held.items()
    }
    check_same_work(losses, TOLERANCES[dtype])
    live = {name: max(one.live for one in ranks) for name, ranks in held.items()}
    planned = {
        name: max(sum(one.planned.values()) for one in ranks) for name, ranks in held.items() if name in OURS
    }
    base = "ours optim"
    saved = {
        name: (live[base] - live[name], planned[base] - planned[name])
        for name in names
        if base in names and name in OURS and name != base
    }
    missed = [
        f"{dtype}: {name}: {told(found)} below {base}, {told(said)} planned: more than {MEMORY_BAR:.0%} of "
        f"{told(live[base])} apart"
        for name, (found, said) in saved.items()
        if abs(found - said) > MEMORY_BAR * live[base]
    ] + [
        f"{dtype}: {name}, rank {rank}: at most {counted} bytes of {kind} counted, {said} planned"
        for name, ranks in held.items()
        for rank, one in enumerate(ranks)
        for kind, (said, counted) in one.most.items()
        if said != counted
    ]
    case = {
        "dtype": dtype,
        "work": dataclasses.asdict(work),
        "live": live,
        "planned": planned,
        "below_optim": saved,
        "ranks": {name: [dataclasses.asdict(one) for one in ranks] for name, ranks in held.items()},
        "missed": missed,
    }
    show_memory(case, held)
    over = {f"{one} / {other}": live[one] / live[other] for one in live for other in live}
    missed += judged(f"{dtype}: live peak", over, LIVE_BARS)
    return case


def show_memory(case: dict[str, Any], held: dict[str, list[Held]]) -> None:
    base = case["live"].get("ours optim")
    print(f"{case['dtype']}: peaks in MiB of the fullest rank, and of each")
    for name, ranks in held.items():
        of_base = f" ({case['live'][name] / base:.3f} of ours optim)" if base else ""
        each = " ".join(told(one.live) for one in ranks)
        print(f"  {name:12} live {told(case['live'][name])}{of_base}: {each}")
        for rank, one in enumerate(ranks):
            if one.planned:
                most = ", ".join(
                    f"{kind} {told(said)} (counted {told(counted)})"
                    for kind, (said, counted) in one.most.items()
                )
                print(f"    rank {rank}: planned {kinds(one.planned)}; at most {most}")
    for name, (found, said) in case["below_optim"].items():
        off = (found - said) / base
        print(
            f"  {name}: below optim {told(found)}, planned {told(said)}: off by {100 * off:+.2f} % of optim's peak"
        )
    sys.stdout.flush()


def told(size: int) -> str:
    return f"{size / 2**20:.2f}"


def kinds(held: dict[str, int]) -> str:
    return f"{told(sum(held.values()))} ({', '.join(f'{kind} {told(size)}' for kind, size in held.items())})"


def dtype_of(work: Work) -> str:
    return "bf16" if work.bf16 else "fp32"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--num-microbatches", type=int, default=8, help="of a data parallel rank")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--check", action="store_true", help="status 1 where a bar is not held")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    if min(args.steps, args.micro_batch) < 1 or args.num_microbatches < 2 * NUM_RANKS:
        parser.error(f"--steps and --micro-batch: at least 1; --num-microbatches: at least {2 * NUM_RANKS}")
    args.contestants = [name for name in CONTESTANTS if name in args.contestants]
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """The figures of every dtype, printed and returned. Raises SystemExit with --check and a bar that is not held."""
    args = parse(argv)
    torch.set_num_threads(1)
    cases = []
    for dtype in args.dtypes:
        work = Work(
            **SIZES[args.size],
            micro_batch=args.micro_batch,
            num_microbatches=args.num_microbatches,
            bf16=dtype == "bf16",
            dp=DP,
        )
        cases.append((run_memory if args.memory else run_time)(work, args.contestants, args))
    if args.json:
        args.json.write_text(
            json.dumps({"size": args.size, "ranks": NUM_RANKS * DP, "cases": cases}, indent=1) + "\n"
        )
    missed = [line for case in cases for line in case["missed"]]
    for line in missed:
        print(f"not held: {line}")
    if args.check and missed:
        raise SystemExit(1)
    return cases


if __name__ == "__main__":
    main()
