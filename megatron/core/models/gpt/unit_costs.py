"""The units of every stage before a model is built: their order, what they cost and how large they are (floor 0).

Names, order and accesses are those of `GPTModel.units` and `unit_accesses`; sizes are those of the buckets that a data
parallel engine lays them into. Work is that of stage_costs, so what units take adds up to what their stage takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.models.gpt import parameter_count
from megatron.core.models.gpt.stage_costs import ModelCosts, StageWork
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.pipeline_parallel.plan.held.accesses import ChunkUnits, merged_groups, merged_name
from megatron.core.pipeline_parallel.plan.held.units import Access, StageUnits, StateBytes, UnitCosts
from megatron.core.pipeline_parallel.plan.placement import Placement

_NOTHING = StageWork()


@dataclasses.dataclass(frozen=True)
class _UnitCost:
    """numels: parameters by bucket: the unit's own, and one that another pipeline stage has too. extra: of the further
    use of a tied matrix."""

    name: str
    numels: tuple[int, ...]
    work: StageWork = _NOTHING
    extra: int = 0
    backward_reads: bool = True
    begins_with_lookup: bool = False


def stage_units(
    costs: ModelCosts, specs: Sequence[StageSpec], placement: Placement, sizes: StateBytes
) -> tuple[StageUnits, ...]:
    """Of every stage, on one tensor parallel rank. Times in units of one layer's F, activations in bytes, as those of
    `ModelCosts.of_stages`."""
    ranks = placement.ranks()
    assert len(specs) == len(ranks), f"{len(specs)} stages, {placement} has {len(ranks)}"
    both_ends_here = len(specs) > 1 and ranks[0] == ranks[-1]
    tied = not costs.config.untie_embeddings_and_output_weights
    made = []
    for spec in specs:
        units, rows = _stage(costs, spec, tied=tied, both_ends_here=both_ends_here)
        if sizes.bucket_size is not None:
            numel = [sum(unit.numels) for unit in units]
            shared = [
                at for at, unit in enumerate(units) if unit.name == "embedding" and both_ends_here and tied
            ]
            groups = merged_groups([rows], numel, sizes.bucket_size, shared)
            units, rows = [_joined([units[at] for at in group]) for group in groups], rows.merged(groups)
        sized = tuple(_sized(unit, sizes, costs.layer().f) for unit in units)
        made.append(StageUnits(sized, rows.forward, rows.backward))
    return tuple(made)


def _stage(
    costs: ModelCosts, spec: StageSpec, *, tied: bool, both_ends_here: bool
) -> tuple[list[_UnitCost], ChunkUnits]:
    config = costs.config
    words = parameter_count.word_embedding_parameters(config, costs.padded_vocab_size, costs.tp)
    positions = parameter_count.position_embedding_parameters(config)
    norm = parameter_count.norm_parameters(config, config.hidden_size)
    both_ends = spec.embedding and spec.loss and tied
    units: list[_UnitCost] = []
    if both_ends:
        work = costs.embedding() + costs.head()
        numels: tuple[int, ...] = (words + positions + norm,)
        units.append(_UnitCost("embedding_and_head", numels, work, extra=words, begins_with_lookup=True))
    elif spec.embedding:
        apart = tied and not both_ends_here  # another stage has a copy of the words
        numels = (positions, words) if apart else (words + positions,)
        extra = words if tied and not apart else 0
        units.append(_UnitCost("embedding", numels, costs.embedding(), extra, backward_reads=False))
    first = [(len(units) - 1,)] if units else []
    count, start = len(spec.layers), len(units)
    for number, work in zip(spec.layers, costs.of_layers(count), strict=True):
        units.append(
            _UnitCost(f"decoder.layers.{number}", (parameter_count.layer_parameters(config, costs.tp),), work)
        )
    last: list[Access] = [(0,)] if both_ends else []
    if spec.loss and not both_ends:
        elsewhere = tied and both_ends_here
        last = [(len(units), len(units) + 1)] if elsewhere else [(len(units),)]
        numels = (norm,) if elsewhere else (norm, words) if tied else (norm + words,)
        units.append(_UnitCost("head", numels, costs.head()))
        units += [_UnitCost("embedding", (words + positions,))] if elsewhere else []
    layers = [(unit,) for unit in range(start, start + count)]
    backward: list[Access] = []
    for begin, end, recomputed in reversed(config.recompute_chunks(count)):
        backward += [tuple(range(start + begin, start + end))] if recomputed else layers[begin:end][::-1]
    if units:
        rest = costs.stage(spec).plus(sum((unit.work for unit in units), _NOTHING), -1)
        units[0] = dataclasses.replace(units[0], work=units[0].work + rest)
    return units, ChunkUnits((*first, *layers, *last), (*last, *backward, *first))


def _joined(units: Sequence[_UnitCost]) -> _UnitCost:
    own = sum(unit.numels[0] for unit in units)
    others = sum(sum(unit.numels[1:]) for unit in units)
    return _UnitCost(
        merged_name([unit.name for unit in units]),
        (own, others) if others else (own,),
        sum((unit.work for unit in units), _NOTHING),
        sum(unit.extra for unit in units),
        any(unit.backward_reads for unit in units),
        all(unit.begins_with_lookup for unit in units),
    )


def _sized(unit: _UnitCost, sizes: StateBytes, unit_of_time: float) -> UnitCosts:
    numel = sum(-(-numel // sizes.align) * sizes.align for numel in unit.numels)
    return UnitCosts(
        unit.name,
        unit.work.f / unit_of_time,
        unit.work.b / unit_of_time,
        unit.work.w / unit_of_time,
        activation=unit.work.saved,
        held_after_b=unit.work.held,
        weight_bytes=numel * sizes.weight,
        grad_bytes=numel * sizes.grad,
        extra_grad_bytes=unit.extra * sizes.grad,
        shard_bytes=sum(numel // ways * size for size, ways in sizes.at_rest),
        outer_grad_bytes=numel // sizes.inner * sizes.outer_grad,
        outer_weight_bytes=numel // sizes.inner * sizes.outer_weight,
        backward_reads=unit.backward_reads,
        begins_with_lookup=unit.begins_with_lookup,
    )
