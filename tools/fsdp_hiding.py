"""Does the communication of fully sharded training hide behind its computing? Without torch.

python tools/fsdp_hiding.py                 # the published tables, at 600 TFLOP/s and 340 GB/s
python tools/fsdp_hiding.py --hidden-size 8192 --seq-length 8192 --context-parallel-size 4
python tools/fsdp_hiding.py --hidden-size 8192 --seq-length 8192 --num-layers 80 --data-parallel-size 64

Tokens a rank decide: computing grows with them, communication does not. --tflops and --bandwidth-gb-per-s are what
the machine achieves, not its peak; the bandwidth is what one tensor parallel group takes in, and its ranks share it.
"""

# Sources: the slides of Megatron-Core's custom FSDP (a layer of 11 h^2 parameters, 2 FLOP a parameter and token forward
# and 4 backward, 2 more with recomputation); ZeRO-Infinity (arXiv 2104.07857). The sharding table says what is cut, a
# plan of one stage how often it is sent.

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.sharding_table import STRATEGIES, ShardPlace
from megatron.core.words import plain, share_text
from tools.flags import script_parser
from tools.schedules.residency import moves_of_one_stage

Row = dict[str, Any]
# Titles and columns of all tables; of the published ones also what is not computed, as was measured.
TABLES = json.loads(Path(__file__).with_name("fsdp_hiding.json").read_text(encoding="utf-8"))
BEYOND_RANGE = (
    "times are out of range: check --tflops, --bandwidth-gb-per-s, --hidden-size and --tokens-per-gpu"
)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
RATES = ("--tflops", "--bandwidth-gb-per-s", "--tokens-per-gpu")
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
    made = script_parser(__file__, __doc__)
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
    """With defaults where a configuration is described, and tokens, rates and bytes on the wire. Raises UsageError
    naming the flag that is wrong."""
    given = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in (*RATES, *COUNTS)}
    ones = {given[flag] for flag in ("--tokens-per-gpu", *COUNTS)}
    args.described = {*ones, args.param_dtype, args.grad_dtype, args.recompute} != {None}
    for flag, value in given.items():
        default, owner, _ = COUNTS.get(flag, (value, "", ""))
        if value is not None and flag in RATES and not 0 < value < math.inf:
            raise UsageError(f"{flag} must be finite and more than 0, not {value:g}")
        if value is not None and flag in COUNTS and value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}")
        if value is not None and owner and given[owner] is None:
            raise UsageError(f"{flag} goes with {owner}, which is not given")
        setattr(args, flag[2:].replace("-", "_"), default if value is None else value)
    seq, layers, experts = args.seq_length or 0, args.num_layers, args.num_experts or 0
    topk, cp, ep = args.moe_router_topk, args.context_parallel_size, args.expert_model_parallel_size
    alone = "--num-layers: a model's forms are of dense layers without TP; leave {} out"
    both = "--num-layers goes with --hidden-size and --seq-length: give both"
    for is_wrong, message in (
        (layers and not (args.hidden_size and seq), both),
        (layers and experts, alone.format("--num-experts")),
        (layers and args.tensor_model_parallel_size > 1, alone.format("--tensor-model-parallel-size")),
        (args.described and not args.hidden_size, "--hidden-size must be given with a configuration"),
        (
            args.described and not (args.tokens_per_gpu or seq),
            "--tokens-per-gpu or --seq-length must be given",
        ),
        (seq % cp, f"--context-parallel-size {cp} does not divide --seq-length {seq}"),
        (0 < experts < topk, f"--moe-router-topk of {topk} is more than the {experts} experts"),
        (experts % ep, f"--expert-model-parallel-size of {ep} does not divide {experts} experts"),
    ):
        if is_wrong:
            raise UsageError(message)
    args.tokens = args.tokens_per_gpu or seq / cp * args.micro_batch_size
    args.rates = args.tflops * 1e12, args.bandwidth_gb_per_s * 1e9 / args.tensor_model_parallel_size
    args.wire = DTYPE_BYTES[args.param_dtype or "bf16"], DTYPE_BYTES[args.grad_dtype or "fp32"]
    return args


# Closed forms --------------------------------------------------------------------------------------------


def phases_of(args: argparse.Namespace, **changes: Any) -> tuple[list[Row], float, float]:
    """Both passes over each part of a layer, the share of its time in which it waits, and the useful share.

    Computing and sending run side by side, the longer one counts. n parameters take 2 n / TP FLOP a token forward and
    4 backward (6 with recompute), top_k times for experts; they send param_bytes n / TP, backward grad_bytes n / TP
    more, num_experts / EP times for experts.
    """
    args = argparse.Namespace(**{**vars(args), **changes})
    flop_per_s, bytes_per_s = args.rates
    experts = (args.num_experts or 0) / args.expert_model_parallel_size
    rows: list[Row] = []
    for part, params_per_h2 in (("attention", 3), ("experts", 8)) if experts else (("layer", 11),):
        params = params_per_h2 * args.hidden_size**2 / args.tensor_model_parallel_size
        met, held = (args.moe_router_topk, experts) if part == "experts" else (1, 1)
        for phase, useful, sent in (("forward", 2, args.wire[0]), ("backward", 4, sum(args.wire))):
            flop = useful + (2 if args.recompute and phase == "backward" else 0)
            compute_s = flop * met * params * args.tokens / flop_per_s
            sent_s = sent * held * params / bytes_per_s
            need = held / met * sent / flop * flop_per_s / bytes_per_s
            row = {"part": part, "phase": phase, "need_tokens": need, "have_tokens": args.tokens}
            row |= {"ratio": need / args.tokens, "hidden": need <= args.tokens, "compute_s": compute_s}
            row |= {"communication_s": sent_s, "exposed_s": max(0.0, sent_s - compute_s)}
            rows.append(row | {"useful_s": compute_s * useful / flop})
    wall_s = sum(row["compute_s"] + row["exposed_s"] for row in rows)
    return rows, sum(row["exposed_s"] for row in rows) / wall_s, sum(row["useful_s"] for row in rows) / wall_s


def min_tokens(args: argparse.Namespace, names: str, **changes: Any) -> Row:
    """Tokens a rank that hide the forward and the backward of a layer, or of its experts."""
    return {names.format(row["phase"]): row["need_tokens"] for row in phases_of(args, **changes)[0][-2:]}


def bytes_per_param(strategy: str, ways: int, wire: tuple[int, int]) -> float:
    """That a rank keeps between steps, with Adam (ZeRO, arXiv 1910.02054): weights and gradients as they are sent, two
    fp32 moments, and fp32 main weights unless weights are fp32."""
    row, place = STRATEGIES[strategy], ShardPlace(inner_size=ways)
    sizes = (wire[0], row.weights), (wire[1], row.main_grads), (8 + 4 * (wire[0] != 4), row.optimizer)
    return sum(size / place.ways(cut) for size, cut in sizes)


def feeding(seq_length: int, batch: int, hidden_size: int, interval: int) -> list[Row]:
    """FLOP a byte moved (ZeRO-Infinity, section 4): seq * bsz, a quarter of that, 24 * hd * ci."""
    intensities = seq_length * batch, seq_length * batch / 4, 24 * hidden_size * interval
    moved = zip(TABLES["efficiency"]["moved"], intensities, strict=True)
    return [{"moved": one, "flop_per_byte": ait} for one, ait in moved]


def filled(name: str, form: Callable[[Row], Row], rows: Sequence[Row] | None = None) -> list[Row]:
    """A table: of each row what is given, and what the form computes of that."""
    made = [row | form(row) for row in rows or TABLES[name]["rows"]]
    return [{column: row[column] for column in TABLES[name]["columns"]} for row in made]


def published_tables(args: argparse.Namespace) -> dict[str, list[Row]]:
    """The tables of the slides and of ZeRO-Infinity, computed at these rates."""
    flop_per_s, bytes_per_s = args.rates
    layer = argparse.Namespace(**{**vars(args), "hidden_size": 8192, "tokens": 8192})
    experts = {"num_experts": 256, "moe_router_topk": 8, "expert_model_parallel_size": 8}

    def dense(row: Row) -> Row:
        rates = flop_per_s, bytes_per_s / row["tp"]
        return {"bandwidth_gb_per_s": rates[1] / 1e9} | min_tokens(layer, "{}_min_tokens", rates=rates)

    def criterion(row: Row) -> Row:
        own = {"wire": (2, DTYPE_BYTES[row["grad_dtype"]]), "recompute": row["recompute"] == "full"}
        return min_tokens(layer, "{}", **own) | min_tokens(layer, "moe_{}", **own, **experts)

    def case(row: Row) -> Row:
        tokens, recompute = 8192 / row["cp"], row["recompute"]
        (forward, backward), _, useful = phases_of(layer, tokens=tokens, recompute=recompute)
        ratios = {"forward_ratio": forward["ratio"], "backward_ratio": backward["ratio"]}
        return {"tokens_per_gpu": tokens, "useful_fraction": useful} | ratios

    def moe(row: Row) -> Row:
        return min_tokens(layer, "{}_min_tokens", **experts | {"expert_model_parallel_size": row["ep"]})

    def intensity(row: Row) -> Row:  # bandwidth of a share e of a V100's 70 TFLOP/s: peak / ait * e / (1 - e)
        return {f"gb_per_s_at_{e}%": 70e3 / row["flop_per_byte"] * e / (100 - e) for e in (50, 90)}

    zero = filled("zero", lambda row: {"gb": 7.5 * bytes_per_param(row["strategy"], 64, (2, 2))})
    forms = {"dense": dense, "moe": moe, "criteria": criterion, "case_study": case}
    by_row = {name: filled(name, form) for name, form in forms.items()}
    return {"zero": zero, **by_row, "intensity": filled("intensity", intensity, feeding(1024, 2, 8192, 1))}


def model_tables(args: argparse.Namespace) -> dict[str, list[Row]]:
    """What a model of equal layers of 12 h^2 keeps and sends, its working sets, and how well it is fed."""
    hidden, layers, seq = args.hidden_size, args.num_layers, args.seq_length // args.context_parallel_size
    heads, of_layer = args.num_attention_heads or max(1, hidden // 128), 12 * hidden**2
    ways, batch, interval = args.data_parallel_size, args.micro_batch_size, args.checkpoint_interval

    def sends(row: Row) -> Row:
        strategy = row["strategy"]
        moves = moves_of_one_stage(strategy, layers, args.num_microbatches, ways) if ways > 1 else (0, 0)
        whole = strategy == "no_shard"  # an all-reduce goes round its ring twice
        sent = moves[0] * args.wire[0] + (2 if whole else 1) * moves[1] * args.wire[1]
        return {
            "persistent_gb": layers * of_layer * bytes_per_param(strategy, ways, args.wire) / 1e9,
            "all_gathers": moves[0],
            "reduce_scatters": 0 if whole else moves[1],
            "all_reduces": moves[1] if whole else 0,
            "sent_gb": sent * of_layer * (ways - 1) / ways / 1e9,
        }

    def fed(row: Row) -> Row:
        return {"efficiency": (rate := row["flop_per_byte"] * args.rates[1]) / (rate + args.rates[0])}

    sizes = (  # ZeRO-Infinity, section 3
        2 * batch * seq * hidden * layers / interval,
        batch * seq * interval * (16 * hidden + 2 * heads * seq),
        4 * hidden * 4 * hidden,
        2 * of_layer * sum(args.wire),
    )
    held = zip(TABLES["working_sets"]["held"], sizes, strict=True)
    return {
        "strategies": filled("strategies", sends, [{"strategy": one} for one in STRATEGIES]),
        "working_sets": [{"held": what, "gb": size / 1e9} for what, size in held],
        "efficiency": filled("efficiency", fed, feeding(seq, batch, hidden, interval)),
    }


# What is printed -----------------------------------------------------------------------------------------


def table_text(name: str, rows: Sequence[Row], **facts: object) -> str:
    """Title and head, and every figure in its column's form, in columns as wide as their widest word. facts: of the
    title."""
    columns, title = TABLES[name]["columns"], TABLES[name]["title"].format(**facts)
    words = [list(columns), *([form.format(row[column]) for column, form in columns.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    lines = [f"{title}\n" if title else ""]
    for row in words:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip() + "\n")
    return "".join(lines)


def hiding_text(phases: list[Row], exposed_share: float, useful: float) -> str:
    """Need and have, phase by phase, then the sum in words."""
    rows, exposed = [], []
    for row in phases:
        told = f"hidden, {share_text(1 - row['ratio'], 0)} of the computing to spare"
        if not row["hidden"]:
            sends = "gather" if row["phase"] == "forward" else "gather and reduce-scatter"
            told = f"exposed: {share_text(row['exposed_s'] / row['communication_s'], 0)} of {sends}"
            exposed.append(f"{row['part']} {row['phase']}")
        times = {f"{name}_ms": 1e3 * row[f"{name}_s"] for name in ("compute", "communication", "exposed")}
        rows.append({**row, **times, "verdict": told})
    most = math.ceil(max(row["need_tokens"] for row in phases))
    verdict = f"All communication is hidden; {most} tokens a rank would be enough.\n"
    if exposed:
        verdict = f"Exposed: {', '.join(exposed)}; {share_text(exposed_share)} of a layer's time is waiting. "
        verdict += f"{most} tokens a rank would hide all of it.\n"
    useful_text = f"Useful fraction of the computing rate (recompute is not useful): {useful:.3f}\n"
    return table_text("phases", rows) + verdict + useful_text


def run(args: argparse.Namespace) -> str:
    """What to print. Raises UsageError."""
    args = checked(args)
    phases: list[Row] = []
    figures: Row = {}
    if args.described:
        phases, exposed, useful = phases_of(args)
        told = [{name: row[name] for name in row if name != "useful_s"} for row in phases]
        figures = {"phases": told, "exposed_fraction": exposed, "useful_fraction": useful}
        figures |= {"flop_per_s": args.rates[0], "bandwidth_bytes_per_s": args.rates[1]}
    tables = model_tables(args) if args.num_layers else {} if args.described else published_tables(args)
    times = [row[name] for row in phases for name in ("compute_s", "communication_s")]
    if not all(1e-100 <= one <= 1e100 for one in times or [args.tflops / args.bandwidth_gb_per_s]):
        raise UsageError(BEYOND_RANGE)
    if args.json:
        return json.dumps(figures | tables, allow_nan=False) + "\n"
    facts = {"ranks": args.data_parallel_size, "microbatches": args.num_microbatches}
    facts["params"] = 12 * (args.num_layers or 0) * (args.hidden_size or 0) ** 2
    facts["rates"] = f"{plain(args.tflops)} TFLOP/s and {plain(args.bandwidth_gb_per_s)} GB/s"
    texts = [table_text(name, rows, **facts) for name, rows in tables.items()]
    return "\n".join(([hiding_text(phases, exposed, useful)] if phases else []) + texts)


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
