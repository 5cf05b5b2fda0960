"""Our pipelined training steps against each other and against torch.distributed.pipelining's: 2 ranks, PP = 2.

    python benchmarks/pipeline_training.py                     # 1F1B of both, 8 layers x 512, as in the README
    python benchmarks/pipeline_training.py --ours 1f1b zbv --torch 1f1b zbv --dtypes fp32
    python benchmarks/pipeline_training.py --size tiny --steps 3 --dtypes fp32 --json out.json

All train the same GPT (untied head) on the same tokens from the same weights: forward, backward, clip by the norm over
both ranks, fused AdamW. 1f1b has half of the layers on each rank, loss on the second; zbv a quarter in each chunk of a
V, embedding, head and loss on the first rank. The same two forked processes run all of them, one thread each, over
gloo, one step of each in turn, with a barrier before each; the turn is reversed every time. Ours do as the trainer: one
step warms up, --measure more are profiled, searched schedules are then solved again for what was measured, and all
later steps are timed. A step's wall time is that of the slower rank, its CPU time the sum over both; ratios are medians
over turns. bf16: ours holds bf16 weights with fp32 main weights and gradients; torch's runs under autocast, or with
--peer-bf16 pure entirely in bf16.

foreign: the share of the machine that other processes took during the timed steps. With any, wall times are too long,
and their ratios unsteady.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine_load import busy_s
from benchmarks.pipeline_contestants import NUM_RANKS, PEERS, OurPipeline, TorchPipeline, Work
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from tests.harness.ranks import RankContext, run_ranks

DTYPES = ("fp32", "bf16")
SIZES = {
    "small": {"layers": 8, "hidden": 512, "heads": 8, "seq": 512, "vocab": 8192},
    "tiny": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128, "vocab": 1024},
}
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # of losses: another order of sums; autocast rounds elsewhere


class Trainer(Protocol):
    def step(self) -> float | None:
        """The mean loss, None on ranks that do not know it."""

    def close(self) -> None: ...


class Step(NamedTuple):
    """On one rank. loss: None where it is not known. busy: CPU seconds of the whole machine meanwhile."""

    loss: float | None
    wall: float
    cpu: float
    busy: float


def timed(trainer: Trainer) -> Step:
    dist.barrier()
    busy, wall, cpu = busy_s(), time.perf_counter(), time.process_time()
    loss = trainer.step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Step(loss, wall, cpu, busy_s() - busy)


def run_case(
    ctx: RankContext, work: Work, args: argparse.Namespace, timeline: Path | None
) -> tuple[dict[str, list[Step]], dict[str, Any]]:
    """On each rank: every step of every contestant; and what ours solved after the measured steps."""
    ps = ctx.make_ps(pp=NUM_RANKS)
    flags = ["--keep-activation-output"] * args.keep_activation_output
    ours = {
        f"ours {name}": OurPipeline(
            work, name, ps, measured=args.measure, timeline=timeline and timeline / name, flags=flags
        )
        for name in args.ours
    }
    peers = {
        f"torch {name}": TorchPipeline(work, name, ctx.rank, pure=args.peer_bf16 == "pure")
        for name in args.torch
    }
    trainers: dict[str, Trainer] = {**ours, **peers}
    runs = {name: [timed(trainer) for _ in range(1 + args.measure)] for name, trainer in trainers.items()}
    solved = {name: one.solve_again() for name, one in ours.items()} if args.measure else {}
    for turn in range(args.steps):
        for name in list(trainers)[:: 1 if turn % 2 == 0 else -1]:
            runs[name].append(timed(trainers[name]))
    for trainer in trainers.values():
        trainer.close()
    return runs, solved


def time_case(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the timed steps of each contestant, and the median ratios of ours to all others."""
    work = Work(
        **SIZES[args.size] | ({"vocab": args.vocab} if args.vocab else {}),
        micro_batch=args.micro_batch,
        num_microbatches=args.global_batch // args.micro_batch,
        bf16=dtype == "bf16",
        line=tuple(args.line),
        v=tuple(args.v),
    )
    timeline = args.log_pipeline_timeline and args.log_pipeline_timeline / dtype
    by_rank = run_ranks(run_case, NUM_RANKS, work, args, timeline, timeout=args.timeout)
    figures = timing([runs for runs, _ in by_rank], 1 + args.measure, TOLERANCES[dtype])
    return {"dtype": dtype, "work": dataclasses.asdict(work), **figures, "solved": by_rank[0][1]}


def timing(by_rank: list[dict[str, list[Step]]], warm_up: int, tolerance: float) -> dict[str, Any]:
    """Medians over the steps of each contestant behind the warm-up, and the median ratios of ours to all others.

    Raises SystemExit where losses are not the same."""
    runs = {name: list(zip(*(runs[name] for runs in by_rank), strict=True)) for name in by_rank[0]}
    losses = {
        name: [statistics.fmean(one.loss for one in ranks if one.loss is not None) for ranks in steps]
        for name, steps in runs.items()
    }
    check_same_work(losses, tolerance)
    later = {name: steps[warm_up:] for name, steps in runs.items()}
    walls = {name: [max(one.wall for one in ranks) for ranks in steps] for name, steps in later.items()}
    cpus = {name: [sum(one.cpu for one in ranks) for ranks in steps] for name, steps in later.items()}
    cores = os.cpu_count() or 1
    own = sum(map(sum, cpus.values()))
    busy = sum(max(one.busy for one in ranks) for steps in later.values() for ranks in steps)
    return {
        "losses": losses,
        "wall_s": {name: statistics.median(values) for name, values in walls.items()},
        "least_wall_s": {name: min(values) for name, values in walls.items()},
        "cpu_s": {name: statistics.median(values) for name, values in cpus.items()},
        "cpu_s_by_rank": {
            name: [statistics.median(one.cpu for one in rank) for rank in zip(*steps, strict=True)]
            for name, steps in later.items()
        },
        "wall_ratios": ratios(walls),
        "cpu_ratios": ratios(cpus),
        "foreign": max(0.0, (busy - own) / sum(map(sum, walls.values())) / cores),
    }


def check_same_work(losses: dict[str, list[float]], tolerance: float) -> None:
    """Every step's loss is that of all contestants. Raises SystemExit."""
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        if not all(abs(one - values[0]) < tolerance for one in values):  # not a number: not the same either
            told = dict(zip(losses, values, strict=True))
            raise SystemExit(f"not the same work: losses of step {step} are {told}")


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """`ours a / b` -> median over turns, for each of ours and all contestants listed before it, and torch's."""
    names = list(times)
    return {
        f"{name} / {other}": statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))
        for place, name in enumerate(names)
        if name.startswith("ours")
        for at, other in enumerate(names)
        if at < place or other.startswith("torch")
    }


def show(case: dict[str, Any], tokens: int) -> None:
    """A table of one case."""
    dtype = case["dtype"]
    print(
        f"{dtype}: foreign {case['foreign']:.2f}, steps' losses {next(iter(case['losses'].values()))[-1]:.4f}"
    )
    for name, wall in case["wall_s"].items():
        least, cpu = case["least_wall_s"][name], case["cpu_s"][name]
        by_rank = " + ".join(f"{one:.3f}" for one in case["cpu_s_by_rank"][name])
        speed = f"{tokens / wall:,.0f} tokens/s"
        print(f"  {name:14} {wall:8.3f} s (least {least:.3f})  CPU {cpu:8.3f} s ({by_rank})  {speed}")
    for pair, ratio in case["wall_ratios"].items():
        print(f"  {pair:28} wall {ratio:.3f}  CPU {case['cpu_ratios'][pair]:.3f}")
    for name, one in case.get("solved", {}).items():
        times = "  ".join(f"{kind} {one[f'{kind}_ms']}" for kind in ("f", "b", "w"))
        kept = f" (kept: {one['kept']})" if one["kept"] else ""
        before, after = one["planned_bubble_before"], one["planned_bubble"]
        print(
            f"  {name}: measured ms by stage: {times}, transfer {one['comm_ms']}; planned {one['planned_ms']:.0f} ms, "
            f"bubble {before:.2%} before, {after:.2%} solved again{kept}"
        )
    sys.stdout.flush()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--ours", nargs="+", choices=sorted(SCHEDULES), default=["1f1b"], help="our schedules"
    )
    parser.add_argument("--torch", nargs="*", choices=PEERS, default=["1f1b"], help="torch's schedules")
    parser.add_argument("--vocab", type=int, default=0, help="instead of the size's: what the head weighs")
    parser.add_argument(
        "--line", type=int, nargs="*", default=[], help="layers by stage, one chunk a rank (even)"
    )
    parser.add_argument("--v", type=int, nargs="*", default=[], help="layers by stage of a V (even)")
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples a microbatch")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peer-bf16", choices=("autocast", "pure"), default="autocast")
    parser.add_argument("--measure", type=int, default=2, help="profiled steps; 0: keep the estimated plan")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each")
    parser.add_argument("--keep-activation-output", action="store_true", help="the trainer's flag, of ours")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one case")
    parser.add_argument(
        "--log-pipeline-timeline",
        type=Path,
        metavar="DIR",
        help="write ours to DIR/fp32/NAME and DIR/bf16/NAME, for tools/show_schedule.py --measured",
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    if min(args.steps, args.micro_batch, args.global_batch) < 1 or args.global_batch % args.micro_batch:
        parser.error(
            "--steps, --micro-batch and --global-batch: at least 1, the batch a multiple of the microbatch"
        )
    if args.measure < 0 or args.vocab < 0:
        parser.error("--measure and --vocab: at least 0")
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """The figures of every dtype, printed and returned."""
    args = parse(argv)
    torch.set_num_threads(1)
    cases = []
    for dtype in args.dtypes:
        case = time_case(dtype, args)
        cases.append(case)
        show(case, args.global_batch * SIZES[args.size]["seq"])
    if args.json:
        chosen = {
            name: getattr(args, name) for name in ("size", "ours", "torch", "peer_bf16", "measure", "steps")
        }
        args.json.write_text(json.dumps({**chosen, "ranks": NUM_RANKS, "cases": cases}, indent=1) + "\n")
    return cases


if __name__ == "__main__":
    main()
