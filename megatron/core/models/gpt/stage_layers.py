"""Which layers each stage of the pipeline holds, by Megatron's flags (floor 0).

Stages are global: with interleaving, stage chunk * PP + rank is a rank's chunk (the looped placement); on a V odd
chunks run backwards. Layers are numbered along the stages, and none is ever dropped: what does not come out even is an
error that names the flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config_base import LAYERS, STAGES
from megatron.core.list_expression import ListExpressionError, expand_layout
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.spec import StageSpec as StageSpec

MAX_LAYERS, MAX_STAGES = int(LAYERS.most), int(STAGES.most)
LAYOUT = "--pipeline-model-parallel-layout"
_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_PADDING = "--allow-padding-num-layers"


class StageLayersError(ValueError):
    """Layers that do not divide over stages and chunks as the flags ask."""


def split_stages(
    config: ModelParallelConfig, num_layers: int, *, chunks: int | None = None, kind: str | None = None
) -> tuple[StageSpec, ...]:
    """The stages in order, PP x chunks of them. Raises StageLayersError, which names the flags and a fix.

    chunks: what the schedule asks for; None: what the flags do, one without any. kind: of placement, where the flags
    speak of ranks. The embedding is on the first and the loss on the last stage. A stage is without layers where a
    layout string says so, where padding took its one layer, or where the embedding or the loss counts as that layer.
    """
    for flag, value, most in (
        ("--num-layers", num_layers, MAX_LAYERS),
        ("--pipeline-model-parallel-size", config.pipeline_model_parallel_size, MAX_STAGES),
        (_CHUNKS, config.num_virtual_stages_per_pipeline_rank or 1, MAX_STAGES),
    ):
        if not 1 <= value <= most:
            raise StageLayersError(f"{flag} {value}: must be from 1 to {most}")
    by_layout = config.pipeline_model_parallel_layout is not None
    counts = _by_layout(config, num_layers) if by_layout else _by_numbers(config, num_layers, chunks, kind)
    ranks = config.pipeline_model_parallel_size
    if chunks is not None and len(counts) != chunks * ranks:
        asked = LAYOUT if by_layout else f"{_PER_CHUNK} {config.num_layers_per_virtual_pipeline_stage}"
        raise StageLayersError(
            f"{asked} makes {len(counts)} stages, the pipeline's schedule has {chunks * ranks}: {chunks} on each of "
            f"{ranks} ranks; "
            + (f"write {chunks * ranks} stages" if by_layout else f"leave {_PER_CHUNK} out")
        )
    if ranks == 1 and len(counts) > 1:
        raise StageLayersError(
            f"{len(counts)} chunks of the model with --pipeline-model-parallel-size 1: interleaving needs at least 2 "
            f"ranks; raise it, or leave {LAYOUT if by_layout else f'{_PER_CHUNK} / {_CHUNKS}'} out"
        )
    specs, first = [], 0
    for stage, count in enumerate(counts):
        layers = tuple(range(first, first + count))
        specs.append(StageSpec(layers, embedding=stage == 0, loss=stage == len(counts) - 1))
        first += count
    held = [layer for spec in specs for layer in spec.layers]
    assert held == list(range(num_layers)), f"stages hold layers {held}, the model has {num_layers}"
    return tuple(specs)


def layer_map_lines(specs: Sequence[StageSpec], placement: Placement) -> list[str]:
    """For the log: what each stage holds and on which pipeline rank; one line where all hold equally many layers."""
    assert len(specs) == placement.num_stages, f"{len(specs)} stages, {placement} has {placement.num_stages}"
    counts = {len(spec.layers) for spec in specs}
    if len(counts) > 1:
        return [
            f" > stage {stage} on pipeline rank {placement.rank_of(stage)}: {_contents(spec)}"
            for stage, spec in enumerate(specs)
        ]
    each = _plural(counts.pop(), "layer")
    if len(specs) == 1:
        return [f" > stages: 1 of {each}"]
    chunks = f", {placement.num_chunks} on each of {placement.num_ranks} pipeline ranks"
    return [
        f" > stages: {len(specs)} of {each}{chunks if placement.num_chunks > 1 else ''}; embedding on stage "
        f"0, loss on stage {len(specs) - 1}"
    ]


def _contents(spec: StageSpec) -> str:
    layers = "no layers"
    if spec.layers:
        first, last = spec.layers[0], spec.layers[-1]
        layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return ", ".join(["embedding"] * spec.embedding + [layers] + ["loss"] * spec.loss)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _excluding(given: dict[str, object]) -> None:
    """Refuse flags of which more than one asks for something."""
    flags = [flag for flag, value in given.items() if value not in (None, False)]
    if len(flags) > 1:
        raise StageLayersError(f"{' and '.join(flags)} exclude each other; keep one of them")


def _end_flags(config: ModelParallelConfig) -> dict[str, int | None]:
    return {
        "--decoder-first-pipeline-num-layers": config.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": config.decoder_last_pipeline_num_layers,
    }


def _counted_flags(config: ModelParallelConfig) -> dict[str, bool]:
    return {
        "--account-for-embedding-in-pipeline-split": config.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": config.account_for_loss_in_pipeline_split,
    }


def _by_numbers(
    config: ModelParallelConfig, num_layers: int, needed: int | None, kind: str | None
) -> list[int]:
    """Layers of each stage from the flags that are numbers and switches. needed: chunks of the schedule."""
    per_chunk, chunks = (
        config.num_layers_per_virtual_pipeline_stage,
        config.num_virtual_stages_per_pipeline_rank,
    )
    _excluding({_PER_CHUNK: per_chunk, _CHUNKS: chunks})
    for flag, value in ((_PER_CHUNK, per_chunk), (_CHUNKS, chunks)):
        if value is not None and value < 1:
            raise StageLayersError(f"{flag} {value}: must be at least 1")
    if needed is not None and chunks not in (None, needed):
        raise StageLayersError(
            f"{_CHUNKS} {chunks}: the pipeline's schedule has {needed} on each rank; leave the flag out"
        )
    chunks = chunks or needed or 1
    ends, counted = _end_flags(config), _counted_flags(config)
    given_ends = [flag for flag, value in ends.items() if value is not None]
    if not given_ends:
        return _even(config, num_layers, chunks)
    for flag in given_ends:
        for other in [
            *(name for name, on in counted.items() if on),
            *[_PADDING] * config.allow_padding_num_layers,
        ]:
            _excluding({flag: True, other: True})
    if per_chunk is not None:
        raise StageLayersError(
            f"{' and '.join(given_ends)} with {_PER_CHUNK}: stages of different sizes have no one size of chunk; "
            f"use {_CHUNKS}"
        )
    return _uneven_ends(config, num_layers, chunks, kind)


def _even(config: ModelParallelConfig, num_layers: int, chunks: int) -> list[int]:
    """Equal stages; the embedding and the loss may count as a layer, missing layers may be padded."""
    ranks, per_chunk = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    counted = _counted_flags(config)
    slots = num_layers + sum(counted.values())
    told = " + ".join([f"--num-layers {num_layers}", *(f"1 ({flag})" for flag, on in counted.items() if on)])
    if per_chunk is not None:
        on_rank = -(-slots // ranks)
        if on_rank % per_chunk or (slots % ranks and not config.allow_padding_num_layers):
            raise StageLayersError(
                f"{told} over {ranks} pipeline ranks is not a multiple of {_PER_CHUNK} {per_chunk}; choose layers "
                f"that {ranks} x {per_chunk} divides, or use {LAYOUT}"
            )
        chunks = on_rank // per_chunk
    stages = ranks * chunks
    if stages > MAX_STAGES:
        raise StageLayersError(
            f"{_stages_text(ranks, chunks)} are {stages} stages, at most {MAX_STAGES} are possible; use fewer of them"
        )
    missing = -slots % stages
    if missing and not config.allow_padding_num_layers:
        raise StageLayersError(
            f"{told} is not divisible by {_stages_text(ranks, chunks)}; choose another number, or pass {_PADDING}, "
            f"{' / '.join(_end_flags(config))} or {LAYOUT}"
        )
    counts = [(slots + missing) // stages] * stages
    counts[0] -= counted["--account-for-embedding-in-pipeline-split"]
    counts[-1] -= counted["--account-for-loss-in-pipeline-split"]
    for stage in [stage for stage in (stages - 1, *range(stages - 1)) if counts[stage]][:missing]:
        counts[stage] -= 1
    return counts


def _uneven_ends(config: ModelParallelConfig, num_layers: int, chunks: int, kind: str | None) -> list[int]:
    """Given layers on the first and last rank, the rest spread evenly; each rank's layers spread over its chunks."""
    ranks = config.pipeline_model_parallel_size
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    told = " ".join(f"{flag} {value}" for flag, value in _end_flags(config).items() if value is not None)
    given = [end for end in (first, last) if end is not None]
    between, left = ranks - len(given), num_layers - sum(given)
    if any(end < 1 for end in given):
        raise StageLayersError(f"{told}: must be at least 1; a stage without layers takes {LAYOUT}")
    if between < 0:
        raise StageLayersError(f"{told} with {ranks} pipeline rank: one rank is both; give one of the two")
    if left < 0 or (left if between == 0 else left % between):
        raise StageLayersError(
            f"--num-layers {num_layers} with {told} leaves {left} layers for {between} pipeline ranks; choose numbers "
            f"that come out even, or use {LAYOUT}"
        )
    middle = [left // between] * between if between else []
    on_ranks = [first] * (first is not None) + middle + [last] * (last is not None)
    counts_of_ranks = [count for count in on_ranks if count is not None]
    uneven = next((rank for rank, count in enumerate(counts_of_ranks) if count % chunks), None)
    if uneven is not None:
        raise StageLayersError(
            f"--num-layers {num_layers} with {told} puts {counts_of_ranks[uneven]} layers on pipeline rank {uneven}, "
            f"which {_chunks_told(config, chunks)} does not divide; choose numbers that it divides, or use {LAYOUT}"
        )
    once = [count // chunks for count in counts_of_ranks]
    counts = [
        count for chunk in range(chunks) for count in (once[::-1] if kind == V_SHAPED and chunk % 2 else once)
    ]
    _refuse_empty(counts, f"--num-layers {num_layers} with {told}", ranks)
    return counts


def _chunks_told(config: ModelParallelConfig, chunks: int) -> str:
    """Where the number of chunks comes from."""
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return f"{_CHUNKS} {chunks}"
    return f"the schedule's number of chunks a rank, {chunks},"


def _stages_text(ranks: int, chunks: int) -> str:
    if chunks == 1:
        return f"--pipeline-model-parallel-size {ranks}"
    return f"{ranks} pipeline ranks x {chunks} chunks"


def _refuse_empty(counts: list[int], told: str, ranks: int) -> None:
    empty = [stage for stage, count in enumerate(counts) if count < 1]
    if empty:
        which = f"stage {empty[0]}" if len(empty) == 1 else f"stages {', '.join(map(str, empty[:8]))}"
        raise StageLayersError(
            f"{told} over {_stages_text(ranks, len(counts) // ranks)} leaves {which} without layers; use fewer stages, "
            f"or ask for an empty stage with {LAYOUT}"
        )


def _by_layout(config: ModelParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage from a layout string; stages may be empty there."""
    numbers: dict[str, object] = {
        _PER_CHUNK: config.num_layers_per_virtual_pipeline_stage,
        _CHUNKS: config.num_virtual_stages_per_pipeline_rank,
        **_end_flags(config),
        **_counted_flags(config),
        _PADDING: config.allow_padding_num_layers,
    }
    for flag, value in numbers.items():
        _excluding({LAYOUT: True, flag: value})
    try:
        layout = expand_layout(config.pipeline_model_parallel_layout or "")
    except ListExpressionError as error:
        raise StageLayersError(f"{LAYOUT}: {error}; expected something like Et*2|(tt|)*5t|tL") from None
    symbols, shown = "".join(layout), config.pipeline_model_parallel_layout
    if "m" in symbols:
        raise StageLayersError(
            f"{LAYOUT} {shown}: m (a block of multi-token prediction) is not supported yet, see docs/roadmap.md, "
            "'multi-token prediction'; leave it out"
        )
    layers, ranks = symbols.count("t"), config.pipeline_model_parallel_size
    if layers != num_layers:
        raise StageLayersError(
            f"{LAYOUT} {shown} holds {layers} layers, --num-layers asks for {num_layers}; make them agree"
        )
    once = symbols.count("E") == 1 == symbols.count("L")
    if not once or not layout[0].startswith("E") or not layout[-1].endswith("L"):
        raise StageLayersError(
            f"{LAYOUT} {shown}: write E once, at the start of the first stage, and L once, at the end of the last"
        )
    if len(layout) % ranks:
        raise StageLayersError(
            f"{LAYOUT} {shown} has {len(layout)} stages, no multiple of --pipeline-model-parallel-size {ranks}; "
            "change the number of '|'"
        )
    return [stage.count("t") for stage in layout]
