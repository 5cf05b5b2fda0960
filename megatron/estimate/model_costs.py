"""What stages of any split cost, and what their units are: sums over the pieces of a description (floor 0, pure).

Times are FLOPs of what was seen to be computed, and what a device computes while it moves a byte; activations are bytes
of what was seen to be kept. Names, order and accesses of units are those of `GPTModel.units`; their sizes those of the
buckets that a data parallel engine lays them into.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_order import ONE_MATRIX, accesses_of_stage, layer_units
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.state_bytes import StateBytes
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.transformer.layer_table import LayerKind, layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.unit_accesses import Accesses, merged_groups, merged_name
from megatron.estimate.description import OUTSIDE, ModelDescription, ModelPiece, ModuleFigures, Weight
from megatron.estimate.unit_work import CPU, DeviceRates, UnitWork, sum_of, unit_of, work_by_unit

_SUMS = ("f", "b", "w", "activation", "held_after_b", "extra_grad_bytes")


class UnitWeights(NamedTuple):
    """Of a unit, by the flat buffers that they lie in: elements of the rank's own, of those that another pipeline stage
    has too (a tied matrix), of experts."""

    own: int = 0
    shared: int = 0
    experts: int = 0

    @classmethod
    def of(cls, weights: Iterable[Weight]) -> UnitWeights:
        sums = [0, 0, 0]
        for one in weights:
            sums[2 if one.expert else 1 if one.shared else 0] += one.numel
        return cls(*sums)

    def plus(self, other: UnitWeights) -> UnitWeights:
        return UnitWeights(*map(operator.add, self, other))


class ParameterCount(NamedTuple):
    """total: every parameter once. experts: of these, in experts that tokens are routed to; active: all but those of
    experts that a token does not meet. of_ranks: on a tensor rank of each pipeline rank, its chunks together."""

    total: int
    experts: int
    active: int
    of_ranks: tuple[UnitWeights, ...]

    @property
    def per_rank(self) -> tuple[int, ...]:
        """`of_ranks`, all together."""
        return tuple(map(sum, self.of_ranks))


# A unit without bytes, with FLOPs and elements of accumulators of further uses; its parameters.
_Bare = tuple[UnitCosts, UnitWeights]


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """Of a described model. config: resolved. rates: of what it runs on."""

    description: ModelDescription
    config: TransformerConfig
    rates: DeviceRates = CPU

    @property
    def keeping_gathered(self) -> ModelCosts | None:
        """Of a model whose F keeps what sequence parallel has gathered; None where it has nothing to choose."""
        gathered = self.description.gathered
        return None if gathered is None else dataclasses.replace(self, description=gathered)

    @functools.cached_property
    def unit_flops(self) -> float:
        """FLOPs in a unit of time: one layer's F, experts left out."""
        name, *_ = layer_units(0, layer_table(self.config)[0])
        return self._work_of(self.description.kinds[self.description.layers[0]], (0,), (0,))[name].f

    def of_stages(self, stages: Sequence[StageSpec]) -> CostModel:
        """Times in units of one layer's F; activations in bytes, of a rank of the stage. A transfer takes what it would
        between machines."""
        works = [sum_of(self.of_units(spec).values()) for spec in stages]
        f, b, w, saved, held = zip(*works, strict=True)
        f, b, w = (tuple(time / self.unit_flops for time in column) for column in (f, b, w))
        comm = self.description.hidden_bytes * self.rates.sent / self.unit_flops
        return CostModel(f, b, w, saved, held, comm)

    def of_placement(self, stages: Sequence[StageSpec], placement: Placement) -> CostModel:
        """`of_stages`, wherever they lie."""
        return self.of_stages(stages)

    def check(self, placement: Placement, *, splits: bool) -> None:
        """That there are such stages: of any split, with backwards of any kind."""

    def of_units(self, spec: StageSpec) -> dict[str, UnitWork]:
        """Of a stage, by unit; the first of each piece has what the piece is handed besides."""
        chunks = self.config.recompute_chunks(len(spec.layers))
        pieces = self.description.pieces(spec.layers, chunks, embeds=spec.embedding, ends=spec.loss)
        found = dict[str, UnitWork]()
        for at, (piece, old, new) in enumerate(pieces):
            keeps = (
                not spec.embedding
                if not at
                else piece.ends.keeps_input and not pieces[at - 1][0].ends.keeps_output
            )
            files = at + 1 == len(pieces) or not pieces[at + 1][0].ends.files_back
            handed = piece.modules.get(OUTSIDE, ModuleFigures()).filed_bytes
            besides = UnitWork(saved=piece.ends.input_bytes * keeps, held=handed * files)
            for name, work in self._work_of(piece, old, new).items():
                found[name] = work.plus(besides)
                besides = UnitWork()
        if not found:  # it hands on what it gets
            hidden = self.description.hidden_bytes
            moved = 2 * hidden * self.rates.moved
            return {"": UnitWork(f=moved, b=moved, saved=hidden)}
        if spec.embedding and spec.loss and self._tied:
            both = found.pop("embedding").plus(found.pop("head"))
            found = {ONE_MATRIX: both, **found}
        return found

    def stage_units(
        self, specs: Sequence[StageSpec], placement: Placement, sizes: StateBytes
    ) -> tuple[StageUnits, ...]:
        """Of every stage, on one tensor parallel rank. Times in units of one layer's F, activations in bytes, as those
        of `of_stages`."""
        assert len(specs) == placement.num_stages, (
            f"{len(specs)} stages, {placement} has {placement.num_stages}"
        )
        of_stages, made = [self.unit_weights(spec, placement) for spec in specs], []
        for stage, (spec, weights) in enumerate(zip(specs, of_stages, strict=True)):
            rows, units = self._bare(spec, weights, placement)
            if sizes.bucket_size is not None:
                rank = placement.stages_of(placement.rank_of(stage))
                of_rank = {name: sum(numel) for one in rank for name, numel in of_stages[one].items()}
                alone = [place for place, (unit, _) in enumerate(units) if unit.name == "embedding"]
                groups = merged_groups(
                    [rows],
                    [sum(numel) for _, numel in units],
                    sizes.merged_to(sum(of_rank.values())),
                    alone if self._joins_ends(placement) else (),
                )
                units = [_joined([units[place] for place in group]) for group in groups]
                rows = rows.merged(groups)
            laid_out = tuple(sizes.laid_out(unit, numel) for unit, numel in units)
            made.append(StageUnits(laid_out, rows.forward, rows.backward))
        return tuple(made)

    def unit_weights(self, spec: StageSpec, placement: Placement) -> dict[str, UnitWeights]:
        """Of each unit of a stage, in the order of the forward: its parameters on a rank. Parts of a model are
        described by themselves: where both ends are on one rank, the matrix of both is one parameter of the rank's
        own."""
        ends = self.description.embedding, self.description.head
        first, last = (UnitWeights.of(piece.weights.values()) for piece in ends)
        if placement.has_both_ends_on_one_rank or (spec.embedding and spec.loss):
            first, last = UnitWeights(first.own + first.shared), UnitWeights(last.own)
        units = {"embedding": first} if spec.embedding else {}
        for number in spec.layers:
            units |= zip(layer_units(number, self._table[number]), self._layer_weights(number), strict=True)
        if spec.loss and spec.embedding and self._tied:
            return {ONE_MATRIX: UnitWeights(units.pop("embedding").own + last.own), **units}
        if spec.loss:
            units["head"] = last
        if spec.loss and self._joins_ends(placement):
            units["embedding"] = first
        return units

    def exchanged_bytes(self, stages: Iterable[StageSpec], *, splits: bool) -> int:
        """What a rank moves to those that have its tokens' experts, and back, in a microbatch through these stages,
        where every expert gets as many. splits: backwards are B and W."""
        moved = 0
        for one in stages:
            chunks = self.config.recompute_chunks(len(one.layers))
            piece = self.description.stage(one.layers, chunks, embeds=one.embedding, ends=one.loss)
            moved += piece.exchanged_bytes(splits=splits)
        return moved

    def count(self, stages: Sequence[StageSpec], placement: Placement) -> ParameterCount:
        """Of the model, and of what ranks hold. What tensor ranks hold several times is in the total once."""
        described = self.description
        ends = {**described.embedding.weights, **described.head.weights}
        total = active = sum(one.whole_numel for one in ends.values())
        experts = 0
        for number, kind in enumerate(described.layers):
            whole = [0, 0]  # of experts, and without
            for one in described.kinds[kind].weights.values():
                whole[not one.expert] += one.whole_numel
            total, experts = total + sum(whole), experts + whole[0]
            of = self._table[number].experts
            active += whole[1] + (0 if of is None else whole[0] * of.topk // of.num_experts)
        of_ranks: list[dict[str, UnitWeights]] = [{} for _ in range(placement.num_ranks)]
        for spec, rank in zip(stages, placement.ranks(), strict=True):
            of_ranks[rank] |= self.unit_weights(spec, placement)
        held = (functools.reduce(UnitWeights.plus, units.values(), UnitWeights()) for units in of_ranks)
        return ParameterCount(total, experts, active, tuple(held))

    @property
    def _table(self) -> tuple[LayerKind, ...]:
        return layer_table(self.config)

    @property
    def _tied(self) -> bool:
        return not self.config.untie_embeddings_and_output_weights

    def _joins_ends(self, placement: Placement) -> bool:
        """A V whose first and last stage, both on one rank, read one matrix."""
        return placement.has_both_ends_on_one_rank and placement.num_stages > 1 and self._tied

    def _work_of(self, piece: ModelPiece, old: Sequence[int], new: Sequence[int]) -> dict[str, UnitWork]:
        """By unit, the first with what is in none; without what it is handed. old, new: as in `pieces`."""
        kinds = [self._table[number] for number in new]
        end = "head" if piece.ends.input_bytes else "embedding"

        def units(numbers: Sequence[int]) -> list[str]:
            each = (layer_units(*one) for one in zip(numbers, kinds, strict=True))
            return list(itertools.chain(*each)) or [end]

        key = id(piece)
        if key not in self._works:
            self._works[key] = tuple(work_by_unit(piece, units(old), self.rates).values())
        return dict(zip(units(new), self._works[key], strict=True))

    @functools.cached_property
    def _works(self) -> dict[int, tuple[UnitWork, ...]]:
        """By piece of the description."""
        return {}

    @functools.cached_property
    def _weights(self) -> dict[str, list[UnitWeights]]:
        """By kind of layer."""
        return {}

    def _layer_weights(self, number: int) -> list[UnitWeights]:
        """Of a layer's units."""
        kind = self.description.layers[number]
        if kind not in self._weights:
            names = layer_units(0, self._table[number])
            by_unit: dict[str, list[Weight]] = {name: [] for name in names}
            for name, weight in self.description.kinds[kind].weights.items():
                by_unit[unit_of(name, names)].append(weight)
            self._weights[kind] = [UnitWeights.of(own) for own in by_unit.values()]
        return self._weights[kind]

    def _bare(
        self, spec: StageSpec, weights: Mapping[str, UnitWeights], placement: Placement
    ) -> tuple[Accesses[int], list[_Bare]]:
        """A stage's accesses, and its units."""
        rows = accesses_of_stage(
            spec.layers,
            self._table,
            self.config.recompute_chunks(len(spec.layers)),
            tied=self._tied,
            embeds=spec.embedding,
            ends=spec.loss,
            other_end_here=placement.has_both_ends_on_one_rank,
        )
        works, layer = self.of_units(spec), self.unit_flops
        words = UnitWeights.of(self.description.embedding.weights.values()).shared
        units: list[_Bare] = []
        for name, numel in weights.items():
            work, looks_up = works.get(name, UnitWork()), name == "embedding" and spec.embedding
            again = name == ONE_MATRIX or (looks_up and self._joins_ends(placement))
            unit = UnitCosts(
                name,
                *(work.f / layer, work.b / layer, work.w / layer, work.saved, work.held),
                extra_grad_bytes=words * again,
                backward_reads=not looks_up,
                begins_with_lookup=name == ONE_MATRIX,
            )
            units.append((unit, numel))
        return rows.renamed({name: place for place, name in enumerate(weights)}), units


def _joined(units: Sequence[_Bare]) -> _Bare:
    joined, numels = zip(*units, strict=True)
    sums = {name: sum(getattr(unit, name) for unit in joined) for name in _SUMS}
    unit = UnitCosts(
        merged_name([unit.name for unit in joined]),
        **sums,
        backward_reads=any(unit.backward_reads for unit in joined),
        begins_with_lookup=all(unit.begins_with_lookup for unit in joined),
    )
    return unit, functools.reduce(UnitWeights.plus, numels)
