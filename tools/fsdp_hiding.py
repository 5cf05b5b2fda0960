"""Does the communication of fully sharded training hide behind its computing? Without torch.

python tools/fsdp_hiding.py                 # the published tables, at 600 TFLOP/s and 340 GB/s
python tools/fsdp_hiding.py --hidden-size 8192 --seq-length 8192 --context-parallel-size 4
python tools/fsdp_hiding.py --hidden-size 8192 --seq-length 8192 --num-layers 80 --data-parallel-size 64

Tokens a rank decide: computing grows with them, communication does not. --tflops and --bandwidth-gb-per-s are what
the machine achieves, not its peak; the bandwidth is what one tensor parallel group takes in, and its ranks share it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import fsdp_hiding_forms as forms

SHORTEST_S, LONGEST_S = 1e-100, 1e100  # between which a float has room for every figure
BEYOND_RANGE = (
    "times are out of range: check --tflops, --bandwidth-gb-per-s, --hidden-size and --tokens-per-gpu"
)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Flag -> default, the flag it goes with, help. All are whole numbers of at least 1.
COUNTS: dict[str, tuple[int | None, str, str]] = {
    "--hidden-size": (None, "", ""),
    "--seq-length": (None, "", "tokens are S / CP * microbatch"),
    "--micro-batch-size": (1, "--seq-length", "of --seq-length (default 1)"),
    "--context-parallel-size": (1, "--seq-length", "of --seq-length (default 1)"),
    "--tensor-model-parallel-size": (1, "", "default 1"),
    "--num-experts": (None, "", "a layer of attention and E experts"),
    "--moe-router-topk": (2, "--num-experts", "experts a token meets (default 2)"),
    "--expert-model-parallel-size": (1, "--num-experts", "default 1"),
    "--num-layers": (None, "", "a whole model: adds what strategies keep and send"),
    "--num-attention-heads": (None, "--num-layers", "default: heads of 128"),
    "--data-parallel-size": (64, "--num-layers", "ranks of a shard (default 64)"),
    "--num-microbatches": (1, "--num-layers", "of a step (default 1)"),
    "--checkpoint-interval": (1, "--num-layers", "layers a checkpoint (default 1)"),
}


class UsageError(ValueError):
    """Flags that do not describe a configuration; the message names them."""


def parser() -> argparse.ArgumentParser:
    """The command line. What describes a configuration has no default, so that what was given can be told."""
    layout = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        "fsdp_hiding.py", None, __doc__, allow_abbrev=False, formatter_class=layout
    )
    made.add_argument("--tflops", type=float, default=600.0, help="TFLOP/s a rank achieves (600)")
    made.add_argument(
        "--bandwidth-gb-per-s", type=float, default=340.0, help="GB/s a TP group takes in (340)"
    )
    tokens = made.add_mutually_exclusive_group()
    tokens.add_argument("--tokens-per-gpu", type=float, help="tokens of a microbatch on a rank")
    for flag, (_, _, said) in COUNTS.items():
        (tokens if flag == "--seq-length" else made).add_argument(flag, type=int, metavar="N", help=said)
    made.add_argument("--param-dtype", choices=list(DTYPE_BYTES), help="of gathered weights (default bf16)")
    made.add_argument("--grad-dtype", choices=list(DTYPE_BYTES)[:3], help="of the reduction (default fp32)")
    made.add_argument("--recompute", action="store_true", default=None, help="full activation recompute")
    made.add_argument("--json", action="store_true", help="figures instead of text")
    return made


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """With defaults where a configuration is described. Raises UsageError naming the flag that is wrong."""
    given = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in COUNTS}
    for flag in ("--tflops", "--bandwidth-gb-per-s", "--tokens-per-gpu"):
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag} must be finite and more than 0, not {value:g}")
    for flag, (default, owner, _) in COUNTS.items():
        if (value := given[flag]) is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}")
        if value is not None and owner and given[owner] is None:
            raise UsageError(f"{flag} goes with {owner}, which is not given")
        setattr(args, flag[2:].replace("-", "_"), default if value is None else value)
    args.described = {
        *given.values(),
        args.tokens_per_gpu,
        args.param_dtype,
        args.grad_dtype,
        args.recompute,
    } != {None}
    args.wire = DTYPE_BYTES[args.param_dtype or "bf16"], DTYPE_BYTES[args.grad_dtype or "fp32"]
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if args.num_layers and (args.hidden_size is None or args.seq_length is None):
        raise UsageError("--num-layers goes with --hidden-size and --seq-length: give both")
    for flag, alone in (("--num-experts", None), ("--tensor-model-parallel-size", 1)):
        if args.num_layers and (given[flag] or alone) != alone:
            raise UsageError(
                f"--num-layers: a model's forms are of dense layers without TP; leave {flag} out"
            )
    if args.described and args.hidden_size is None:
        raise UsageError("--hidden-size must be given with a configuration")
    if args.described and not (args.tokens_per_gpu or args.seq_length):
        raise UsageError("--tokens-per-gpu or --seq-length must be given")
    if args.seq_length and args.seq_length % cp:
        raise UsageError(f"--context-parallel-size {cp} does not divide --seq-length {args.seq_length}")
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise UsageError(
            f"--moe-router-topk of {args.moe_router_topk} is more than the {args.num_experts} experts"
        )
    if args.num_experts and args.num_experts % ep:
        raise UsageError(f"--expert-model-parallel-size of {ep} does not divide {args.num_experts} experts")
    args.tokens = args.tokens_per_gpu or (args.seq_length or 0) / cp * args.micro_batch_size
    args.rates = args.tflops * 1e12, args.bandwidth_gb_per_s * 1e9 / args.tensor_model_parallel_size
    return args


def rows_text(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest word."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[word.ljust(width) for word, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    return "".join("  ".join(line).rstrip() + "\n" for line in lines)


def tables_text(tables: Mapping[str, list[forms.Row]], **facts: object) -> str:
    """Titles, heads and rows, every figure in its column's form. facts: of the titles."""
    texts = []
    for name, rows in tables.items():
        columns = forms.TABLES[name]["columns"]
        words = [[form.format(row[column]) for column, form in columns.items()] for row in rows]
        texts.append(f"{forms.TABLES[name]['title'].format(**facts)}\n{rows_text(list(columns), words)}")
    return "\n".join(texts)


def hiding_text(phases: list[forms.Row], exposed_share: float, useful: float) -> str:
    """Need and have, phase by phase, then the sum in words."""
    head = "part phase need_tokens have_tokens ratio compute_ms communication_ms exposed_ms verdict".split()
    rows, exposed = [], []
    for row in phases:
        told = f"hidden, {1 - row['ratio']:.0%} of the computing to spare"
        if not row["hidden"]:
            sends = "gather" if row["phase"] == "forward" else "gather and reduce-scatter"
            told = f"exposed: {row['exposed_s'] / row['communication_s']:.0%} of {sends}"
            exposed.append(f"{row['part']} {row['phase']}")
        times = (f"{1e3 * row[f'{name}_s']:.3f}" for name in ("compute", "communication", "exposed"))
        tokens = f"{row['need_tokens']:.2f}", f"{row['have_tokens']:g}", f"{row['ratio']:.2f}"
        rows.append([row["part"], row["phase"], *tokens, *times, told])
    most = math.ceil(max(row["need_tokens"] for row in phases))
    verdict = f"All communication is hidden; {most} tokens a rank would be enough.\n"
    if exposed:
        verdict = f"Exposed: {', '.join(exposed)}; {exposed_share:.1%} of a layer's time is waiting. "
        verdict += f"{most} tokens a rank would hide all of it.\n"
    useful_text = f"Useful fraction of the computing rate (recompute is not useful): {useful:.3f}\n"
    return rows_text(head, rows) + verdict + useful_text


def run(args: argparse.Namespace) -> str:
    """What to print. Raises UsageError."""
    args = checked(args)
    if not args.described:
        tables = forms.published_tables(args)
        if not SHORTEST_S <= args.tflops / args.bandwidth_gb_per_s <= LONGEST_S:
            raise UsageError(BEYOND_RANGE)
        rates = f"{args.tflops:g} TFLOP/s and {args.bandwidth_gb_per_s:g} GB/s"
        return json.dumps(tables, allow_nan=False) + "\n" if args.json else tables_text(tables, rates=rates)
    phases, exposed, useful = forms.phases_of(args)
    if not all(
        SHORTEST_S <= row[f"{name}_s"] <= LONGEST_S for row in phases for name in ("compute", "communication")
    ):
        raise UsageError(BEYOND_RANGE)
    tables = forms.model_tables(args) if args.num_layers else {}
    if args.json:
        told = [{name: row[name] for name in row if name != "useful_s"} for row in phases]
        figures = {"phases": told, "exposed_fraction": exposed, "useful_fraction": useful}
        rates = dict(zip(("flop_per_s", "bandwidth_bytes_per_s"), args.rates, strict=True))
        return json.dumps(figures | rates | tables, allow_nan=False) + "\n"
    text = hiding_text(phases, exposed, useful)
    if tables:
        params = 12 * args.num_layers * args.hidden_size**2
        facts = {"params": params, "ranks": args.data_parallel_size, "microbatches": args.num_microbatches}
        text += "\n" + tables_text(tables, **facts)
    return text


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 for what is no configuration."""
    try:
        print(run(parser().parse_args(argv)), end="")
    except (UsageError, ArithmeticError) as error:
        print(f"fsdp_hiding.py: {error if isinstance(error, UsageError) else BEYOND_RANGE}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
