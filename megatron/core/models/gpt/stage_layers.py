"""Which layers each stage of the pipeline holds, by Megatron's flags (floor 0).

Stages are global: with interleaving, stage chunk * PP + rank is a rank's chunk (the looped placement); on a V odd
chunks run backwards. Layers are numbered along the stages, and none is ever dropped: what does not come out even is an
error that names the flags.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron.core.config_base import LAYERS, STAGES
from megatron.core.list_expression import ListExpressionError, expand_layout
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.spec import StageSpec as StageSpec
from megatron.core.words import counted

MAX_LAYERS, MAX_STAGES = int(LAYERS.most), int(STAGES.most)
LAYOUT = "--pipeline-model-parallel-layout"
_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_PADDING = "--allow-padding-num-layers"
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


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
    ranks = config.pipeline_model_parallel_size
    for flag, value, most in (
        ("--num-layers", num_layers, MAX_LAYERS),
        ("--pipeline-model-parallel-size", ranks, MAX_STAGES),
        (_CHUNKS, config.num_virtual_stages_per_pipeline_rank or 1, MAX_STAGES),
    ):
        if not 1 <= value <= most:
            raise StageLayersError(f"{flag} {value}: must be from 1 to {most}")
    by_layout = config.pipeline_model_parallel_layout is not None
    counts = _by_layout(config, num_layers) if by_layout else _by_numbers(config, num_layers, chunks, kind)
    if chunks is not None and len(counts) != chunks * ranks:
        asked = LAYOUT if by_layout else f"{_PER_CHUNK} {config.num_layers_per_virtual_pipeline_stage}"
        raise StageLayersError(
            f"{asked} makes {len(counts)} stages, the pipeline's schedule has {chunks * ranks}: {chunks} on each "
            f"pipeline rank; "
            + (f"write {chunks * ranks} stages" if by_layout else f"leave {_PER_CHUNK} out")
        )
    if ranks == 1 and len(counts) > 1:
        raise StageLayersError(
            f"{len(counts)} chunks of the model with --pipeline-model-parallel-size 1: interleaving needs at least 2 "
            f"ranks; raise it, or leave {LAYOUT if by_layout else f'{_PER_CHUNK} / {_CHUNKS}'} out"
        )
    assert sum(counts) == num_layers, f"stages hold {sum(counts)} layers, the model has {num_layers}"
    ends, last = itertools.accumulate(counts), len(counts) - 1
    return tuple(
        StageSpec(tuple(range(end - count, end)), embedding=stage == 0, loss=stage == last)
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def layer_map_lines(specs: Sequence[StageSpec], placement: Placement) -> list[str]:
    """For the log: what each stage holds and on which pipeline rank; one line where all hold equally many layers."""
    assert len(specs) == placement.num_stages, f"{len(specs)} stages, {placement} has {placement.num_stages}"
    counts = {len(spec.layers) for spec in specs}
    if len(counts) > 1:
        return [
            f" > stage {stage} on pipeline rank {placement.rank_of(stage)}: {_contents(spec)}"
            for stage, spec in enumerate(specs)
        ]
    count = counts.pop()
    each = counted(count, "layer")
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


def _given(config: ModelParallelConfig, flags: Sequence[str]) -> dict[str, int]:
    """Of these flags those that are given, with their values."""
    values = {flag: getattr(config, flag[2:].replace("-", "_")) for flag in flags}
    return {flag: value for flag, value in values.items() if value is not None and value is not False}


def _excluding(one: str, others: dict[str, int]) -> None:
    """Refuse a flag beside another one that asks for something."""
    for other in (flag for flag, value in others.items() if value):
        raise StageLayersError(f"{one} and {other} exclude each other; keep one of them")


def _by_numbers(
    config: ModelParallelConfig, num_layers: int, needed: int | None, kind: str | None
) -> list[int]:
    """Layers of each stage from the flags that are numbers and switches. needed: chunks of the schedule."""
    chunks = config.num_virtual_stages_per_pipeline_rank
    given = _given(config, (_PER_CHUNK, _CHUNKS))
    if given.get(_PER_CHUNK):
        _excluding(_PER_CHUNK, _given(config, [_CHUNKS]))
    for flag, value in given.items():
        if value < 1:
            raise StageLayersError(f"{flag} {value}: must be at least 1")
    if needed is not None and chunks not in (None, needed):
        raise StageLayersError(
            f"{_CHUNKS} {chunks}: the pipeline's schedule has {needed} on each rank; leave the flag out"
        )
    chunks, ends = chunks or needed or 1, list(_given(config, _ENDS))
    if not ends:
        return _even(config, num_layers, chunks)
    for flag in ends:
        _excluding(flag, _given(config, (*_COUNTED, _PADDING)))
    if _PER_CHUNK in given:
        raise StageLayersError(
            f"{' and '.join(ends)} with {_PER_CHUNK}: stages of different sizes have no one size of chunk; "
            f"use {_CHUNKS}"
        )
    return _uneven_ends(config, num_layers, chunks, kind)


def _even(config: ModelParallelConfig, num_layers: int, chunks: int) -> list[int]:
    """Equal stages; the embedding and the loss may count as a layer, missing layers may be padded."""
    ranks, per_chunk = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    counted = _given(config, _COUNTED)
    slots = num_layers + len(counted)
    told = " + ".join([f"--num-layers {num_layers}", *(f"1 ({flag})" for flag in counted)])
    if per_chunk is not None:
        on_rank = -(-slots // ranks)
        if on_rank % per_chunk or (slots % ranks and not config.allow_padding_num_layers):
            raise StageLayersError(
                f"{told} over {ranks} pipeline ranks is not a multiple of {_PER_CHUNK} {per_chunk}; choose layers "
                f"that {ranks} x {per_chunk} divides, or use {LAYOUT}"
            )
        chunks = on_rank // per_chunk
    stages, shown = ranks * chunks, _stages_text(ranks, chunks)
    if stages > MAX_STAGES:
        raise StageLayersError(
            f"{shown} are {stages} stages, at most {MAX_STAGES} are possible; use fewer of them"
        )
    missing = -slots % stages
    if missing and not config.allow_padding_num_layers:
        raise StageLayersError(
            f"{told} is not divisible by {shown}; choose another number, or pass {_PADDING}, {' / '.join(_ENDS)} or "
            f"{LAYOUT}"
        )
    counts = [(slots + missing) // stages] * stages
    counts[0] -= config.account_for_embedding_in_pipeline_split
    counts[-1] -= config.account_for_loss_in_pipeline_split
    for stage in [stage for stage in (stages - 1, *range(stages - 1)) if counts[stage]][:missing]:
        counts[stage] -= 1
    return counts


def _uneven_ends(config: ModelParallelConfig, num_layers: int, chunks: int, kind: str | None) -> list[int]:
    """Given layers on the first and last rank, the rest spread evenly; each rank's layers spread over its chunks."""
    ranks, given = config.pipeline_model_parallel_size, _given(config, _ENDS)
    told = " ".join(f"{flag} {value}" for flag, value in given.items())
    between, left = ranks - len(given), num_layers - sum(given.values())
    if min(given.values()) < 1:
        raise StageLayersError(f"{told}: must be at least 1; a stage without layers takes {LAYOUT}")
    if between < 0:
        raise StageLayersError(f"{told} with {ranks} pipeline rank: one rank is both; give one of the two")
    if left < 0 or (left if between == 0 else left % between):
        raise StageLayersError(
            f"--num-layers {num_layers} with {told} leaves {left} layers for "
            f"{counted(between, 'pipeline rank')}; choose numbers that come out even, or use {LAYOUT}"
        )
    on_ranks = [left // between] * between if between else []
    on_ranks[:0] = [given[_ENDS[0]]] if _ENDS[0] in given else []
    on_ranks += [given[_ENDS[1]]] if _ENDS[1] in given else []
    uneven = next((rank for rank, count in enumerate(on_ranks) if count % chunks), None)
    if uneven is not None:
        by_flag = config.num_virtual_stages_per_pipeline_rank is not None
        source = f"{_CHUNKS} {chunks}" if by_flag else f"the schedule's number of chunks a rank, {chunks},"
        raise StageLayersError(
            f"--num-layers {num_layers} with {told} puts {on_ranks[uneven]} layers on pipeline rank {uneven}, "
            f"which {source} does not divide; choose numbers that it divides, or use {LAYOUT}"
        )
    once = [count // chunks for count in on_ranks]
    counts = [
        count for chunk in range(chunks) for count in (once[::-1] if kind == V_SHAPED and chunk % 2 else once)
    ]
    empty = [stage for stage, count in enumerate(counts) if count < 1]
    if empty:
        which = f"stage {empty[0]}" if len(empty) == 1 else f"stages {', '.join(map(str, empty[:8]))}"
        raise StageLayersError(
            f"--num-layers {num_layers} with {told} over {_stages_text(ranks, chunks)} leaves {which} without layers; "
            f"use fewer stages, or ask for an empty stage with {LAYOUT}"
        )
    return counts


def _stages_text(ranks: int, chunks: int) -> str:
    if chunks == 1:
        return f"--pipeline-model-parallel-size {ranks}"
    return f"{counted(ranks, 'pipeline rank')} x {counted(chunks, 'chunk')}"


def _by_layout(config: ModelParallelConfig, num_layers: int) -> list[int]:
    """Layers of each stage from a layout string; stages may be empty there."""
    _excluding(LAYOUT, _given(config, (_PER_CHUNK, _CHUNKS, *_ENDS, *_COUNTED, _PADDING)))
    shown, ranks = config.pipeline_model_parallel_layout, config.pipeline_model_parallel_size
    try:
        layout = expand_layout(shown or "")
    except ListExpressionError as error:
        raise StageLayersError(f"{LAYOUT}: {error}; write something like Et*2|(tt|)*5t|tL") from None
    symbols, wrong = "".join(layout), None
    layers, once = symbols.count("t"), symbols.count("E") == 1 == symbols.count("L")
    if "m" in symbols:
        wrong = (
            ": m (a block of multi-token prediction) is not supported yet, see docs/roadmap.md, 'multi-token "
            "prediction'; leave it out"
        )
    elif layers != num_layers:
        wrong = f" holds {layers} layers, --num-layers asks for {num_layers}; make them agree"
    elif not once or not layout[0].startswith("E") or not layout[-1].endswith("L"):
        wrong = " misplaces E or L; write E once, at the start of the first stage, and L once, at the end of the last"
    elif len(layout) % ranks:
        wrong = (
            f" has {len(layout)} stages, no multiple of --pipeline-model-parallel-size {ranks}; change the number of "
            "'|'"
        )
    if wrong is not None:
        raise StageLayersError(f"{LAYOUT} {shown}{wrong}")
    return [stage.count("t") for stage in layout]
