"""Our sharded training step against one process, torch's DDP and FSDP2, DeepSpeed and Megatron-FSDP.

    python benchmarks/fsdp_vs_peers.py                                  # the timing tables of docs/performance.md
    python benchmarks/fsdp_vs_peers.py --memory                         # peaks of live bytes, in runs of their own
    python benchmarks/fsdp_vs_peers.py --sizes 3m --dtypes fp32 --microbatches 1 --rounds 3 --peers single fsdp2

All train the same GPT on the same tokens from the same weights with a fused Adam, and their losses after every step
must agree (1e-4 in fp32). Two forked ranks, one thread each, over gloo (`--device cuda`: one GPU a rank, NCCL) hold all
contestants at once and run one step of each in turn, back and forth, with a barrier before each: `single` on the first
rank, with everybody's microbatches. Wall time is the slowest rank's, CPU time all ranks' together; figures are
medians, ratios medians over the rounds. `foreign`: cores that were busy with anything else meanwhile.

Exposed communication is a contestant's wall time less that of `alone` (of ours: `ours-alone`), the same share of work
on every rank without a word to others; with bf16, FSDP2 computes in bf16 throughout and `alone` under autocast.

Memory: each contestant in ranks of its own, the peak of live bytes (C heap, CUDA's allocator) over what was alive
before it was built, in steps after the optimizer's state exists.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fsdp_peers import PEERS, import_packages, why_not
from benchmarks.fsdp_report import PARTNERS, Step, check_losses, memory_case, text_of, timing_case
from benchmarks.fsdp_workload import DTYPES, SIZES, Trainer, Work, make_work
from benchmarks.machine_load import busy_s, live_bytes
from megatron.core.device import Device
from megatron.core.transport.parallel_state import ParallelState, make_parallel_state
from megatron.core.transport.rank_grid import RankGrid
from tests.harness.live_peak import LivePeak
from tests.harness.ranks import RankContext, run_ranks

OURS = tuple(name for name in PARTNERS if name.startswith("ours-"))
# What is compared by default, so arranged that each part has its own peers (--in-parts).
PARTS = (
    ("single", "ddp", "deepspeed-z1", "ours-no_shard", "ours-optim"),
    (
        "single",
        "fsdp2",
        "fsdp2-bf16wire",
        "fsdp2-keep",
        "megatron-fsdp",
        "ours-optim_grads",
        "ours-optim_grads_params",
        "ours-optim_grads_params-bf16wire",
        "ours-plain",
    ),
)
DEFAULT = tuple(dict.fromkeys(name for part in PARTS for name in part))
WARM_UP = 2  # the first step records the order of gathers, the second replays it
MEMORY_STEPS = 3
STATE_BYTES = 16  # a parameter, unsharded: weights, gradients, two moments


def builders(names: Sequence[str]) -> dict[str, Callable[[Work], Trainer]]:
    """Ours are imported only where they take part: peers can be measured without the engine."""
    known: dict[str, Callable[[Work], Trainer]] = dict(PEERS)
    if any(name in OURS for name in names):
        from benchmarks.fsdp_ours import OURS as OUR_BUILDERS

        known |= OUR_BUILDERS
    return {name: known[name] for name in names}


def parallel_state(ctx: RankContext, kind: str) -> ParallelState:
    """All ranks data parallel; on CUDA each with a GPU of its own."""
    if kind == "cpu":
        return ctx.ps
    torch.cuda.set_device(ctx.rank)
    return make_parallel_state(RankGrid(ctx.world_size, dp=ctx.world_size), Device("cuda", ctx.rank))


def meet() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def one_step(work: Work, trainer: Trainer) -> Step:
    """Measured from one meeting of all ranks to the next."""
    gc.collect()  # not in the middle of somebody's step
    work.device.synchronize()
    meet()
    busy, wall, cpu = busy_s(), time.perf_counter(), time.process_time()
    loss = trainer.step()
    work.device.synchronize()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    meet()
    return Step(
        loss,
        wall_s,
        cpu_s,
        own_s=time.process_time() - cpu,
        span_s=time.perf_counter() - wall,
        busy_s=busy_s() - busy,
    )


def timed_ranks(
    ctx: RankContext, names: Sequence[str], size: str, dtype: str, microbatches: int, args: argparse.Namespace
) -> dict[str, list[Step]]:
    """On each rank, every contestant's steps, those of the warm-up first."""
    work = make_work(size, dtype, microbatches, parallel_state(ctx, args.device))
    trainers = {name: build(work) for name, build in builders(names).items()}
    gc.collect()
    gc.freeze()
    runs: dict[str, list[Step]] = {name: [] for name in trainers}
    for turn in range(WARM_UP + args.rounds):
        for name in names if turn % 2 == 0 else tuple(reversed(names)):
            runs[name].append(one_step(work, trainers[name]))
    return runs


def memory_ranks(
    ctx: RankContext, name: str, size: str, dtype: str, microbatches: int, args: argparse.Namespace
) -> tuple[int, list[Step]]:
    """On each rank: peak bytes of a contestant alone, and its steps."""
    work = make_work(size, dtype, microbatches, parallel_state(ctx, args.device))
    build = builders([name])[name]
    import_packages(name)
    gc.collect()
    before = live_bytes(work.device)
    trainer = build(work)
    steps = [one_step(work, trainer) for _ in range(WARM_UP)]
    meet()
    with LivePeak(work.device) as peak:
        steps += [one_step(work, trainer) for _ in range(MEMORY_STEPS)]
    return peak.peak_bytes - before, steps


def run_memory(
    names: Sequence[str], size: str, dtype: str, microbatches: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Contestants one after the other, each in new processes."""
    peaks: dict[str, int] = {}
    runs: dict[str, list[list[Step]]] = {}
    for name in names:
        by_rank = run_ranks(
            memory_ranks, args.ranks, name, size, dtype, microbatches, args, timeout=args.timeout
        )
        peaks[name] = max(peak for peak, _ in by_rank)
        runs[name] = [steps for _, steps in by_rank]
    check_losses(runs, dtype)
    return memory_case(size, dtype, microbatches, peaks)


def run_timing(
    names: Sequence[str], size: str, dtype: str, microbatches: int, args: argparse.Namespace
) -> dict[str, Any]:
    by_rank: list[Mapping[str, list[Step]]] = run_ranks(
        timed_ranks, args.ranks, names, size, dtype, microbatches, args, timeout=args.timeout
    )
    runs = {name: [rank[name] for rank in by_rank] for name in names}
    return timing_case(size, dtype, microbatches, runs, WARM_UP, args.ranks)


def contestants(dtype: str, args: argparse.Namespace, told: set[str]) -> tuple[str, ...]:
    """Those asked for that can take part; says once why another cannot."""
    names = []
    for name in args.peers:
        reason = why_not(name, args.device, dtype, args.ranks)
        if reason is None:
            names.append(name)
        elif (line := f"{name} is left out: {reason}") not in told:
            told.add(line)
            print(line, file=sys.stderr)
    return tuple(names)


def parts_of(names: Sequence[str], size: str, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """What is held at once: everything, or part by part, what belongs to no part in the last."""
    held = STATE_BYTES * SIZES[size].num_params * args.ranks * len(names)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    auto = args.device == "cpu" and held > memory / 2
    if args.in_parts == "no" or (args.in_parts == "auto" and not auto):
        return [tuple(names)]
    parts = [tuple(name for name in names if name in part) for part in PARTS]
    parts[-1] += tuple(name for name in names if name not in DEFAULT)
    return [part for part in parts if part and part != ("single",)] or [tuple(names)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3m", "34m", "100m"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--microbatches", nargs="+", type=int, default=[1, 4], help="of a rank, of one sample each"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=[*PEERS, *OURS],
        default=None,
        metavar="NAME",
        help=", ".join([*PEERS, *OURS]),
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument(
        "--in-parts",
        choices=("auto", "yes", "no"),
        default="auto",
        help="hold fewer contestants in memory at once, each part with a `single` of its own (auto: where all would "
        "take more than half of the machine's)",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    if min(args.rounds, args.ranks, *args.microbatches) < 1:
        parser.error("--rounds, --ranks and --microbatches: at least 1")
    if args.peers is None:
        extra = ("alone", "ours-alone") if args.device == "cuda" else ()
        args.peers = [*DEFAULT, *extra]
    args.peers = list(dict.fromkeys(args.peers))
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    # DeepSpeed calls collectives by names that torch has replaced, and would print that at each call
    warnings.filterwarnings(
        "ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning
    )
    told: set[str] = set()
    cases = []
    for size in args.sizes:
        for dtype in args.dtypes:
            for microbatches in args.microbatches:
                names = contestants(dtype, args, told)
                for part in [names] if args.memory else parts_of(names, size, args):
                    run = run_memory if args.memory else run_timing
                    case = run(part, size, dtype, microbatches, args)
                    cases.append(case)
                    print(text_of(case), flush=True)
                    if args.json:
                        described = {"ranks": args.ranks, "device": args.device, "rounds": args.rounds}
                        args.json.write_text(json.dumps(described | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
