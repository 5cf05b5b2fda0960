"""The units of a rank's chunks as a plan knows them: which are needed together, in which order, and how large they are.

A model of ours declares its units and the order of their accesses (`MegatronModule`). Of other models
--fsdp-unit-modules names units, which run in the order in which they are registered; all else of a chunk is always in
use, in units of its own, in one without the flag.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from megatron.core import unit_accesses
from megatron.core.distributed.custom_fsdp.bucket_memory import ArenaGroups, BucketMemory, num_bytes
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.shard_layout import bucket_size_of
from megatron.core.module import MegatronModule, ModelChunks, ModelUnit
from megatron.core.pipeline_parallel.plan.held.units import Access, Share, StageUnits, UnitCosts
from megatron.core.sharding_table import Sharding, ShardOver
from megatron.core.unit_accesses import Accesses, Row, distinct
from megatron.core.units import Unit, UnitModule, derive_units, find_units, matched_units, whole_unit


@dataclasses.dataclass(frozen=True)
class EngineUnits:
    """units: of all chunks, each once, in the order of the forward. chunks: what each chunk needs of them."""

    units: tuple[Unit, ...]
    chunks: tuple[Accesses[int], ...]

    @property
    def backward_order(self) -> tuple[int, ...]:
        """In which order backwards leave them for the last time: the last chunk first."""
        passed = [unit for chunk in reversed(self.chunks) for unit in chunk.completed]
        return distinct(reversed(passed))[::-1]

    @property
    def lasting(self) -> frozenset[int]:
        """Those that are in use several times in a computation, or together with others: they cannot take turns."""
        rows = [row for chunk in self.chunks for row in (chunk.forward, chunk.backward)]
        several = {unit for row in rows for unit, n in Counter(itertools.chain(*row)).items() if n > 1}
        together = {unit for row in rows for access in row if len(access) > 1 for unit in access}
        return frozenset(several | together)

    def stages(self, costs: Sequence[UnitCosts]) -> tuple[StageUnits, ...]:
        """For a plan, by chunk. costs: of each unit. Whether the backward reads its weights, and what its further uses
        take, is said of the first chunk that has it; others have it for a use of their own in the backward."""
        held: set[int] = set()
        stages = []
        for chunk in self.chunks:
            numbers = chunk.units
            again = {
                number: dataclasses.replace(costs[number], backward_reads=True, extra_grad_bytes=0)
                for number in held.intersection(numbers)
            }
            rows = chunk.renamed({number: place for place, number in enumerate(numbers)})
            units = tuple(again.get(number, costs[number]) for number in numbers)
            stages.append(StageUnits(units, rows.forward, rows.backward))
            held.update(numbers)
        return tuple(stages)

    def merged(self, numel: Sequence[int], limit: int) -> EngineUnits:
        """With units of at least `limit` elements, as `merged_groups` has them. numel: of each unit."""
        groups = unit_accesses.merged_groups(self.chunks, numel, limit)
        units = []
        for index, group in enumerate(groups):
            members = [self.units[number] for number in group]
            units.append(
                dataclasses.replace(
                    members[0],
                    index=index,
                    name=unit_accesses.merged_name([one.name for one in members]),
                    modules=tuple(module for one in members for module in one.modules),
                    entered_by=tuple(module for one in members for module in one.entered_by),
                    names=tuple(name for one in members for name in one.names),
                    backward_reads=any(one.backward_reads for one in members),
                    begins_with_lookup=all(one.begins_with_lookup for one in members),
                )
            )
        return EngineUnits(tuple(units), tuple(chunk.merged(groups) for chunk in self.chunks))


def unit_costs(unit: Unit, buffer: FlatBuffer, slot: int | None = None) -> UnitCosts:
    """Its bytes in a buffer, padding included, without the optimizer's. slot: of a double buffer. Where nothing
    says what takes how long, times are in proportion to bytes of gradients: only shares of a stage's time are
    read."""
    every, extra = buffer.buckets_of_unit(unit.name), buffer.extra_grads
    keys = [key for name in unit.names for key in buffer.param_meta[name].grad_keys if key in extra]
    shares = tuple(share for one in buffer.by_groups(every) for share in _shares(*one, buffer))
    work = float(sum(share.reduced for share in shares if not share.group.instances))
    return UnitCosts(
        unit.name,
        *(work, work, work),
        shares=shares,
        extra_grad_bytes=num_bytes(extra[key] for key in keys),
        backward_reads=unit.backward_reads,
        begins_with_lookup=unit.begins_with_lookup,
        slot=slot,
    )


def _shares(groups: ArenaGroups, buckets: Sequence[BucketMemory], buffer: FlatBuffer) -> tuple[Share, Share]:
    """Of buckets about which these ranks communicate: with those that cut them, and with their instances."""
    trained, sharding = [one for one in buckets if one.trained], buffer.arenas[buckets[0].arena].sharding
    rest = [one.weights for one in buckets if not one.gathers_from_main] + [one.main_grads for one in trained]
    rest += [one.main_weights for one in trained if one.main_weights is not one.optimizer_weights]
    inner, outer = groups.rank_groups
    scattered = sharding.optimizer is ShardOver.FULL and outer.size > 1
    # As `GradReducePipeline` has it: what is whole and shared is summed later, and all-reduces take a bucket each.
    shared = {buffer.arenas[one.arena].layout.shared for one in trained}
    later = sharding.main_grads is ShardOver.NONE and len(shared) == 2
    return (
        Share(
            inner,
            gathered=num_bytes(bucket.full_weights for bucket in buckets),
            reduced=num_bytes(bucket.full_grads for bucket in trained),
            at_rest=num_bytes(rest),
            calls=len(trained) if sharding.optimizer is ShardOver.NONE else 1 + later,
        ),
        Share(
            outer,
            gathered=num_bytes(bucket.weights for bucket in trained) if scattered else 0,
            reduced=num_bytes(one.main_grads if scattered else one.optimizer_grads for one in trained),
            calls=1 + later if scattered else len(trained),
        ),
    )


def find_engine_units(
    chunks: ModelChunks,
    declared: Sequence[ModelUnit] | None,
    config: DistributedDataParallelConfig,
    sharding: Sharding,
    dp_size: int,
) -> EngineUnits:
    """The units of an engine: those of the rank; where gradients are unsharded merged ones. declared: see
    `find_units_of`.

    Raises ModelError as that does, ValueError for sizes that make no bucket.
    """
    trained = {name: p.numel() for name, p in chunks.parameters.items() if p.requires_grad}
    without = chunks.parameters.keys() - trained if sharding.weights is ShardOver.NONE else ()
    found = find_units_of(chunks, declared, config.fsdp_unit_modules or (), without=without)
    if sharding.main_grads is not ShardOver.NONE:
        return found
    numel = [sum(trained.get(name, 0) for name in unit.names) for unit in found.units]
    limit = bucket_size_of(sum(numel), dp_size, config.ddp_bucket_size, config.ddp_num_buckets)
    return found.merged(numel, limit)


def find_units_of(
    chunks: ModelChunks,
    declared: Sequence[ModelUnit] | None,
    unit_modules: Sequence[UnitModule],
    *,
    without: Collection[str] = (),
) -> EngineUnits:
    """The units of a rank. declared: of all chunks; None: what each says itself, by `unit_modules` where that is
    nothing. without: parameters that are neither gathered nor reduced.

    Raises ModelError where a word matches nothing, or where a parameter of a chunk is in two units.
    """
    inside = [{id(one) for one in module.modules()} for module in chunks.modules]
    silent: set[int] = set()
    if declared is None:
        declared, silent = _declared(chunks, inside, unit_modules)
    units = find_units(chunks.modules, chunks.parameters, declared, None)
    number_of = {id(module): unit.index for unit in units for module in unit.modules}
    heard = {one: number for one, number in number_of.items() if one not in silent}
    owner = {name: unit.index for unit in units for name in unit.names}
    # By declared name, those that have parameters: of one name a chunk's own goes first, then the first declared.
    called = [(unit.name, id(unit.modules[0])) for unit in declared if id(unit.modules[0]) in number_of]
    everywhere = {name: number_of[one] for name, one in reversed(called)}
    found = []
    for module, names, within in zip(chunks.modules, chunks.names_of, inside, strict=True):
        own = {name: number_of[one] for name, one in called if one in within}
        told = module.unit_accesses() if isinstance(module, MegatronModule) and own else None
        if told is None:
            forward = _as_registered(module, heard, {*own.values(), *(owner[name] for name in names)})
            found.append(Accesses(forward, forward[::-1]))
        else:
            found.append(told.renamed(everywhere | own))
    kept = [unit for unit in units if not without or not set(unit.names) <= set(without)]
    numbers = {unit.index: number for number, unit in enumerate(kept)}
    return EngineUnits(
        tuple(dataclasses.replace(unit, index=numbers[unit.index]) for unit in kept),
        tuple(chunk.renamed(numbers) for chunk in found),
    )


def _declared(
    chunks: ModelChunks, inside: Sequence[Collection[int]], unit_modules: Sequence[UnitModule]
) -> tuple[list[ModelUnit], set[int]]:
    """What chunks say themselves, and units for those that say nothing, chunk by chunk.

    Of these chunks also the ids of the modules that `unit_modules` does not name: nobody knows whether their forwards
    are called, or others read their parameters, so their units are always in use.
    """
    own = [module.units() if isinstance(module, MegatronModule) else None for module in chunks.modules]
    plain = [module for module, units in zip(chunks.modules, own, strict=True) if units is None]
    derived = (
        derive_units(plain, unit_modules) if plain and unit_modules else [whole_unit(one) for one in plain]
    )
    found: list[ModelUnit] = []
    for within, units in zip(inside, own, strict=True):
        found += units if units is not None else [one for one in derived if id(one.modules[0]) in within]
    named = {id(one) for chunk in plain for group in matched_units(chunk, unit_modules) for one in group}
    return found, {id(one) for chunk in plain for one in chunk.modules()} - named


def _as_registered(module: nn.Module, number_of: Mapping[int, int], needed: set[int]) -> Row[int]:
    """Accesses in the order in which modules are registered; what lies around a unit is in use with it. needed: all
    units of the chunk; those that no module tells of are in use from its beginning to its end."""
    found: list[Access] = []

    def visit(one: nn.Module, around: Access) -> None:
        number = number_of.get(id(one))
        if number is not None:
            around = distinct((*around, number))
            found.append(around)
        for child in one.children():
            visit(child, around)

    visit(module, ())
    silent = tuple(sorted(needed.difference(*found)))
    return tuple((*silent, *access) for access in found) or ((silent,) if silent else ())
