"""A model of a user's own as plain data, and what plans are made from (floor 0, pure).

Nobody but its provider knows how to cut it, so that it has no pieces of which any stage follows: for each placement of
stages that a plan may have, its stages are as the provider makes them there, whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.models.gpt.stage_layers import StageLayersError, StageSpec
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.state_bytes import StateBytes
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.transformer.model_config import TransformerConfig
from megatron.estimate.description import ModelDescription, ModelPiece, Weight, as_json, from_json, piece_of
from megatron.estimate.model_costs import ModelCosts, ParameterCount, UnitWeights
from megatron.estimate.unit_work import CPU, DeviceRates, UnitWork, sum_of, work_by_unit


@dataclasses.dataclass(frozen=True)
class OwnUnits:
    """What engines of every stage have laid out. roots: by stage and unit, paths of its modules in the stage."""

    stages: tuple[StageUnits, ...]
    roots: tuple[tuple[tuple[str, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class OwnStages:
    """The model at one placement. pieces: by global stage. units: by how states are cut (`cut_name`), with the bytes of
    the optimizer, without times. whole_backward: why backwards cannot be split, None where they can."""

    pieces: tuple[ModelPiece, ...]
    units: Mapping[str, OwnUnits]
    whole_backward: str | None


@dataclasses.dataclass(frozen=True)
class OwnDescription:
    """placements: what was seen, at least one. impossible: why the provider has no stages for others."""

    placements: Mapping[Placement, OwnStages]
    impossible: Mapping[Placement, str]

    def __hash__(self) -> int:
        """Of what is quick to see; equal ones are equal all over."""
        return hash((*self.placements, *self.impossible))

    def stages(self, placement: Placement) -> dict[int, ModelPiece]:
        """By number."""
        return dict(enumerate(self.placements[placement].pieces))


def cut_name(sizes: StateBytes) -> str:
    """One for all that are cut alike."""
    return repr(sizes)


def description_as_json(description: ModelDescription | OwnDescription | None) -> Any:
    """For ranks to tell each other."""
    if not isinstance(description, OwnDescription):
        return None if description is None else ["by pieces", as_json(description)]
    placements = [
        [
            dataclasses.astuple(placement),
            as_json(seen.pieces),
            [
                [name, [dataclasses.asdict(one) for one in units.stages], units.roots]
                for name, units in seen.units.items()
            ],
            seen.whole_backward,
        ]
        for placement, seen in description.placements.items()
    ]
    return [
        "by stages",
        placements,
        [[dataclasses.astuple(one), why] for one, why in description.impossible.items()],
    ]


def description_from_json(content: Any) -> ModelDescription | OwnDescription | None:
    """What `description_as_json` wrote."""
    if content is None:
        return None
    kind, *rest = content
    if kind == "by pieces":
        return from_json(*rest)
    placements, impossible = rest
    return OwnDescription(
        {
            Placement(*placement): OwnStages(
                tuple(map(piece_of, pieces)), {name: _units(*own) for name, *own in units}, why
            )
            for placement, pieces, units, why in placements
        },
        {Placement(*placement): why for placement, why in impossible},
    )


def _units(stages: Any, roots: Any) -> OwnUnits:
    return OwnUnits(
        tuple(map(StageUnits.of_dict, stages)), tuple(tuple(map(tuple, of_stage)) for of_stage in roots)
    )


@dataclasses.dataclass(frozen=True)
class OwnCosts:
    """As `ModelCosts`, of such a model. num_layers: of the flags, whose share of all forwards is the unit of time."""

    description: OwnDescription
    num_layers: int
    rates: DeviceRates = CPU

    keeping_gathered: None = None  # a model of one's own has nothing to choose there

    @functools.cached_property
    def unit_flops(self) -> float:
        """FLOPs in a unit of time: the whole model's F, divided by layers."""
        first = next(iter(self.description.placements.values()))
        return max(1.0, sum(self._work(piece).f for piece in first.pieces) / self.num_layers)

    def check(self, placement: Placement, *, splits: bool) -> None:
        """Raises StageLayersError where the model has no such stages. splits: their backwards are to be B and W."""
        seen = self.description.placements.get(placement)
        if seen is None:
            why = self.description.impossible.get(
                placement, "the model provider was not asked for such stages"
            )
            raise StageLayersError(why)
        if splits and seen.whole_backward is not None:
            raise StageLayersError(seen.whole_backward)

    def of_placement(self, stages: Sequence[StageSpec], placement: Placement) -> CostModel:
        """Times in units of `unit_flops`, activations in bytes. A transfer takes what it would between machines. Raises
        StageLayersError."""
        self.check(placement, splits=False)
        pieces, unit = self.description.placements[placement].pieces, self.unit_flops
        works = [self._work(piece) for piece in pieces]
        f, b, w = (tuple(getattr(work, name) / unit for work in works) for name in "fbw")
        hidden = max(piece.ends.output_bytes for piece in pieces)
        kept = tuple(float(piece.kept_bytes) for piece in pieces)
        filed = tuple(float(piece.filed_bytes) for piece in pieces)
        return CostModel(f, b, w, kept, filed, hidden * self.rates.sent / unit)

    def stage_units(
        self, stages: Sequence[StageSpec], placement: Placement, sizes: StateBytes
    ) -> tuple[StageUnits, ...]:
        """Of every stage, as engines lay them out. Raises StageLayersError."""
        self.check(placement, splits=False)
        if (key := (placement, sizes)) not in self._laid_out:
            self._laid_out[key] = self._timed(self.description.placements[placement], sizes)
        return self._laid_out[key]

    @functools.cached_property
    def _laid_out(self) -> dict[tuple[Placement, StateBytes], tuple[StageUnits, ...]]:
        """What has been asked for."""
        return {}

    def _timed(self, seen: OwnStages, sizes: StateBytes) -> tuple[StageUnits, ...]:
        units, unit, made = seen.units[cut_name(sizes)], self.unit_flops, []
        for piece, stage, roots in zip(seen.pieces, units.stages, units.roots, strict=True):
            rest = stage.forward[0 if piece.ends.output_bytes else -1][-1] if stage.forward else 0
            works = _work_of_units(piece, roots, self.rates, rest)
            timed = (
                dataclasses.replace(
                    one,
                    **{name: getattr(work, name) / unit for name in "fbw"},
                    activation=work.saved,
                    held_after_b=work.held,
                )
                for one, work in zip(stage.units, works, strict=True)
            )
            made.append(dataclasses.replace(stage, units=tuple(timed)))
        return tuple(made)

    def count(self, stages: Sequence[StageSpec], placement: Placement) -> ParameterCount:
        """Of the model, and of what ranks hold, which are all active. Raises StageLayersError."""
        self.check(placement, splits=False)
        of_ranks: list[dict[str, Weight]] = [{} for _ in range(placement.num_ranks)]
        pieces = self.description.placements[placement].pieces
        for piece, rank in zip(pieces, placement.ranks(), strict=True):
            of_ranks[rank] |= piece.weights
        # Of one name in several stages, each has it: a tied matrix.
        every = {name: one for weights in of_ranks for name, one in weights.items()}.values()
        whole, experts = (
            sum(one.whole_numel for one in every if one.expert or not alone) for alone in (False, True)
        )
        held = tuple(UnitWeights.of(weights.values()) for weights in of_ranks)
        return ParameterCount(whole, experts, whole, held)

    def _work(self, piece: ModelPiece) -> UnitWork:
        return sum_of(work_by_unit(piece, ("",), self.rates).values())


@functools.lru_cache(maxsize=16)
def costs_of(
    description: ModelDescription | OwnDescription, model: TransformerConfig, rates: DeviceRates
) -> ModelCosts | OwnCosts:
    """The same object for the same model, which sums up what its pieces take once."""
    if isinstance(description, OwnDescription):
        assert model.num_layers is not None, "the rules ask for --num-layers"
        return OwnCosts(description, model.num_layers, rates)
    return ModelCosts(description, model, rates)


def _work_of_units(
    piece: ModelPiece, roots: Sequence[Sequence[str]], rates: DeviceRates, rest: int
) -> tuple[UnitWork, ...]:
    """What a stage's modules take, by the innermost unit around them. rest: the unit that has what is in none, unless
    one is of the whole stage."""
    first = roots[rest] if roots else ()
    paths = sorted(dict.fromkeys((*first, *itertools.chain(*roots))), key=bool)
    works = work_by_unit(piece, paths, rates) if paths else {}
    return tuple(sum_of(works[path] for path in own) for own in roots)
