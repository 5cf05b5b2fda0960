"""What it costs to have experts on two ranks: CPU time of both, over that of one process with the tokens of both.

    python benchmarks/expert_parallel.py               # the figures of docs/moe.md
    python benchmarks/expert_parallel.py --dtypes fp32 --rounds 3 --dispatchers alltoall

The model of experts.py: 4 layers, hidden 512, 8 experts of 1,024, top-2, 2,048 tokens a rank; ranks are forked, of one
thread each, over gloo. Both sides train by the trainer's engine: forward, backward, clip, AdamW. Sides take turns, a
few steps at a time; the ratio is the median over pairs. The first step's loss has to be the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experts import FLAGS, MICRO_BATCH, SHAPE
from tests.harness.layouts import NO_DROPOUT, Layout, Run
from tests.harness.ranks import RankContext, run_ranks

VOCAB = SHAPE["vocab"]
WORDS = (
    f"--num-layers {SHAPE['layers']} --hidden-size {SHAPE['hidden']} --num-attention-heads {SHAPE['heads']} "
    f"--seq-length {SHAPE['seq']} --max-position-embeddings {SHAPE['seq']} --untie-embeddings-and-output-weights "
    f"--vocab-size {VOCAB - 1} --padded-vocab-size {VOCAB} {FLAGS} --moe-aux-loss-coeff 0"
)
PRECISION = {"fp32": [], "bf16": ["--bf16"]}
RANKS = 2


class TextRun(Run):
    """Over random text: each step's is another."""

    def microbatches(self, step: int) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(VOCAB, (RANKS * MICRO_BATCH, SHAPE["seq"] + 1), generator=generator)
        own = text.chunk(self.ps.dp_size)[self.ps.dp_rank]
        tokens, labels = own[:, :-1].contiguous(), own[:, 1:].contiguous()
        positions = torch.arange(SHAPE["seq"]).expand_as(tokens)
        yield {
            "tokens": tokens,
            "labels": labels,
            "position_ids": positions,
            "loss_mask": torch.ones(tokens.shape),
        }


def steps_of(
    ctx: RankContext, layout: Layout, words: list[str], warm_up: int, steps: int
) -> tuple[float, float]:
    """(CPU seconds of a step on this rank, loss of the first)."""
    torch.set_num_threads(1)
    run = TextRun(ctx, layout, words, global_batch=layout.dp)
    first, *_ = [run.step(step, 1.0)[0] for step in range(1, warm_up + 1)]
    begin = time.process_time()
    for step in range(warm_up + 1, warm_up + steps + 1):
        run.step(step, 1.0)
    return (time.process_time() - begin) / steps, first


def beside_itself(*args: object) -> tuple[float, float]:
    """`steps_of` of one process, the mean of two that run at the same time."""
    fork = multiprocessing.get_context("fork")
    outcomes = fork.SimpleQueue()

    def alone() -> None:
        outcomes.put(run_ranks(steps_of, 1, *args, timeout=600.0)[0])

    copies = [fork.Process(target=alone) for _ in range(RANKS)]
    for copy in copies:
        copy.start()
    times, losses = zip(*(outcomes.get() for _ in copies), strict=True)
    for copy in copies:
        copy.join()
    return sum(times) / RANKS, losses[0]


def compare(dtype: str, dispatcher: str, rounds: int, steps: int) -> str:
    words = [*WORDS.split(), *NO_DROPOUT, *PRECISION[dtype]]
    experts = (
        f"--expert-model-parallel-size {RANKS} --expert-tensor-parallel-size 1 --moe-token-dispatcher-type"
    )
    spread = Layout(dp=RANKS, more=(*experts.split(), dispatcher))
    by_rank = [*words, "--micro-batch-size", str(MICRO_BATCH)], 2, steps
    whole = Layout(), [*words, "--micro-batch-size", str(RANKS * MICRO_BATCH)], 2, steps

    def ranks() -> tuple[float, float]:
        outcomes = run_ranks(steps_of, RANKS, spread, *by_rank, timeout=600.0)
        return sum(seconds for seconds, _ in outcomes), outcomes[0][1]

    sides = {
        "ranks": ranks,
        "beside a copy": lambda: beside_itself(*whole),
        "alone": lambda: run_ranks(steps_of, 1, *whole, timeout=600.0)[0],
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses = {}
    for number in range(rounds):
        for name in sides if number % 2 else reversed(sides):
            seconds, losses[name] = sides[name]()
            times[name].append(seconds)
    bound = 1e-4 if dtype == "fp32" else 2e-2
    assert max(losses.values()) - min(losses.values()) < bound, f"not the same work: {losses}"

    def ratio(name: str) -> str:
        ratios = (a / b for a, b in zip(times["ranks"], times[name], strict=True))
        return (
            f"{statistics.median(ratios):.3f} of one process {name} ({statistics.median(times[name]):.3f} s)"
        )

    both = statistics.median(times["ranks"])
    return f"{dtype} {dispatcher}: both ranks of EP {RANKS} {both:.3f} s, {ratio('beside a copy')}, {ratio('alone')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtypes", nargs="+", choices=PRECISION, default=list(PRECISION))
    parser.add_argument(
        "--dispatchers", nargs="+", choices=("alltoall", "allgather"), default=["alltoall", "allgather"]
    )
    parser.add_argument("--rounds", type=int, default=5, help="of all three sides")
    parser.add_argument("--steps", type=int, default=3, help="timed, of each side of a round")
    args = parser.parse_args()
    for dtype in args.dtypes:
        for dispatcher in args.dispatchers:
            print(compare(dtype, dispatcher, args.rounds, args.steps), flush=True)


if __name__ == "__main__":
    main()
