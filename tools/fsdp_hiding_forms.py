"""Closed forms of tools/fsdp_hiding.py: what sharded training sends and keeps, and how much of it hides.

Sources: the slides of Megatron-Core's custom FSDP (a layer of 11 h^2 parameters, 2 FLOP a parameter and token forward
and 4 backward, 2 more with recomputation); ZeRO-Infinity (arXiv 2104.07857). The sharding table says what is cut, a
plan of one stage how often it is sent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron.core.sharding_table import STRATEGIES, ShardPlace
from tools.schedule_residency import moves_of_one_stage

Row = dict[str, Any]
# Titles and columns of all tables; of the published ones also what is not computed, as was measured.
TABLES = json.loads(Path(__file__).with_name("fsdp_hiding.json").read_text(encoding="utf-8"))
HEAD_SIZE = 128


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


def min_tokens(args: argparse.Namespace, **changes: Any) -> list[float]:
    """Tokens a rank that hide the forward and the backward of a layer, or of its experts."""
    return [row["need_tokens"] for row in phases_of(args, **changes)[0][-2:]]


def bytes_per_param(strategy: str, ways: int, wire: tuple[int, int]) -> float:
    """That a rank keeps between steps, with Adam (ZeRO, arXiv 1910.02054): weights and gradients as they are sent, two
    fp32 moments, and fp32 main weights unless weights are fp32."""
    row, place = STRATEGIES[strategy], ShardPlace(inner_size=ways)
    sizes = (wire[0], row.weights), (wire[1], row.main_grads), (8 + 4 * (wire[0] != 4), row.optimizer)
    return sum(size / place.ways(cut) for size, cut in sizes)


def feeding(seq_length: int, batch: int, hidden_size: int, interval: int) -> list[Row]:
    """FLOP a byte moved (ZeRO-Infinity, section 4): seq * bsz, a quarter of that, 24 * hd * ci."""
    of_weights = seq_length * batch
    moved = TABLES["efficiency"]["moved"]
    intensities = of_weights, of_weights / 4, 24 * hidden_size * interval
    return [{"moved": one, "flop_per_byte": ait} for one, ait in zip(moved, intensities, strict=True)]


def published_tables(args: argparse.Namespace) -> dict[str, list[Row]]:
    """The tables of the slides and of ZeRO-Infinity, computed at these rates."""
    flop_per_s, bytes_per_s = args.rates
    layer = argparse.Namespace(**{**vars(args), "hidden_size": 8192, "tokens": 8192})
    zero = [
        row | {"gb": 7.5 * bytes_per_param(row["strategy"], 64, (2, 2))} for row in TABLES["zero"]["rows"]
    ]
    dense, moe, criteria, cases = [], [], [], []
    for tp in (1, 2, 4, 8):
        tokens = min_tokens(layer, rates=(flop_per_s, bytes_per_s / tp))
        dense.append(
            {"tp": tp, "bandwidth_gb_per_s": bytes_per_s / tp / 1e9} | named(tokens, "{}_min_tokens")
        )
    experts = {"num_experts": 256, "moe_router_topk": 8, "expert_model_parallel_size": 8}
    for ep in (8, 16, 32, 64, 128, 256):
        tokens = min_tokens(layer, **{**experts, "expert_model_parallel_size": ep})
        moe.append({"ep": ep} | named(tokens, "{}_min_tokens"))
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        for recompute in (False, True):
            row = {"grad_dtype": dtype, "recompute": "full" if recompute else "none"}
            wire = {"wire": (2, size), "recompute": recompute}
            row |= named(min_tokens(layer, **wire), "{}")
            criteria.append(row | named(min_tokens(layer, **wire, **experts), "moe_{}"))
    for case in TABLES["case_study"]["rows"]:
        tokens = 8192 / case["cp"]
        (forward, backward), _, useful = phases_of(layer, tokens=tokens, recompute=case["recompute"])
        row = {"setting": case["setting"], "tokens_per_gpu": tokens, "useful_fraction": useful}
        row |= {"forward_ratio": forward["ratio"], "backward_ratio": backward["ratio"]}
        cases.append(row | {name: case[name] for name in ("published_tflops", "published_memory_gb")})
    intensity = feeding(1024, 2, 8192, 1)
    for row in intensity:  # bandwidth of a share e of a V100's 70 TFLOP/s: peak / ait * e / (1 - e)
        row |= {f"gb_per_s_at_{e}%": 70e3 / row["flop_per_byte"] * e / (100 - e) for e in (50, 90)}
    every = {"zero": zero, "dense": dense, "moe": moe, "criteria": criteria}
    return every | {"case_study": cases, "intensity": intensity}


def named(tokens: list[float], form: str) -> Row:
    return {form.format(phase): one for phase, one in zip(("forward", "backward"), tokens, strict=True)}


def model_tables(args: argparse.Namespace) -> dict[str, list[Row]]:
    """What a model of equal layers of 12 h^2 keeps and sends, its working sets, and how well it is fed."""
    hidden, layers, seq = args.hidden_size, args.num_layers, args.seq_length // args.context_parallel_size
    heads = args.num_attention_heads or max(1, hidden // HEAD_SIZE)
    ways, batch, interval = args.data_parallel_size, args.micro_batch_size, args.checkpoint_interval
    strategies = []
    for strategy in STRATEGIES:
        gathers, reductions = (
            (0, 0) if ways == 1 else moves_of_one_stage(strategy, layers, args.num_microbatches, ways)
        )
        rounds = 2 if strategy == "no_shard" else 1  # an all-reduce goes round its ring twice
        sent = (
            (gathers * args.wire[0] + rounds * reductions * args.wire[1]) * 12 * hidden**2 * (ways - 1) / ways
        )
        kept = 12 * layers * hidden**2 * bytes_per_param(strategy, ways, args.wire)
        calls = (0, reductions) if strategy == "no_shard" else (reductions, 0)
        row = {"strategy": strategy, "persistent_gb": kept / 1e9, "all_gathers": gathers}
        row |= {"reduce_scatters": calls[0], "all_reduces": calls[1], "sent_gb": sent / 1e9}
        strategies.append(row)
    sizes = (  # ZeRO-Infinity, section 3
        2 * batch * seq * hidden * layers / interval,
        batch * seq * interval * (16 * hidden + 2 * heads * seq),
        4 * hidden * 4 * hidden,
        2 * 12 * hidden**2 * sum(args.wire),
    )
    held = zip(TABLES["working_sets"]["held"], sizes, strict=True)
    efficiency = feeding(seq, batch, hidden, interval)
    for row in efficiency:
        fed = row["flop_per_byte"] * args.rates[1]
        row["efficiency"] = fed / (fed + args.rates[0])
    sets = [{"held": what, "gb": size / 1e9} for what, size in held]
    return {"strategies": strategies, "working_sets": sets, "efficiency": efficiency}
