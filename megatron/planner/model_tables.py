"""A whole model of equal layers: what each strategy keeps and sends, its working sets, how well it is fed.

All from closed forms: 12 * nl * hd^2 parameters, every layer a unit of its own, embeddings not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.planner.communication import Rates, WireBytes
from megatron.planner.published_tables import Row
from megatron.planner.quantities import require_count
from megatron.planner.sharding_table import (
    Buckets,
    StateBytes,
    Strategy,
    persistent_bytes,
    step_collectives,
    transient_unit_bytes,
)
from megatron.planner.tutorial_forms import (
    checkpoint_bytes,
    checkpoint_intensity,
    efficiency,
    optimizer_intensity,
    param_grad_intensity,
    transformer_params,
    working_activation_bytes,
    working_state_bytes,
)


@dataclass(frozen=True)
class ModelRun:
    """A model and how it is trained; batch: samples of a microbatch on a rank, of seq_length tokens there.

    checkpoint_interval: layers between activation checkpoints. Raises CommunicationError.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    batch: int = 1
    shard_size: int = 64
    num_microbatches: int = 1
    checkpoint_interval: int = 1
    wire: WireBytes = field(default_factory=WireBytes)

    def __post_init__(self) -> None:
        require_count(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            seq_length=self.seq_length,
            batch=self.batch,
            shard_size=self.shard_size,
            num_microbatches=self.num_microbatches,
            checkpoint_interval=self.checkpoint_interval,
        )

    @property
    def num_params(self) -> int:
        return transformer_params(self.num_layers, self.hidden_size)


def strategy_rows(run: ModelRun) -> list[Row]:
    """By strategy: GB between steps and at most gathered on a rank; calls, and GB that a rank sends, a step.

    fp32 weights are main weights themselves; others have fp32 ones besides.
    """
    wire = run.wire
    states = StateBytes(wire.param_bytes, wire.grad_bytes, 0 if wire.param_bytes == 4 else 4)
    buckets = Buckets(run.num_layers, 0, run.num_params, 0)
    rows: list[Row] = []
    for strategy in Strategy:
        step = step_collectives(strategy, buckets, run.num_microbatches, wire, shard_size=run.shard_size)
        rows.append(
            {
                "strategy": strategy.value,
                "persistent_gb": persistent_bytes(run.num_params, strategy, run.shard_size, states) / 1e9,
                "all_gathers": step.all_gather_calls,
                "reduce_scatters": step.reduce_scatter_calls,
                "all_reduces": step.all_reduce_calls,
                "sent_gb": step.sent_bytes_per_rank(run.shard_size) / 1e9,
            }
        )
    return rows


def working_set_rows(run: ModelRun) -> list[Row]:
    """GB on a rank besides the states."""
    shape = run.hidden_size, run.seq_length, run.batch, run.checkpoint_interval
    hidden, seq, batch, interval = shape
    sets = {
        "activation checkpoints": checkpoint_bytes(run.num_layers, hidden, seq, batch, interval),
        "activations between two checkpoints": working_activation_bytes(
            hidden, run.num_heads, seq, batch, interval
        ),
        "largest linear layer, weights and gradients": working_state_bytes(hidden),
        "two gathered units, weights and gradients": transient_unit_bytes(
            run.num_params / run.num_layers, run.wire
        ),
    }
    return [{"held": held, "gb": size / 1e9} for held, size in sets.items()]


def efficiency_rows(run: ModelRun, rates: Rates) -> list[Row]:
    """The share of `rates.flop_per_s` that is reached where nothing overlaps, by what is moved at the bandwidth."""
    intensities = {
        "weights and gradients": param_grad_intensity(run.seq_length, run.batch),
        "optimizer states": optimizer_intensity(run.seq_length, run.batch),
        "activation checkpoints": checkpoint_intensity(run.hidden_size, run.checkpoint_interval),
    }
    return [
        {
            "moved": moved,
            "flop_per_byte": intensity,
            "efficiency": efficiency(intensity, rates.bandwidth_bytes_per_s, rates.flop_per_s),
        }
        for moved, intensity in intensities.items()
    ]


def all_tables(run: ModelRun, rates: Rates) -> dict[str, list[Row]]:
    """Every table by name."""
    return {
        "strategies": strategy_rows(run),
        "working_sets": working_set_rows(run),
        "efficiency": efficiency_rows(run, rates),
    }
