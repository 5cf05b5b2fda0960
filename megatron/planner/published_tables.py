"""The tables that were published on sharded training, recomputed from the formulas; rates are arguments.

Sources: the slides of Megatron-Core's custom FSDP (what strategies keep, tokens that hide communication, the case of
Llama3-70B); ZeRO-Infinity (arXiv 2104.07857) for what moving weights, optimizer states and checkpoints takes.
"""

from __future__ import annotations

from megatron.planner.communication import (
    Experts,
    Rates,
    WireBytes,
    backward_min_tokens,
    forward_min_tokens,
    layer_hiding,
    tokens_per_rank,
)
from megatron.planner.sharding_table import StateBytes, Strategy, collectives_in_words, persistent_bytes
from megatron.planner.tutorial_forms import (
    bandwidth_for,
    checkpoint_intensity,
    optimizer_intensity,
    param_grad_intensity,
)

Row = dict[str, object]

ZERO_PARAMS, ZERO_SHARD_SIZE = 7.5e9, 64
NUM_EXPERTS, TOP_K, NARROWEST_EP = 256, 8, 8
# Llama3-70B, bf16, 64 H100, sharded over all, microbatch 1: setting, CP, recompute, and what was measured: GB, TFLOP/s.
CASES = (
    ("CP2 + recompute", 2, True, 64.62, 427),
    ("CP4", 4, False, 79.05, 379),
    ("CP8", 8, False, 79.05, 226),
)
CASE_HIDDEN_SIZE, CASE_SEQ_LENGTH = 8192, 8192
# Of ZeRO-Infinity's figures on efficiency: a V100, 2 samples of 1024 tokens a rank, hidden size 8192.
ANCHOR_PEAK_FLOP_PER_S, ANCHOR_SEQ_LENGTH, ANCHOR_BATCH, ANCHOR_HIDDEN_SIZE = 70e12, 1024, 2, 8192


def zero_rows() -> list[Row]:
    """GB of model states by strategy, bf16 gradients, and how often a model is sent a step."""
    states = StateBytes(grad_bytes=2)
    return [
        {
            "strategy": strategy.value,
            "gb": persistent_bytes(ZERO_PARAMS, strategy, ZERO_SHARD_SIZE, states) / 1e9,
            "collectives": collectives_in_words(strategy),
        }
        for strategy in Strategy
    ]


def dense_rows(flop_per_s: float, node_bandwidth_bytes_per_s: float) -> list[Row]:
    """Tokens a rank that hide a dense layer, by TP. Raises CommunicationError."""
    rows: list[Row] = []
    for tp in (1, 2, 4, 8):
        rates = Rates.of_node(flop_per_s, node_bandwidth_bytes_per_s, tp)
        rows.append(
            {
                "tp": tp,
                "bandwidth_gb_per_s": rates.bandwidth_bytes_per_s / 1e9,
                "forward_min_tokens": forward_min_tokens(rates),
                "backward_min_tokens": backward_min_tokens(rates),
            }
        )
    return rows


def moe_rows(rates: Rates) -> list[Row]:
    """Tokens a rank that hide a layer's experts, by EP."""
    rows: list[Row] = []
    for ep in (8, 16, 32, 64, 128, 256):
        experts = Experts(NUM_EXPERTS, TOP_K, ep)
        rows.append(
            {
                "ep": ep,
                "forward_min_tokens": forward_min_tokens(rates, experts=experts),
                "backward_min_tokens": backward_min_tokens(rates, experts=experts),
            }
        )
    return rows


def criteria_rows(rates: Rates) -> list[Row]:
    """What the gradient's dtype and recompute change: bf16 weights, TP 1, experts at the smallest EP of `moe_rows`."""
    experts = Experts(NUM_EXPERTS, TOP_K, NARROWEST_EP)
    rows: list[Row] = []
    for grad_dtype, grad_bytes in (("fp32", 4), ("bf16", 2)):
        for recompute in (False, True):
            wire = WireBytes(2, grad_bytes)
            rows.append(
                {
                    "grad_dtype": grad_dtype,
                    "recompute": "full" if recompute else "none",
                    "forward": forward_min_tokens(rates, wire),
                    "backward": backward_min_tokens(rates, wire, recompute=recompute),
                    "moe_forward": forward_min_tokens(rates, wire, experts),
                    "moe_backward": backward_min_tokens(rates, wire, experts, recompute=recompute),
                }
            )
    return rows


def case_rows(rates: Rates) -> list[Row]:
    """The case study: needed over present tokens and the useful fraction, beside what was measured."""
    rows: list[Row] = []
    for name, cp, recompute, memory, tflops in CASES:
        tokens = tokens_per_rank(CASE_SEQ_LENGTH, 1, cp)
        layer = layer_hiding(CASE_HIDDEN_SIZE, tokens, rates, recompute=recompute)
        forward, backward = layer.phases
        rows.append(
            {
                "setting": name,
                "tokens_per_gpu": tokens,
                "forward_ratio": forward.ratio,
                "backward_ratio": backward.ratio,
                "useful_fraction": layer.useful_fraction,
                "published_tflops": tflops,
                "published_memory_gb": memory,
            }
        )
    return rows


def intensity_rows() -> list[Row]:
    """Bandwidth a rank that reaches half and nine tenths of a V100's peak, nothing overlapped."""
    intensities = {
        "weights and gradients": param_grad_intensity(ANCHOR_SEQ_LENGTH, ANCHOR_BATCH),
        "optimizer states": optimizer_intensity(ANCHOR_SEQ_LENGTH, ANCHOR_BATCH),
        "activation checkpoints": checkpoint_intensity(ANCHOR_HIDDEN_SIZE),
    }
    return [
        {
            "moved": moved,
            "flop_per_byte": intensity,
            "gb_per_s_at_50%": bandwidth_for(0.5, intensity, ANCHOR_PEAK_FLOP_PER_S) / 1e9,
            "gb_per_s_at_90%": bandwidth_for(0.9, intensity, ANCHOR_PEAK_FLOP_PER_S) / 1e9,
        }
        for moved, intensity in intensities.items()
    ]


def all_tables(flop_per_s: float, node_bandwidth_bytes_per_s: float) -> dict[str, list[Row]]:
    """Every table by name, at these rates. Raises CommunicationError."""
    rates = Rates.of_node(flop_per_s, node_bandwidth_bytes_per_s, 1)
    return {
        "zero": zero_rows(),
        "dense": dense_rows(flop_per_s, node_bandwidth_bytes_per_s),
        "moe": moe_rows(rates),
        "criteria": criteria_rows(rates),
        "case_study": case_rows(rates),
        "intensity": intensity_rows(),
    }
