"""Our training step against a plain PyTorch loop, one process, one thread: time and peak memory.

    python benchmarks/single_process.py                        # the table of the README
    python benchmarks/single_process.py --size 8x64 --micro-batch 1 8 --steps 40 --no-memory   # short kernels
    python benchmarks/single_process.py --micro-batch 1 --steps 3 --dtypes fp32 --json out.json

Both train the same model on the same tokens from the same weights: forward, backward, clip, fused AdamW.
Runs are interleaved (ours, plain, plain, ours, ...); the ratio is the median over pairs. CPU time is given
beside wall time, because a shared machine disturbs the latter. Memory is measured in processes of its own:
peak resident set over what was resident before the model was built, with malloc told to give freed blocks
back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plain_gpt import PlainGPT, PlainTrainer, copy_weights, set_schedule
from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transport.parallel_state import single_process

SHAPE = ("layers", "hidden", "heads", "seq", "vocab")
SIZES = {  # layers, hidden, heads, sequence, vocabulary; kernels of the first three are short
    "8x64": (8, 64, 4, 32, 256),
    "8x128": (8, 128, 4, 32, 256),
    "4x256": (4, 256, 4, 32, 256),
    "8x512": (8, 512, 8, 512, 8192),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Batches = list[tuple[Tensor, Tensor]]


class Trainer(Protocol):
    def step(self, batches: Batches) -> float: ...


class OurTrainer:
    """GPTModel over the flat buffer and the optimizer of the trainer, in a data parallel world of one. model: further
    settings of it."""

    def __init__(self, shape: dict[str, int], dtype: torch.dtype, **model: Any) -> None:
        config = TransformerConfig(
            num_layers=shape["layers"],
            hidden_size=shape["hidden"],
            num_attention_heads=shape["heads"],
            seq_length=shape["seq"],
            max_position_embeddings=shape["seq"],
            attention_dropout=0.0,
            hidden_dropout=0.0,
            **model,
        ).resolved()
        optimizer = OptimizerConfig(
            lr=3e-4, weight_decay=0.1, adam_beta2=0.95, bf16=dtype == torch.bfloat16, clip_grad=1.0
        )
        self.gpt = GPTModel(config, padded_vocab_size=shape["vocab"], seed=1234, params_dtype=dtype)
        ps = single_process(Device("cpu"))
        meta, context = self.gpt.param_meta, self.gpt.context
        self.model = DistributedDataParallel(
            self.gpt, ps, DistributedDataParallelConfig(), meta, context.grads
        )
        self.optimizer = build_optimizer(optimizer, self.model.buffer, ps)
        set_schedule(self.optimizer.param_groups, optimizer.lr, optimizer.weight_decay)

    def step(self, batches: Batches) -> float:
        loss = self.gradients(batches)
        self.update(len(batches))
        return loss

    def gradients(self, batches: Batches) -> float:
        """Forward and backward; the mean loss."""
        total = 0.0
        self.model.begin_step(len(batches))
        for index, (tokens, labels) in enumerate(batches):
            self.gpt.context.begin_microbatch(0, index, index)
            loss = self.loss(tokens, labels)
            loss.backward()
            total += loss.item() / len(batches)
        self.model.finish()
        return total

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean of a microbatch."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        losses = self.model(tokens, positions, labels=labels)
        loss_sum, num_tokens, _ = gpt_loss(torch.ones_like(losses), losses)
        return loss_sum / num_tokens

    def update(self, num_microbatches: int = 1) -> None:
        """Clip, and one step of the optimizer."""
        divisor = float(num_microbatches)
        stats = self.optimizer.prepare(divisor)
        self.optimizer.step(divisor, clip_coefficient(stats.norm, 1.0))


def make_batches(micro_batch: int, args: argparse.Namespace) -> Batches:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(args.vocab, (args.global_batch, args.seq + 1), generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text.split(micro_batch)]


def timed(trainer: Trainer, batches: Batches) -> tuple[float, float, float]:
    """(loss, wall s, CPU s) of one step."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = trainer.step(batches)
    return loss, time.perf_counter() - wall, time.process_time() - cpu


def time_case(dtype: str, micro_batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved steps of both; medians and the median ratio of the pairs."""
    batches = make_batches(micro_batch, args)
    shape, keeps = shape_of(args), args.keep_activation_output
    ours = OurTrainer(shape, DTYPES[dtype], keep_activation_output=keeps)
    plain = PlainTrainer(PlainGPT(**shape), DTYPES[dtype])
    weights = {name: ours.model.buffer.main_weight(name) for name in ours.gpt.param_meta}
    copy_weights(weights, plain.model, shape["heads"])
    trainers: dict[str, Trainer] = {"ours": ours, "plain": plain}
    losses = {name: timed(trainer, batches)[0] for name, trainer in trainers.items()}  # warm-up
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    assert abs(losses["ours"] - losses["plain"]) < tolerance, f"not the same work: {losses}"
    runs: dict[str, list[tuple[float, float, float]]] = {"ours": [], "plain": []}
    for pair in range(args.steps):
        for name in ("ours", "plain") if pair % 2 == 0 else ("plain", "ours"):
            runs[name].append(timed(trainers[name], batches))
    both = list(zip(runs["ours"], runs["plain"], strict=True))
    result: dict[str, Any] = {"dtype": dtype, "micro_batch": micro_batch, "loss": losses}
    for index, clock in ((1, "wall"), (2, "cpu")):
        for name, values in runs.items():
            result[f"{name}_{clock}_s"] = statistics.median(v[index] for v in values)
        result[f"{clock}_ratio"] = statistics.median(o[index] / p[index] for o, p in both)
    return result


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(args: argparse.Namespace) -> None:
    """Runs one trainer alone and prints the peak over what was resident before it."""
    batches = make_batches(args.micro_batch[0], args)
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = resident_bytes("VmRSS")
    shape, dtype, keeps = shape_of(args), DTYPES[args.dtypes[0]], args.keep_activation_output
    trainer: Trainer
    if args.memory_of == "ours":
        trainer = OurTrainer(shape, dtype, keep_activation_output=keeps)
    else:
        trainer = PlainTrainer(PlainGPT(**shape), dtype)
    trainer.step(batches)
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the peak starts again: optimizer state exists from here on
    trainer.step(batches)
    print(json.dumps({"peak_bytes": resident_bytes("VmHWM") - before}))


def memory_case(who: str, dtype: str, micro_batch: int, args: argparse.Namespace) -> int:
    """Peak bytes of one trainer, from a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--memory-of",
        who,
        "--dtypes",
        dtype,
        "--micro-batch",
        str(micro_batch),
    ]
    for name in (*SHAPE, "global_batch"):
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    command += ["--keep-activation-output"] * args.keep_activation_output
    # the C library reads these at its start: freed memory then leaves the resident set
    malloc = ["env", "MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_TRIM_THRESHOLD_=65536"]
    done = subprocess.run([*malloc, *command], check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def shape_of(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in SHAPE}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--size", choices=SIZES, default="8x512", help="all of the five below, where not given"
    )
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=5, help="timed pairs of steps")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--keep-activation-output", action="store_true", help="the trainer's flag, of ours")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", choices=("ours", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in zip(SHAPE, SIZES[args.size], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    if args.memory_of:
        measure_memory(args)
        return
    results = []
    print("dtype  mb |  ours s   plain s  ratio | ours CPU  plain CPU  ratio | ours MiB plain MiB ratio")
    for dtype in args.dtypes:
        for micro_batch in args.micro_batch:
            case = time_case(dtype, micro_batch, args)
            line = f"{dtype:5} {micro_batch:3}"
            for clock, width in (("wall", 7), ("cpu", 8)):
                ours, plain = case[f"ours_{clock}_s"], case[f"plain_{clock}_s"]
                line += f" | {ours:{width}.3f}  {plain:{width + 1}.3f}  {case[f'{clock}_ratio']:5.3f}"
            if not args.no_memory:
                for who in ("ours", "plain"):
                    case[f"{who}_peak_bytes"] = memory_case(who, dtype, micro_batch, args)
                ratio = case["memory_ratio"] = case["ours_peak_bytes"] / case["plain_peak_bytes"]
                ours, plain = case["ours_peak_bytes"] / 2**20, case["plain_peak_bytes"] / 2**20
                line += f" | {ours:7.0f}  {plain:8.0f}  {ratio:5.3f}"
            results.append(case)
            print(line, flush=True)
    text = json.dumps(
        {"shape": shape_of(args), "global_batch": args.global_batch, "cases": results}, indent=1
    )
    if args.json:
        args.json.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
