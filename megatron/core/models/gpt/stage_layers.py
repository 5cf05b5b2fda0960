"""How many layers each pipeline rank holds, by Megatron's flags (floor 0)."""

from __future__ import annotations

from collections import Counter

from megatron.core.list_expression import expand_layout
from megatron.core.model_parallel_config import ModelParallelConfig


class StageLayersError(ValueError):
    """Layers that do not divide over stages and chunks as the flags ask."""


def layers_of_ranks(config: ModelParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Layers on each pipeline rank, all chunks together. Raises StageLayersError or ListExpressionError."""
    stages = config.pipeline_model_parallel_size
    if stages < 1:
        raise StageLayersError(f"--pipeline-model-parallel-size {stages}: must be at least 1")
    if config.pipeline_model_parallel_layout is not None:
        return _by_layout(config, num_layers, stages)
    ways = [
        flag
        for flag, value in (
            ("--num-layers-per-virtual-pipeline-stage", config.num_layers_per_virtual_pipeline_stage),
            ("--num-virtual-stages-per-pipeline-rank", config.num_virtual_stages_per_pipeline_rank),
        )
        if value is not None
    ]
    if len(ways) > 1:
        raise StageLayersError(f"{' and '.join(ways)} exclude each other")
    uneven = (config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers)
    counted = (config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split)
    if uneven != (None, None) and any(counted):
        raise StageLayersError(
            "--decoder-first/last-pipeline-num-layers and --account-for-embedding/loss-in-pipeline-split "
            "exclude each "
            "other"
        )
    layers = (
        _uneven(num_layers, stages, uneven) if uneven != (None, None) else _even(num_layers, stages, counted)
    )
    _check_chunks(config, layers)
    return layers


def _even(num_layers: int, stages: int, counted: tuple[bool, bool]) -> tuple[int, ...]:
    slots = num_layers + sum(counted)
    if slots % stages:
        extra = f" + {sum(counted)} for embedding and loss" if any(counted) else ""
        raise StageLayersError(
            f"--num-layers {num_layers}{extra} is not divisible by {stages} pipeline stages"
        )
    layers = [slots // stages] * stages
    layers[0] -= counted[0]
    layers[-1] -= counted[1]
    return tuple(layers)


def _uneven(num_layers: int, stages: int, ends: tuple[int | None, int | None]) -> tuple[int, ...]:
    first, last = ends
    between = stages - sum(end is not None for end in ends)
    left = num_layers - sum(end for end in ends if end is not None)
    if between < 0 or left < 0 or (left if between == 0 else left % between):
        raise StageLayersError(
            f"--num-layers {num_layers} with {first} on the first and {last} on the last stage leaves "
            f"{left} layers for {between} stages"
        )
    middle = [left // between] * between if between else []
    head = [first] if first is not None else []
    tail = [last] if last is not None else []
    return tuple(head + middle + tail)


def _check_chunks(config: ModelParallelConfig, layers: tuple[int, ...]) -> None:
    per_chunk, chunks = (
        config.num_layers_per_virtual_pipeline_stage,
        config.num_virtual_stages_per_pipeline_rank,
    )
    if (per_chunk is not None or (chunks or 1) > 1) and len(layers) < 2:
        raise StageLayersError("interleaving needs at least 2 pipeline stages")
    divisor = per_chunk if per_chunk is not None else chunks
    if divisor is not None and (divisor < 1 or layers[len(layers) // 2] % divisor):
        unit = "layers of one chunk" if per_chunk is not None else "chunks"
        raise StageLayersError(
            f"{layers[len(layers) // 2]} layers of a stage do not divide by {divisor} ({unit})"
        )


def _by_layout(config: ModelParallelConfig, num_layers: int, stages: int) -> tuple[int, ...]:
    layout = expand_layout(config.pipeline_model_parallel_layout or "")
    others = (
        config.num_layers_per_virtual_pipeline_stage,
        config.num_virtual_stages_per_pipeline_rank,
        config.decoder_first_pipeline_num_layers,
        config.decoder_last_pipeline_num_layers,
    )
    if any(other is not None for other in others):
        raise StageLayersError("--pipeline-model-parallel-layout excludes the other flags that split layers")
    symbols = Counter("".join(layout))
    if symbols["t"] != num_layers or symbols["E"] != 1 or symbols["L"] != 1:
        raise StageLayersError(
            f"--pipeline-model-parallel-layout holds {symbols['t']} layers, {symbols['E']} embeddings and "
            f"{symbols['L']} losses; expected {num_layers}, 1 and 1"
        )
    if len(layout) % stages:
        raise StageLayersError(
            f"--pipeline-model-parallel-layout has {len(layout)} stages, no multiple of {stages} ranks"
        )
    return tuple(sum(stage.count("t") for stage in layout[rank::stages]) for rank in range(stages))
