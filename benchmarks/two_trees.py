"""Our training step as two trees of this repository have it: what a change costs models that have no use for it.

    git worktree add --detach ../before COMMIT
    python benchmarks/two_trees.py ../before --sizes 8x64 8x512 --rounds 20
    python benchmarks/two_trees.py ../before --sizes experts --dtypes fp32

Each tree has a process of its own, one thread; they step in turn, and the ratio is the median over pairs of their CPU
times. Sizes are those of single_process.py, and `experts` the model of experts.py.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def serve(tree: str, size: str, dtype: str, micro_batch: int, steps: int) -> None:
    """Take so many steps for each line of stdin, and answer with the CPU seconds."""
    sys.path.insert(0, tree)
    import torch

    from benchmarks.single_process import DTYPES, SIZES, OurTrainer, make_batches

    torch.set_num_threads(1)
    where = str(sys.modules["megatron.core.device"].__file__)
    assert where.startswith(tree), f"{where} is not of {tree}"
    if size == "experts":
        from benchmarks import experts

        trainer, batches = experts.ours(DTYPES[dtype]), experts.make_batches()
    else:
        shape = dict(zip(("layers", "hidden", "heads", "seq", "vocab"), SIZES[size], strict=True))
        trainer = OurTrainer(shape, DTYPES[dtype])
        batches = make_batches(micro_batch, argparse.Namespace(**shape, global_batch=8))
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(steps):
            trainer.step(batches)
        print(time.process_time() - begin, flush=True)


class Tree:
    def __init__(self, tree: Path, *words: str) -> None:
        command = [sys.executable, __file__, str(tree), "--serve", *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree
        )

    def step(self) -> float:
        into, out_of = self._process.stdin, self._process.stdout
        assert into is not None, "a pipe"
        assert out_of is not None, "a pipe"
        into.write("\n")
        into.flush()
        return float(out_of.readline())

    def close(self) -> None:
        self._process.communicate()


def compare(before: Path, words: list[str], rounds: int) -> str:
    trees = {"now": Tree(HERE, *words), "before": Tree(before, *words)}
    for tree in trees.values():
        tree.step()  # warm-up
    times: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(rounds):
        for name in trees if number % 2 else reversed(trees):
            times[name].append(trees[name].step())
    for tree in trees.values():
        tree.close()
    ratios = sorted(a / b for a, b in zip(times["now"], times["before"], strict=True))
    medians = [statistics.median(values) for values in times.values()]
    middle = f"middle half {ratios[rounds // 4]:.3f} to {ratios[(3 * rounds) // 4]:.3f}"
    return (
        f"now {medians[0]:.3f} s, before {medians[1]:.3f} s, ratio {statistics.median(ratios):.3f} ({middle})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path, help="another tree of this repository")
    parser.add_argument("--sizes", nargs="+", default=["8x64", "8x512"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="timed pairs")
    parser.add_argument("--steps", type=int, default=1, help="of each round")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    before = args.before.resolve()
    if args.serve:
        serve(str(before), args.serve, args.dtypes[0], args.micro_batch, args.steps)
        return
    for size in args.sizes:
        for dtype in args.dtypes:
            words = [size, "--dtypes", dtype, "--micro-batch", str(args.micro_batch)]
            words += ["--steps", str(args.steps)]
            print(f"{size} {dtype}: {compare(before, words, args.rounds)}", flush=True)


if __name__ == "__main__":
    main()
