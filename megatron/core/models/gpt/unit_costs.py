"""The units of every stage before a model is built: their order, what they cost and how large they are (floor 0).

Names, order and accesses are those of `GPTModel.units`; sizes are those of the buckets that a data parallel engine lays
them into. Work is that of stage_costs, so what units take adds up to what their stage takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megatron.core.models.gpt.parameter_count import UnitParameters, unit_parameters, word_parameters
from megatron.core.models.gpt.stage_costs import ModelCosts, StageWork
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_order import ONE_MATRIX, accesses_of_stage
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, StateBytes, UnitCosts
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.transformer.layer_table import layer_table
from megatron.core.unit_accesses import Accesses, merged_groups, merged_name

_SUMS = ("f", "b", "w", "activation", "held_after_b", "extra_grad_bytes")

# A unit without bytes, with FLOPs and elements of accumulators of further uses; its parameters, see `unit_parameters`.
Bare = tuple[UnitCosts, UnitParameters]


def stage_units(
    costs: ModelCosts, specs: Sequence[StageSpec], placement: Placement, sizes: StateBytes
) -> tuple[StageUnits, ...]:
    """Of every stage, on one tensor parallel rank. Times in units of one layer's F, activations in bytes, as those of
    `ModelCosts.of_stages`."""
    assert len(specs) == placement.num_stages, f"{len(specs)} stages, {placement} has {placement.num_stages}"
    of_stages = [
        unit_parameters(costs.config, costs.padded_vocab_size, costs.tp, spec, placement) for spec in specs
    ]
    layer, made = costs.layer().f, []
    for stage, (spec, parameters) in enumerate(zip(specs, of_stages, strict=True)):
        rows, units = _stage(costs, spec, parameters, placement)
        if sizes.bucket_size is not None:
            rank = placement.stages_of(placement.rank_of(stage))
            of_rank = {name: sum(numel) for one in rank for name, numel in of_stages[one].items()}
            shared = [place for place, (unit, _) in enumerate(units) if unit.name == "embedding"]
            alone = shared if _joins_ends(costs, placement) else []
            numels = [sum(numel) for _, numel in units]
            groups = merged_groups([rows], numels, sizes.merged_to(sum(of_rank.values())), alone)
            units = [_joined([units[place] for place in group]) for group in groups]
            rows = rows.merged(groups)
        laid_out = (
            sizes.laid_out(
                dataclasses.replace(unit, f=unit.f / layer, b=unit.b / layer, w=unit.w / layer), numel
            )
            for unit, numel in units
        )
        made.append(StageUnits(tuple(laid_out), rows.forward, rows.backward))
    return tuple(made)


def _joins_ends(costs: ModelCosts, placement: Placement) -> bool:
    """Whether the embedding of a rank is its output layer too."""
    return placement.has_both_ends_on_one_rank and not costs.config.untie_embeddings_and_output_weights


def _stage(
    costs: ModelCosts, spec: StageSpec, parameters: Mapping[str, UnitParameters], placement: Placement
) -> tuple[Accesses[int], list[Bare]]:
    """Its accesses, and its units."""
    config, words = costs.config, word_parameters(costs.config, costs.padded_vocab_size, costs.tp)
    rows = accesses_of_stage(
        spec.layers,
        layer_table(config),
        config.recompute_chunks(len(spec.layers)),
        tied=not config.untie_embeddings_and_output_weights,
        embeds=spec.embedding,
        ends=spec.loss,
        other_end_here=placement.has_both_ends_on_one_rank,
    )
    works = costs.of_layers(spec.layers)
    works |= {"head": costs.head(), ONE_MATRIX: costs.embedding() + costs.head()}
    if spec.embedding:
        works["embedding"] = costs.embedding()
    units: list[Bare] = []
    for name, numel in parameters.items():
        work, looks_up = works.get(name, StageWork()), name == "embedding" and spec.embedding
        if not units:
            work = work + costs.handed_on(spec)
        again = name == ONE_MATRIX or (looks_up and _joins_ends(costs, placement))
        unit = UnitCosts(
            name,
            *(work.f, work.b, work.w, work.saved, work.held),
            extra_grad_bytes=words * again,
            backward_reads=not looks_up,
            begins_with_lookup=name == ONE_MATRIX,
        )
        units.append((unit, numel))
    return rows.renamed({name: place for place, name in enumerate(parameters)}), units


def _joined(units: Sequence[Bare]) -> Bare:
    joined, numels = zip(*units, strict=True)
    sums = {name: sum(getattr(unit, name) for unit in joined) for name in _SUMS}
    unit = UnitCosts(
        merged_name([unit.name for unit in joined]),
        **sums,
        backward_reads=any(unit.backward_reads for unit in joined),
        begins_with_lookup=all(unit.begins_with_lookup for unit in joined),
    )
    return unit, UnitParameters(*map(sum, zip(*numels, strict=True)))
