"""Where the CPU time of a training step goes, by part, ours beside a plain PyTorch loop: microseconds a layer and
microbatch.

    python tools/host_time.py                          # 8 layers, hidden 64, sequence 32, 8 microbatches of one sample
    python tools/host_time.py --hidden 128 --dtypes fp32 --steps 40 --json out.json
    python tools/host_time.py --start 1 2 4 8 --steps 5    # what a rank's start costs, beside `import torch`

Steps of both are interleaved, and what is printed are medians of this thread's CPU time, so that others on the machine
disturb little; one thread computes. `kernels` is what a step's calls of ATen take by themselves: they are recorded once
and called again, one after the other. What forward and backward take beyond theirs is Python, autograd and its nodes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plain_gpt import PlainGPT, PlainTrainer
from benchmarks.single_process import DTYPES, OurTrainer, make_batches, shape_of
from megatron.core.words import column, decimal

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
PARTS = (
    "kernels forward",
    "forward",
    "kernels backward",
    "backward",
    "gradient norm",
    "optimizer",
    "whole step",
)


class Recorded(TorchDispatchMode):
    """Every call of ATen below autograd, in `calls`; those behind `switch` in calls["backward"]."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = {"forward": [], "backward": []}
        self.part = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[self.part].append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Contestant:
    """A trainer, its batches, and which of its calls are which part of a step."""

    def __init__(self, trainer: OurTrainer | PlainTrainer, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.trainer, self.batches = trainer, batches
        norm: tuple[Any, str] = (torch.nn.utils, "clip_grad_norm_")
        if isinstance(trainer, OurTrainer):
            norm = (trainer.optimizer, "prepare")
        self.places = {
            "backward": (Tensor, "backward"),
            "gradient norm": norm,
            "optimizer": (trainer.optimizer, "step"),
        }
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(2):
            trainer.step(batches)
        self.calls = self._record()

    def measure(self) -> None:
        """One step, and its kernels by themselves."""
        spent = dict.fromkeys(self.places, 0.0)
        with self._wrapped(lambda part, call: _timed(call, part, spent)):
            begin = time.thread_time()
            self.trainer.step(self.batches)
            whole = time.thread_time() - begin
        for part, calls in self.calls.items():
            begin = time.thread_time()
            with torch.no_grad():
                for function, args, kwargs in calls:
                    function(*args, **kwargs)
            spent[f"kernels {part}"] = time.thread_time() - begin
        rest = whole - sum(spent[part] for part in self.places)
        for part, value in {**spent, "forward": rest, "whole step": whole}.items():
            self.seconds[part].append(value)

    def _record(self) -> dict[str, list[Call]]:
        """The ATen calls of one step's forwards and backwards."""
        with Recorded() as recorded:

            def switched(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
                def run(*args: Any, **kwargs: Any) -> Any:
                    before, recorded.part = recorded.part, part
                    try:
                        return call(*args, **kwargs)
                    finally:
                        recorded.part = before

                return run

            recorded.calls |= {part: [] for part in self.places}
            with self._wrapped(switched):
                self.trainer.step(self.batches)
        calls = {part: recorded.calls[part] for part in ("forward", "backward")}
        for tensor in tree_leaves(list(calls.values())):
            if isinstance(tensor, Tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
                # Given back before the end of the step: its calls are made again, over anything.
                size = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
                tensor.untyped_storage().resize_(int(size))
        return calls

    @contextmanager
    def _wrapped(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            for part, (owner, name) in self.places.items():
                stack.enter_context(mock.patch.object(owner, name, wrap(part, getattr(owner, name))))
            yield


def _timed(call: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            spent[part] += time.thread_time() - begin

    return run


def nodes_behind(output: Tensor, inputs: Tensor) -> tuple[int, int]:
    """(autograd's nodes, those of them that are Functions written in Python) from `output` to the leaf `inputs`,
    without those that accumulate gradients of leaves."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and "AccumulateGrad" not in type(node).__name__:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
    return len(seen), sum(isinstance(node, torch.autograd.function.BackwardCFunction) for node in seen)


def counts(contestant: Contestant, hidden: int, seq: int, dtype: torch.dtype) -> dict[str, float]:
    """Of one layer and microbatch: autograd's nodes and Python's Functions; of the whole step: calls of ATen."""
    trainer = contestant.trainer
    ours = isinstance(trainer, OurTrainer)
    name = "decoder.layers.0" if ours else "blocks.0"
    layer = (trainer.gpt if isinstance(trainer, OurTrainer) else trainer.model).get_submodule(name)
    x = torch.randn(seq, 1, hidden) if ours else torch.randn(1, seq, hidden)
    x = (x.to(dtype) if ours else x).requires_grad_()
    nodes, functions = nodes_behind(layer(x), x)
    return {"nodes a layer": nodes, "Functions a layer": functions}


def profile(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians by part in microseconds a layer and microbatch, of both; the ratio is the median over pairs of steps."""
    shape = shape_of(args)
    batches = make_batches(args.micro_batch, args)
    pair = {
        "ours": Contestant(
            OurTrainer(shape, DTYPES[dtype], keep_activation_output=args.keep_activation_output), batches
        ),
        "plain": Contestant(PlainTrainer(PlainGPT(**shape), DTYPES[dtype]), batches),
    }
    for step in range(args.steps):
        for name in ("ours", "plain") if step % 2 else ("plain", "ours"):
            pair[name].measure()
    each = 1e6 / (args.layers * len(batches))
    result: dict[str, Any] = {"dtype": dtype}
    for name, one in pair.items():
        medians = {part: statistics.median(values) * each for part, values in one.seconds.items()}
        calls = {
            f"ATen calls {part}": len(calls) / (args.layers * len(batches))
            for part, calls in one.calls.items()
        }
        result[name] = {**medians, **counts(one, args.hidden, args.seq, DTYPES[dtype]), **calls}
    steps = [one.seconds["whole step"] for one in pair.values()]
    result["ratio"] = statistics.median(a / b for a, b in zip(*steps, strict=True))
    return result


START = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size {samples} --train-iters 1 --lr 1e-3 --mock-data --num-workers 0 "
    "--tokenizer-type ByteTokenizer --no-create-attention-mask-in-dataloader --log-interval 1 --eval-iters 0"
)


def start_of(ranks: int, rounds: int) -> tuple[float, float]:
    """CPU seconds, user's and system's, of `import torch`; and of a rank, from its launch to the end of a run of one
    step: medians of runs in turn. Several ranks are those of `megatron-zero launch`, whose own are shared out."""
    root = Path(__file__).resolve().parent.parent
    launched = [] if ranks == 1 else ["tools/launch.py", "--nproc-per-node", str(ranks), "--"]
    command = [*launched, "pretrain_gpt.py", *START.format(samples=2 * ranks).split()]
    spent: dict[str, list[float]] = {"import": [], "start": []}
    for _ in range(rounds):
        for name, words in (("import", ["-c", "import torch"]), ("start", command)):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            with tempfile.TemporaryDirectory() as folder:
                there = [str(root / one) if one.endswith(".py") else one for one in words]
                subprocess.run([sys.executable, *there], cwd=folder, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(spent["import"]), statistics.median(spent["start"]) / ranks


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time of a step by part, ours beside a plain loop")
    sizes = (("layers", 8), ("hidden", 64), ("heads", 4), ("seq", 32), ("vocab", 256))
    for name, value in (*sizes, ("global-batch", 8), ("micro-batch", 1), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--keep-activation-output", action="store_true", help="the trainer's flag, of ours")
    parser.add_argument("--start", type=int, nargs="+", metavar="RANKS", help="of a rank's start instead")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    for ranks in args.start or ():
        imported, started = start_of(ranks, args.steps)
        ratio = decimal(started / imported, 2)
        print(
            f"ranks {ranks}: {decimal(started, 2)} s of CPU a rank, import torch {decimal(imported, 2)} s, {ratio}"
        )
    if args.start:
        return
    torch.set_num_threads(1)
    results = [profile(dtype, args) for dtype in args.dtypes]
    for result in results:
        print(f"{result['dtype']}: ours {decimal(result['ratio'], 2)} of the plain loop")
        print(f"{'':24}{'ours':>9}{'plain':>9}")
        for part in result["ours"]:
            print(f"{part:24}{column(result['ours'][part], 9, 1)}{column(result['plain'][part], 9, 1)}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
