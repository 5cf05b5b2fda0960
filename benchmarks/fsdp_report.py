"""Figures, ratios and bars of `fsdp_vs_peers.py`, from what its ranks measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fsdp_workload import SIZES

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
# Against whom each of ours is measured, the first of them that took part; all are measured against `single` too.
PARTNERS = {
    "ours-alone": ("alone",),
    "ours-no_shard": ("ddp",),
    "ours-optim": ("deepspeed-z1", "ddp"),
    "ours-optim_grads": ("deepspeed-z2", "fsdp2"),
    "ours-optim_grads_params": ("fsdp2",),
    "ours-optim_grads_params-bf16wire": ("fsdp2-bf16wire",),
    "ours-optim_grads_params-backward": ("fsdp2-keep",),
    "ours-optim_grads_params-step": ("fsdp2-keep-synclast",),
    "ours-plain": ("fsdp2",),
}


@dataclass(frozen=True)
class Bar:
    """ours / against must not exceed `at_most` in these clocks; without sizes or dtypes, in all."""

    ours: str
    against: str
    clocks: tuple[str, ...]
    at_most: float
    sizes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


BARS = (
    Bar("ours-optim_grads_params", "fsdp2", ("wall", "cpu"), 0.85, ("34m", "100m")),
    Bar("ours-optim_grads_params", "fsdp2", ("wall", "cpu"), 0.60, ("tiny8", "3m")),
    Bar("ours-plain", "fsdp2", ("wall", "cpu"), 0.85, ("34m", "100m")),
    Bar("ours-plain", "fsdp2", ("wall", "cpu"), 0.60, ("tiny8", "3m")),
    Bar("ours-no_shard", "ddp", ("wall", "cpu"), 1.0),
    Bar("ours-optim", "deepspeed-z1", ("wall", "cpu"), 1.0),
    # what DeepSpeed's ZeRO-1 costs, measured elsewhere, for where it is not installed
    Bar("ours-optim", "single", ("cpu",), 1.19, ("34m",), ("fp32",)),
    Bar("ours-optim", "single", ("cpu",), 1.04, ("34m",), ("bf16",)),
    Bar("ours-optim_grads_params", "fsdp2", ("live",), 0.9),
    Bar("ours-plain", "fsdp2", ("live",), 0.9),
)


@dataclass(frozen=True)
class Step:
    """One step on one rank. cpu_s: until its own end; own_s and span_s: process time and wall time until all were done,
    busy_s: of the whole machine meanwhile."""

    loss: float | None
    wall_s: float
    cpu_s: float
    own_s: float
    span_s: float
    busy_s: float


Steps = Sequence[Sequence[Step]]  # [rank][step]


def losses_of(steps: Steps) -> list[float]:
    """Mean over the ranks that ran anything, step by step."""
    by_step = zip(*steps, strict=True)
    return [statistics.fmean(one.loss for one in ranks if one.loss is not None) for ranks in by_step]


def check_losses(runs: Mapping[str, Steps], dtype: str) -> dict[str, list[float]]:
    """Everybody's losses after the same steps; exits where they are not those of the first contestant.

    `alone` trains other things: only its first loss, before any update, is compared.
    """
    losses = {name: losses_of(steps) for name, steps in runs.items()}
    together = [name for name in losses if not name.endswith("alone")] or list(losses)
    right = losses[together[0]]
    for name, got in losses.items():
        count = 1 if name.endswith("alone") else len(right)
        off = max(abs(a - b) for a, b in zip(got[:count], right[:count], strict=True))
        if not off < TOLERANCE[dtype]:
            raise SystemExit(
                f"not the same work: {name} and {together[0]} in {dtype} differ by {off:.2e}: {got} {right}"
            )
    return losses


def timing(steps: Steps, warm_up: int) -> dict[str, Any]:
    """Medians over the timed steps: the slowest rank's wall time, all ranks' CPU time; others' cores in use."""
    timed = [ranks[warm_up:] for ranks in steps]
    walls = [max(one.wall_s for one in ranks) for ranks in zip(*timed, strict=True)]
    cpus = [sum(one.cpu_s for one in ranks) for ranks in zip(*timed, strict=True)]
    own = sum(one.own_s for ranks in timed for one in ranks)
    first = timed[0]
    foreign = (sum(one.busy_s for one in first) - own) / sum(one.span_s for one in first)
    return {
        "walls_s": walls,
        "cpus_s": cpus,
        "wall_s": statistics.median(walls),
        "cpu_s": statistics.median(cpus),
        "foreign_cores": max(0.0, foreign),
    }


def timing_case(
    size: str, dtype: str, microbatches: int, runs: Mapping[str, Steps], warm_up: int, num_ranks: int
) -> dict[str, Any]:
    """Figures of a case by contestant, with the ratios to `single` and to its partner: medians over rounds."""
    losses = check_losses(runs, dtype)
    figures = {name: timing(steps, warm_up) | {"losses": losses[name]} for name, steps in runs.items()}
    shape = SIZES[size]
    for name, one in figures.items():
        ranks = 1 if name == "single" else num_ranks
        flop = shape.flop_per_token * shape.seq * microbatches * num_ranks
        one["flop_per_s_per_rank"] = flop / one["wall_s"] / ranks
        free = "ours-alone" if name.startswith("ours-") and name != "ours-plain" else "alone"
        if free in figures and name not in (free, "single"):
            one["exposed_s"] = one["wall_s"] - figures[free]["wall_s"]
        one["ratios"] = {
            against: {
                clock: statistics.median(
                    mine / theirs
                    for mine, theirs in zip(one[clock + "s_s"], figures[against][clock + "s_s"], strict=True)
                )
                for clock in ("wall", "cpu")
            }
            for against in partners_of(name, figures)
        }
    return _case(size, dtype, microbatches, figures)


def memory_case(size: str, dtype: str, microbatches: int, peaks: Mapping[str, int]) -> dict[str, Any]:
    """Peaks by contestant, the largest rank's, over what was alive before it was built."""
    figures: dict[str, dict[str, Any]] = {name: {"live_bytes": peak} for name, peak in peaks.items()}
    for name, one in figures.items():
        one["ratios"] = {
            against: {"live": one["live_bytes"] / peaks[against]} for against in partners_of(name, figures)
        }
    return _case(size, dtype, microbatches, figures)


def partners_of(name: str, present: Mapping[str, object]) -> list[str]:
    """`single`, what stands in PARTNERS, and everything that a bar names, as far as it took part."""
    chosen = [one for one in PARTNERS.get(name, ()) if one in present][:1]
    barred = [bar.against for bar in BARS if bar.ours == name and bar.against in present]
    base = ["single"] if "single" in present and name != "single" else []
    return list(dict.fromkeys([*base, *chosen, *barred]))


def _case(size: str, dtype: str, microbatches: int, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "size": size,
        "num_params": SIZES[size].num_params,
        "dtype": dtype,
        "microbatches": microbatches,
        "contestants": figures,
        "bars": bars_of(size, dtype, figures),
    }


def bars_of(size: str, dtype: str, figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every bar that the case decides."""
    found = []
    for bar in BARS:
        ratios = figures.get(bar.ours, {}).get("ratios", {}).get(bar.against, {})
        if (bar.sizes and size not in bar.sizes) or (bar.dtypes and dtype not in bar.dtypes):
            continue
        for clock in bar.clocks:
            if clock in ratios:
                row = {"ours": bar.ours, "against": bar.against, "clock": clock, "at_most": bar.at_most}
                found.append(row | {"ratio": ratios[clock], "held": ratios[clock] <= bar.at_most})
    return found


def text_of(case: Mapping[str, Any]) -> str:
    """A case as a Markdown table, its bars below."""
    memory = any("live_bytes" in one for one in case["contestants"].values())
    title = (
        f"{case['size']} ({case['num_params'] / 1e6:.1f} million parameters), {case['dtype']}, "
        f"{case['microbatches']} microbatch(es) a rank"
    )
    head = (
        ["contestant", "peak MiB", "/ single", "/ own peer"]
        if memory
        else [
            "contestant",
            "wall ms",
            "CPU ms",
            "wall / single",
            "CPU / single",
            "wall / own peer",
            "CPU / own peer",
        ]
        + ["own peer", "GFLOP/s a rank", "exposed ms", "foreign"]
    )
    rows = [_row(name, one, memory) for name, one in case["contestants"].items()]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) + " |"
        for row in [head, ["-" * width for width in widths], *rows]
    ]
    bars = [
        f"{'held' if bar['held'] else 'MISSED'}: {bar['ours']} / {bar['against']}, {bar['clock']} "
        f"{bar['ratio']:.3f} (bar {bar['at_most']:g})"
        for bar in case["bars"]
    ]
    return "\n".join([title, "", *lines, "", *bars, ""])


def _row(name: str, one: Mapping[str, Any], memory: bool) -> list[str]:
    def ratio(against: str | None, clock: str) -> str:
        known = one["ratios"].get(against, {})
        return f"{known[clock]:.3f}" if clock in known else ""

    own = next((against for against in one["ratios"] if against != "single"), None)
    if memory:
        peak = f"{one['live_bytes'] / 2**20:.1f}"
        return [name, peak, ratio("single", "live"), f"{ratio(own, 'live')} {own or ''}".strip()]
    return [
        name,
        f"{1e3 * one['wall_s']:.1f}",
        f"{1e3 * one['cpu_s']:.1f}",
        *(ratio(against, clock) for against in ("single", own) for clock in ("wall", "cpu")),
        own or "",
        f"{one['flop_per_s_per_rank'] / 1e9:.1f}",
        f"{1e3 * one['exposed_s']:.1f}" if "exposed_s" in one else "",
        f"{one['foreign_cores']:.2f}",
    ]
