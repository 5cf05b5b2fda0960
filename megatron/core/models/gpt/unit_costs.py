"""The units of every stage before a model is built: their order, what they cost and how large they are (floor 0).

Names, order and accesses are those of `GPTModel.units`; sizes are those of the buckets that a data parallel engine lays
them into. Work is that of stage_costs, so what units take adds up to what their stage takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from megatron.core.models.gpt.parameter_count import unit_parameters, word_parameters
from megatron.core.models.gpt.stage_costs import ModelCosts, StageWork
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_order import ONE_MATRIX, accesses_of_stage, layer_name
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, StateBytes, UnitCosts
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.unit_accesses import Accesses, merged_groups, merged_name

_SUMS = ("f", "b", "w", "activation", "held_after_b", "extra_grad_bytes")

Parameters = tuple[int, int]  # of one unit: see `unit_parameters`


def stage_units(
    costs: ModelCosts, specs: Sequence[StageSpec], placement: Placement, sizes: StateBytes
) -> tuple[StageUnits, ...]:
    """Of every stage, on one tensor parallel rank. Times in units of one layer's F, activations in bytes, as those of
    `ModelCosts.of_stages`."""
    assert len(specs) == placement.num_stages, f"{len(specs)} stages, {placement} has {placement.num_stages}"
    both_ends_here, unit_of_time = placement.has_both_ends_on_one_rank, costs.layer().f
    joins_ends = both_ends_here and not costs.config.untie_embeddings_and_output_weights
    of_stages = [
        unit_parameters(costs.config, costs.padded_vocab_size, costs.tp, spec, placement) for spec in specs
    ]
    made = []
    for stage, (spec, parameters) in enumerate(zip(specs, of_stages, strict=True)):
        rows, units = _stage(costs, spec, tuple(parameters), both_ends_here, joins_ends)
        numels = list(parameters.values())
        if sizes.bucket_size is not None:
            rank = placement.stages_of(placement.rank_of(stage))
            of_rank = {name: sum(numel) for one in rank for name, numel in of_stages[one].items()}
            limit, sums = sizes.merged_to(sum(of_rank.values())), [sum(numel) for numel in numels]
            shared = [place for place, name in enumerate(parameters) if name == "embedding" and joins_ends]
            groups = merged_groups([rows], sums, limit, shared)
            units = [_joined([units[place] for place in group]) for group in groups]
            numels = [_added(numels[place] for place in group) for group in groups]
            rows = rows.merged(groups)
        scaled = (
            dataclasses.replace(
                unit, f=unit.f / unit_of_time, b=unit.b / unit_of_time, w=unit.w / unit_of_time
            )
            for unit in units
        )
        laid_out = map(sizes.laid_out, scaled, numels)
        made.append(StageUnits(tuple(laid_out), rows.forward, rows.backward))
    return tuple(made)


def _stage(
    costs: ModelCosts, spec: StageSpec, names: Sequence[str], both_ends_here: bool, joins_ends: bool
) -> tuple[Accesses[int], list[UnitCosts]]:
    """Its accesses, and its units without bytes: with FLOPs, and elements of accumulators of further uses. joins_ends:
    the embedding of this rank is its output layer too."""
    config, words = costs.config, word_parameters(costs.config, costs.padded_vocab_size, costs.tp)
    where = {"embeds": spec.embedding, "ends": spec.loss, "other_end_here": both_ends_here}
    chunks = config.recompute_chunks(len(spec.layers))
    tied = not config.untie_embeddings_and_output_weights
    rows = accesses_of_stage(spec.layers, chunks, tied=tied, **where)
    works = dict(zip(map(layer_name, spec.layers), costs.of_layers(len(spec.layers)), strict=True))
    works |= {"head": costs.head(), ONE_MATRIX: costs.embedding() + costs.head()}
    if spec.embedding:
        works["embedding"] = costs.embedding()
    mine = [works.get(name, StageWork()) for name in names]
    if mine:
        mine[0] = mine[0] + costs.stage(spec).plus(sum(mine, StageWork()), -1)
    units = []
    for name, work in zip(names, mine, strict=True):
        looks_up = name == "embedding" and spec.embedding
        again = name == ONE_MATRIX or (looks_up and joins_ends)
        units.append(
            UnitCosts(
                name,
                work.f,
                work.b,
                work.w,
                work.saved,
                work.held,
                extra_grad_bytes=words if again else 0,
                backward_reads=not looks_up,
                begins_with_lookup=name == ONE_MATRIX,
            )
        )
    return rows.renamed({name: place for place, name in enumerate(names)}), units


def _added(numels: Iterable[Parameters]) -> Parameters:
    own, shared = zip(*numels, strict=True)
    return sum(own), sum(shared)


def _joined(units: Sequence[UnitCosts]) -> UnitCosts:
    sums = {name: sum(getattr(unit, name) for unit in units) for name in _SUMS}
    return UnitCosts(
        merged_name([unit.name for unit in units]),
        **sums,
        backward_reads=any(unit.backward_reads for unit in units),
        begins_with_lookup=all(unit.begins_with_lookup for unit in units),
    )
