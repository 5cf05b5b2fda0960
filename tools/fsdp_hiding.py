"""Does the communication of fully sharded training hide behind its computing? Without torch, in closed forms.

python tools/fsdp_hiding.py                 # the published tables, at 600 TFLOP/s and 340 GB/s
python tools/fsdp_hiding.py --hidden-size 8192 --seq-length 8192 --context-parallel-size 4
python tools/fsdp_hiding.py --hidden-size 8192 --seq-length 8192 --num-layers 80 --data-parallel-size 64

Tokens a rank decide: computing grows with them, communication does not. --tflops and --bandwidth-gb-per-s are what
the machine achieves, not its peak. The bandwidth is what one tensor parallel group takes in, as a rule a node's whole
network; its ranks share it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.planner import communication as comm
from megatron.planner import model_tables
from megatron.planner import published_tables as published
from megatron.planner.quantities import CommunicationError
from megatron.planner.table_text import model_text, published_text, rows_text

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Times between which a float has room for every figure.
SHORTEST_S, LONGEST_S = 1e-100, 1e100
BEYOND_RANGE = (
    "times are out of range: check --tflops, --bandwidth-gb-per-s, --hidden-size and --tokens-per-gpu"
)
# Which flag a quantity of the formulas comes from.
FLAG_OF = {
    "flop_per_s": "--tflops",
    "bandwidth_bytes_per_s": "--bandwidth-gb-per-s",
    "node_bandwidth_bytes_per_s": "--bandwidth-gb-per-s",
    "tp_size": "--tensor-model-parallel-size",
    "cp_size": "--context-parallel-size",
    "ep_size": "--expert-model-parallel-size",
    "num_experts": "--num-experts",
    "top_k": "--moe-router-topk",
    "hidden_size": "--hidden-size",
    "seq_length": "--seq-length",
    "micro_batch_size": "--micro-batch-size",
    "tokens": "--tokens-per-gpu",
    "num_layers": "--num-layers",
    "num_heads": "--num-attention-heads",
    "shard_size": "--data-parallel-size",
    "num_microbatches": "--num-microbatches",
    "checkpoint_interval": "--checkpoint-interval",
}

MODEL_FLAGS = ("num_attention_heads", "data_parallel_size", "num_microbatches", "checkpoint_interval")
HEAD_SIZE = 128


class UsageError(ValueError):
    """Flags that do not describe a configuration; the message names them."""


def parser() -> argparse.ArgumentParser:
    """The command line. What describes a configuration has no default, so that what was given can be told."""
    made = argparse.ArgumentParser(
        prog="fsdp_hiding.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--tflops", type=float, default=600.0, metavar="F", help="TFLOP/s a rank achieves (600)"
    )
    made.add_argument(
        "--bandwidth-gb-per-s", type=float, default=340.0, metavar="BW", help="GB/s a TP group takes in (340)"
    )
    made.add_argument("--hidden-size", type=int, metavar="H")
    tokens = made.add_mutually_exclusive_group()
    tokens.add_argument("--tokens-per-gpu", type=float, metavar="T", help="tokens of a microbatch on a rank")
    tokens.add_argument("--seq-length", type=int, metavar="S", help="tokens are S / CP * microbatch")
    made.add_argument("--micro-batch-size", type=int, metavar="B", help="of --seq-length (default 1)")
    made.add_argument("--context-parallel-size", type=int, metavar="CP", help="of --seq-length (default 1)")
    made.add_argument("--tensor-model-parallel-size", type=int, metavar="TP", help="default 1")
    made.add_argument("--num-experts", type=int, metavar="E", help="a layer of attention and E experts")
    made.add_argument("--moe-router-topk", type=int, metavar="K", help="experts a token meets (default 2)")
    made.add_argument("--expert-model-parallel-size", type=int, metavar="EP", help="default 1")
    made.add_argument("--param-dtype", choices=list(DTYPE_BYTES), help="of gathered weights (default bf16)")
    made.add_argument(
        "--grad-dtype", choices=["fp32", "bf16", "fp16"], help="of the reduction (default fp32)"
    )
    made.add_argument("--recompute", action="store_true", default=None, help="full activation recompute")
    model = made.add_argument_group("a whole model", "with --hidden-size and --seq-length")
    model.add_argument("--num-layers", type=int, metavar="L", help="adds what strategies keep and send")
    model.add_argument("--num-attention-heads", type=int, metavar="A", help="default: heads of 128")
    model.add_argument("--data-parallel-size", type=int, metavar="N", help="ranks of a shard (default 64)")
    model.add_argument("--num-microbatches", type=int, metavar="GA", help="of a step (default 1)")
    model.add_argument(
        "--checkpoint-interval", type=int, metavar="CI", help="layers a checkpoint (default 1)"
    )
    made.add_argument("--json", action="store_true", help="figures instead of text")
    return made


def given(value: int | None, default: int) -> int:
    """A flag's value, 0 included."""
    return default if value is None else value


def tokens_of(args: argparse.Namespace) -> float:
    """Tokens of a microbatch on a rank. Raises UsageError."""
    if args.seq_length is not None:
        cp = given(args.context_parallel_size, 1)
        if cp > 0 and args.seq_length % cp:
            raise UsageError(f"--context-parallel-size {cp} does not divide --seq-length {args.seq_length}")
        return comm.tokens_per_rank(args.seq_length, given(args.micro_batch_size, 1), cp)
    for flag in ("micro_batch_size", "context_parallel_size"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} goes with --seq-length, which is not given")
    if args.tokens_per_gpu is None:
        raise UsageError("--tokens-per-gpu or --seq-length must be given")
    return float(args.tokens_per_gpu)


def experts_of(args: argparse.Namespace) -> comm.Experts | None:
    """The layer's experts, if it has any. Raises UsageError and CommunicationError."""
    if args.num_experts is None:
        for flag in ("moe_router_topk", "expert_model_parallel_size"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} goes with --num-experts, which is not given")
        return None
    return comm.Experts(
        args.num_experts, given(args.moe_router_topk, 2), given(args.expert_model_parallel_size, 1)
    )


def model_of(args: argparse.Namespace) -> model_tables.ModelRun | None:
    """The whole model, if its layers are counted. Raises UsageError and CommunicationError."""
    if args.num_layers is None:
        for flag in MODEL_FLAGS:
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} goes with --num-layers, which is not given")
        return None
    if args.hidden_size is None or args.seq_length is None:
        raise UsageError("--num-layers goes with --hidden-size and --seq-length: give both")
    if args.num_experts is not None:
        raise UsageError("--num-layers: a whole model's forms are of dense layers; leave --num-experts out")
    if given(args.tensor_model_parallel_size, 1) != 1:
        raise UsageError(
            "--num-layers: a whole model's forms are of one rank without tensor parallelism; leave "
            "--tensor-model-parallel-size out"
        )
    tokens_of(args)  # the checks of what divides
    return model_tables.ModelRun(
        args.num_layers,
        args.hidden_size,
        given(args.num_attention_heads, max(1, args.hidden_size // HEAD_SIZE)),
        args.seq_length // given(args.context_parallel_size, 1),
        given(args.micro_batch_size, 1),
        given(args.data_parallel_size, 64),
        given(args.num_microbatches, 1),
        given(args.checkpoint_interval, 1),
        wire_of(args),
    )


def wire_of(args: argparse.Namespace) -> comm.WireBytes:
    return comm.WireBytes(DTYPE_BYTES[args.param_dtype or "bf16"], DTYPE_BYTES[args.grad_dtype or "fp32"])


def hiding_of(args: argparse.Namespace) -> comm.LayerHiding:
    """The layer that the flags describe. Raises UsageError and CommunicationError."""
    if args.hidden_size is None:
        raise UsageError("--hidden-size must be given with a configuration")
    tp = given(args.tensor_model_parallel_size, 1)
    return comm.layer_hiding(
        args.hidden_size,
        tokens_of(args),
        comm.Rates.of_node(args.tflops * 1e12, args.bandwidth_gb_per_s * 1e9, tp),
        wire=wire_of(args),
        experts=experts_of(args),
        tp_size=tp,
        recompute=bool(args.recompute),
    )


def phase_words(phase: comm.Phase) -> str:
    """`hidden`, or how much of which collectives shows."""
    if phase.hidden:
        return f"hidden, {1 - phase.ratio:.0%} of the computing to spare"
    sends = "gather" if phase.phase == "forward" else "gather and reduce-scatter"
    return f"exposed: {phase.exposed_s / phase.communication_s:.0%} of {sends}"


def hiding_text(layer: comm.LayerHiding) -> str:
    """Need and have, phase by phase, then the sum in words."""
    head = "part phase need_tokens have_tokens ratio compute_ms communication_ms exposed_ms verdict".split()
    rows = [
        [
            phase.part,
            phase.phase,
            f"{phase.need_tokens:.2f}",
            f"{phase.have_tokens:g}",
            f"{phase.ratio:.2f}",
            *(f"{1e3 * s:.3f}" for s in (phase.compute_s, phase.communication_s, phase.exposed_s)),
            phase_words(phase),
        ]
        for phase in layer.phases
    ]
    exposed = [f"{phase.part} {phase.phase}" for phase in layer.phases if not phase.hidden]
    most = math.ceil(max(phase.need_tokens for phase in layer.phases))
    verdict = (
        f"Exposed: {', '.join(exposed)}; {layer.exposed_fraction:.1%} of a layer's time is waiting. "
        f"{most} tokens a rank would hide all of it.\n"
        if exposed
        else f"All communication is hidden; {most} tokens a rank would be enough.\n"
    )
    useful = f"Useful fraction of the computing rate (recompute is not useful): {layer.useful_fraction:.3f}\n"
    return rows_text(head, rows) + verdict + useful


def hiding_figures(layer: comm.LayerHiding) -> dict[str, object]:
    """The same for programs."""
    fields = "part phase need_tokens have_tokens ratio hidden compute_s communication_s exposed_s".split()
    return {
        "phases": [{field: getattr(phase, field) for field in fields} for phase in layer.phases],
        "exposed_fraction": layer.exposed_fraction,
        "useful_fraction": layer.useful_fraction,
        "flop_per_s": layer.rates.flop_per_s,
        "bandwidth_bytes_per_s": layer.rates.bandwidth_bytes_per_s,
    }


def run(args: argparse.Namespace) -> str:
    """What to print. Raises UsageError and CommunicationError."""
    apart = ("tflops", "bandwidth_gb_per_s", "json")
    if all(value is None for name, value in vars(args).items() if name not in apart):
        tables = published.all_tables(args.tflops * 1e12, args.bandwidth_gb_per_s * 1e9)
        if not SHORTEST_S <= args.tflops / args.bandwidth_gb_per_s <= LONGEST_S:
            raise UsageError(BEYOND_RANGE)
        rates = f"{args.tflops:g} TFLOP/s and {args.bandwidth_gb_per_s:g} GB/s"
        return json.dumps(tables, allow_nan=False) + "\n" if args.json else published_text(tables, rates)
    layer = hiding_of(args)
    times = [s for phase in layer.phases for s in (phase.compute_s, phase.communication_s)]
    if not all(SHORTEST_S <= s <= LONGEST_S for s in times):
        raise UsageError(BEYOND_RANGE)
    model = model_of(args)
    tables = {} if model is None else model_tables.all_tables(model, layer.rates)
    if args.json:
        return json.dumps(hiding_figures(layer) | tables, allow_nan=False) + "\n"
    return hiding_text(layer) + ("" if model is None else "\n" + model_text(tables, model))


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 for what is no configuration."""
    args = parser().parse_args(argv)
    try:
        print(run(args), end="")
    except CommunicationError as error:
        print(f"fsdp_hiding.py: {FLAG_OF[error.field]} {error.why}", file=sys.stderr)
        return 2
    except ArithmeticError:
        print(f"fsdp_hiding.py: {BEYOND_RANGE}", file=sys.stderr)
        return 2
    except UsageError as error:
        print(f"fsdp_hiding.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
