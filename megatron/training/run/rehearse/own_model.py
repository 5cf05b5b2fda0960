"""The description of whatever model a run's provider makes: the GPT of the flags by its pieces, a user's own by its
stages, at each placement that a plan may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron.core.device import imagining
from megatron.core.distributed.custom_fsdp.bucket_memory import trained
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.held.state_bytes import StateBytes
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.units import Unit
from megatron.estimate.own_description import OwnDescription, OwnStages, OwnUnits, cut_name
from megatron.training.config.config import Config
from megatron.training.engine import Chunk
from megatron.training.planner import possible_specs
from megatron.training.report.step_metrics import ForwardStep
from megatron.training.run.build import ModelProvider, build_chunk, build_chunks, imagined_world, unsplittable
from megatron.training.run.describe import asks_for_costs, described
from megatron.training.run.rehearse.own_stages import own_stages, publish_here, with_generators_kept

Roots = tuple[tuple[str, ...], ...]


class Provided(NamedTuple):
    """What a user has given to `pretrain`, and what it may ask for."""

    model_provider: ModelProvider
    forward_step: ForwardStep
    tokenizer: Tokenizer | None = None


def described_run(config: Config, provided: Provided) -> tuple[Config, str]:
    """With the description of the model that the provider makes, and why there is none."""
    own, undescribed = described_own(config, provided)
    if own is None and not undescribed:
        return described(config), ""
    return config if own is None else dataclasses.replace(config, description=own), undescribed


def described_own(config: Config, provided: Provided) -> tuple[OwnDescription | None, str]:
    """The description of a model that is none of the flags, and why there is none of it. The provider is called where
    somebody reads that. To be called by all ranks: what the provider does may communicate."""
    if config.description is not None or not asks_for_costs(config):
        return None, ""
    specs = possible_specs(config.staged_model, config.rank_budget)
    try:
        if with_generators_kept(_is_ours, config, specs[0], provided):
            return None, ""
        return with_generators_kept(_own, config, specs, provided), ""
    except Exception as error:  # of a user's code, which may do on such tensors what it wants
        return (
            None,
            f"running the model provider or forward step on tensors without memory raised ({_words(error)})",
        )


def _words(error: Exception) -> str:
    told = str(error).strip().partition("\n")[0]
    return told if isinstance(error, ModelError) else f"{type(error).__name__}: {told}"


def _is_ours(config: Config, spec: ScheduleSpec, provided: Provided) -> bool:
    """Whether flags say what all its stages hold."""
    config = dataclasses.replace(config, decided=spec)
    grid, world = config.world_part().grid, imagined_world(config)
    for pp_rank in range(spec.placement.num_ranks):
        ps = world.state(grid.rank({"pp": pp_rank}))
        with imagining(ps.device), torch.device(ps.device.torch_device):
            publish_here(config, ps, config.flat(), speaks=False, tokenizer=provided.tokenizer)
            for chunk in range(spec.placement.num_chunks):
                if not build_chunk(config, ps, provided.model_provider, chunk, spec).is_described:
                    return False
    return True


def _own(config: Config, specs: list[ScheduleSpec], provided: Provided) -> OwnDescription:
    """Raises what the first placement does, where there is none that the provider has stages for."""
    seen: dict[Placement, OwnStages] = {}
    sizes: dict[Placement, int] = {}
    impossible: dict[Placement, str] = {}
    failures: list[Exception] = []
    for spec in {one.placement: one for one in specs}.values():
        try:
            seen[spec.placement], sizes[spec.placement] = _at(config, spec, provided)
        except Exception as error:  # of a user's code
            failures.append(error)
            impossible[spec.placement] = _words(error)
    if not seen:
        raise failures[0]
    first, *others = seen
    for placement in others:
        like = next(one for one in seen if one.num_stages == placement.num_stages)
        if sizes[placement] != sizes[first]:
            why = f"makes a model of {sizes[placement]:,} parameters, else one of {sizes[first]:,}"
        elif _weights(seen[placement]) != _weights(seen[like]):
            why = "makes others than where chunks lie in another order"
        else:
            continue
        impossible[placement] = f"asked for {placement.num_stages} stages, the model provider {why}"
        del seen[placement]
    return OwnDescription(seen, impossible)


def _weights(stages: OwnStages) -> list[dict[str, int]]:
    """By stage."""
    return [{name: one.numel for name, one in piece.weights.items()} for piece in stages.pieces]


def _at(config: Config, spec: ScheduleSpec, provided: Provided) -> tuple[OwnStages, int]:
    """The model at a placement, and how many parameters it has."""
    pieces = own_stages(config, spec, *provided)
    config = dataclasses.replace(config, decided=spec)
    world = imagined_world(config)
    world.keep_one_a_stage()
    cuts = _cuts(config)

    def build(ps: ParallelState) -> _BuiltStages:
        publish_here(config, ps, config.flat(), speaks=False, tokenizer=provided.tokenizer)
        return _BuiltStages.of(config, ps, provided.model_provider, spec, cuts)

    ranks = list(world.run(build).values())
    units: dict[str, OwnUnits] = {}
    for name in cuts:
        by_stage = {stage: one for rank in ranks for stage, one in rank.units[name].items()}
        stages, roots = zip(*(by_stage[stage] for stage in sorted(by_stage)), strict=True)
        units[name] = OwnUnits(stages, roots)
    whole = next((one.whole_backward for one in ranks if one.whole_backward is not None), None)
    shared = {name: numel for one in ranks for name, numel in one.shared.items()}
    size = sum(one.numel for one in ranks) + sum(shared.values())
    return OwnStages(tuple(pieces[stage] for stage in sorted(pieces)), units, whole), size


def _cuts(config: Config) -> dict[str, tuple[DistributedDataParallelConfig, StateBytes]]:
    """In all ways that states may be cut, by `cut_name`."""
    ways: list[tuple[DistributedDataParallelConfig, StateBytes]] = []
    if config.state_bytes is not None:
        ways.append((config.ddp, config.state_bytes))
    budget = config.rank_budget
    for residency, sizes in () if budget is None else budget.rows:
        strategy = residency.strategy
        ways.append((dataclasses.replace(config.ddp, data_parallel_sharding_strategy=strategy), sizes))
    return {cut_name(sizes): (ddp, sizes) for ddp, sizes in reversed(ways)}


class _BuiltStages(NamedTuple):
    """Of a rank. units: by way and stage, with the paths of their modules. numel, shared: of its parameters, those
    apart that other stages have too. whole_backward: as in `OwnStages`."""

    units: Mapping[str, Mapping[int, tuple[StageUnits, Roots]]]
    numel: int
    shared: Mapping[str, int]
    whole_backward: str | None

    @classmethod
    def of(
        cls,
        config: Config,
        ps: ParallelState,
        provider: ModelProvider,
        spec: ScheduleSpec,
        cuts: Mapping[str, tuple[DistributedDataParallelConfig, StateBytes]],
    ) -> _BuiltStages:
        units: dict[str, Mapping[int, tuple[StageUnits, Roots]]] = {}
        whole: str | None = None
        sizes: dict[bool, dict[str, int]] = {}
        # Whether backwards can be split is asked of the chunks.
        spec = dataclasses.replace(spec, schedule="gpipe", file=None)
        for name, (ddp, states) in cuts.items():
            chunks, model, meta = build_chunks(config, ps, provider, spec, ddp)
            units[name] = _units(chunks, model, states)
            reasons = (unsplittable(chunk.module, "a schedule that splits backwards") for chunk in chunks)
            whole = next((why for why in reasons if why is not None), None)
            sizes = {
                shared: {
                    name: math.prod(one.global_shape) for name, one in meta.items() if one.shared == shared
                }
                for shared in (False, True)
            }
        return cls(units, sum(sizes[False].values()), sizes[True], whole)


def _units(
    chunks: tuple[Chunk, ...], model: DistributedDataParallel, states: StateBytes
) -> dict[int, tuple[StageUnits, Roots]]:
    """By stage. What rests on the rank in no unit, as frozen weights do where they are whole, is counted to its first
    one."""
    buffer, built = model.buffer, model.stage_units()
    optimizer = {
        unit.name: states.optimizer
        * sum(trained(one.main_weights).numel() for one in buffer.buckets_of_unit(unit.name) if one.trained)
        for unit in model.units
    }
    rest = {unit.name: sum(share.at_rest for share in unit.shares) for one in built for unit in one.units}
    held = {name: size for name, size in buffer.persistent_bytes().items() if name != "extra_grads"}
    if model.units:
        optimizer[model.units[0].name] += sum(held.values()) - sum(rest.values())
    found: dict[int, tuple[StageUnits, Roots]] = {}
    for number, (chunk, stage) in enumerate(zip(chunks, built, strict=True)):
        paths = {id(module): path for path, module in chunk.module.named_modules()}
        units = tuple(
            dataclasses.replace(unit, f=0.0, b=0.0, w=0.0, optimizer_bytes=optimizer[unit.name])
            for unit in stage.units
        )
        roots = tuple(
            _paths_of(model.units[model.unit_number(number, place)], paths) for place in range(len(units))
        )
        found[chunk.stage] = dataclasses.replace(stage, units=units), roots
    return found


def _paths_of(unit: Unit, paths: Mapping[int, str]) -> tuple[str, ...]:
    """Of a unit's modules in a chunk; of one that is another chunk's, as a tied matrix is, of what owns its weights."""
    own = tuple(paths[id(module)] for module in unit.modules if id(module) in paths)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in unit.names)
    return own or tuple(path for path in owners if path in paths.values())
