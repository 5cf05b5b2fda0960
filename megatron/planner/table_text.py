"""The calculators' tables as text: columns as wide as their widest word, digits as published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.planner import published_tables as published
from megatron.planner.model_tables import ModelRun
from megatron.planner.published_tables import Row

Figures = Mapping[str, Sequence[Row]]
Table = tuple[str, str, Mapping[str, str]]  # name, title, columns and their forms


def rows_text(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest word."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [[word.ljust(width) for word, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    return "".join("  ".join(line).rstrip() + "\n" for line in lines)


def tables_text(figures: Figures, tables: Sequence[Table]) -> str:
    """Titles, heads and rows, every figure in its column's form."""
    texts = []
    for name, title, columns in tables:
        rows = [[form.format(row[column]) for column, form in columns.items()] for row in figures[name]]
        texts.append(f"{title}\n{rows_text(list(columns), rows)}")
    return "\n".join(texts)


def published_text(figures: Figures, rates: str) -> str:
    """The tables with the digits that were published."""
    tokens = "{:.2f}"
    return tables_text(
        figures,
        (
            (
                "zero",
                f"Model states of {published.ZERO_PARAMS / 1e9:g}e9 parameters over {published.ZERO_SHARD_SIZE} "
                "ranks, bf16 weights and gradients, Adam",
                {"strategy": "{}", "gb": "{:.3f}", "collectives": "{}"},
            ),
            (
                "dense",
                f"Tokens a rank that hide a dense layer, {rates} shared by TP",
                {
                    "tp": "{}",
                    "bandwidth_gb_per_s": "{:g}",
                    "forward_min_tokens": tokens,
                    "backward_min_tokens": tokens,
                },
            ),
            (
                "moe",
                f"Tokens a rank that hide {published.NUM_EXPERTS} experts, top-{published.TOP_K}, TP 1",
                {"ep": "{}", "forward_min_tokens": "{:.0f}", "backward_min_tokens": "{:.0f}"},
            ),
            (
                "criteria",
                f"The same with other gradients and recompute, TP 1, experts at EP {published.NARROWEST_EP}",
                {"grad_dtype": "{}", "recompute": "{}"}
                | dict.fromkeys(("forward", "backward", "moe_forward", "moe_backward"), "{:.0f}"),
            ),
            (
                "case_study",
                "Llama3-70B on 64 H100, microbatch 1, sequence 8192: needed over present tokens, predicted and "
                "published",
                {
                    "setting": "{}",
                    "tokens_per_gpu": "{:.0f}",
                    "forward_ratio": "{:.2f}",
                    "backward_ratio": "{:.2f}",
                    "useful_fraction": "{:.3f}",
                    "published_tflops": "{}",
                    "published_memory_gb": "{:.2f}",
                },
            ),
            (
                "intensity",
                "Bandwidth that feeds 70 TFLOP/s, nothing overlapped: 2 samples of 1024 tokens a rank, hidden "
                "size 8192",
                {
                    "moved": "{}",
                    "flop_per_byte": "{:g}",
                    "gb_per_s_at_50%": "{:.2f}",
                    "gb_per_s_at_90%": "{:.2f}",
                },
            ),
        ),
    )


def model_text(figures: Figures, described: ModelRun) -> str:
    """The tables of a whole model."""
    counts = dict.fromkeys(("all_gathers", "reduce_scatters", "all_reduces"), "{}")
    return tables_text(
        figures,
        (
            (
                "strategies",
                f"{described.num_params:,} parameters (12 * layers * hidden^2) over {described.shard_size} ranks; "
                f"a step of {described.num_microbatches} microbatches",
                {"strategy": "{}", "persistent_gb": "{:.3f}", **counts, "sent_gb": "{:.2f}"},
            ),
            ("working_sets", "On a rank besides", {"held": "{}", "gb": "{:.3f}"}),
            (
                "efficiency",
                "Share of the computing rate where nothing overlaps, were this moved over the bandwidth given",
                {"moved": "{}", "flop_per_byte": "{:g}", "efficiency": "{:.3f}"},
            ),
        ),
    )
