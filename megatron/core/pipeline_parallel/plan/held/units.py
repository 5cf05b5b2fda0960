"""What a stage is made of for data parallelism: units, which are gathered and reduced together, and their order.

[Note: accesses] A computation goes through its stage's units access by access. An access names the units that are
needed together from one moment on: mostly one unit; layers that are recomputed together are one access of their
backward. It begins when the first module of one of its units runs, when the first gradient of one arrives, or, in W,
with the first weight gradient of one. A unit is in use from the beginning of each access that names it to the beginning
of the next one that does not, or to the computation's end. A W of some units only, `0W7[2:4]`, has the accesses that
name one of these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.plan.ir import BW, READS_WEIGHTS, WRITES_GRADS, B, F, PlanError, RawOp, W
from megatron.core.pipeline_parallel.plan.placement import Placement

Access = tuple[int, ...]


@dataclass(frozen=True)
class UnitCosts:
    """One unit of one stage: what one microbatch costs on one rank, and what its weights and gradients take.

    name: unique on a rank; units of two stages of a rank that have one name are one unit (a tied embedding). f, b, w:
    times in the cost model's unit. activation, held_after_b: as in `CostModel`. weight_bytes: its whole weights as
    UNSHARD makes them, padding included; 0: nothing to gather. grad_bytes: its whole gradients as REDUCE takes them, 0:
    frozen; where gradients are sharded they are held from the first contribution to the end of that REDUCE.
    extra_grad_bytes: accumulators of further uses that this stage's contributions need (a tied matrix's lookup), held
    from the unit's last access of a computation to the end of its REDUCE. shard_bytes: what this rank holds of all its
    states at rest. outer_grad_bytes, outer_weight_bytes: what is summed over instances, and gathered from them where
    they cut the optimizer. reduce_calls, outer_calls: collectives that a REDUCE, and a sum over instances, is made of.
    backward_reads: whether B and BW read its weights. begins_with_lookup: not in the last of its several accesses
    there, that of a lookup.
    """

    name: str
    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    activation: float = 0.0
    held_after_b: float = 0.0
    weight_bytes: int = 0
    grad_bytes: int = 0
    extra_grad_bytes: int = 0
    shard_bytes: int = 0
    outer_grad_bytes: int = 0
    outer_weight_bytes: int = 0
    reduce_calls: int = 1
    outer_calls: int = 1
    backward_reads: bool = True
    begins_with_lookup: bool = False


@dataclass(frozen=True)
class StateBytes:
    """How large what the engine makes of parameters is.

    align: elements that a bucket is padded to a multiple of (shard_layout: 128 x data parallel ranks). weight, grad:
    bytes of an element as it is gathered, and as it is reduced. at_rest: of all states (bytes of an element, ranks that
    it is cut over). inner: ranks that share the states. outer_grad, outer_weight: bytes of an element of their parts
    that instances sum, and that they gather, 0 where they do not cut the optimizer. bucket_size: elements to which
    neighbours are merged where gradients are whole at rest; None: a bucket a unit.
    """

    align: int
    weight: int
    grad: int
    at_rest: tuple[tuple[int, int], ...] = ()
    inner: int = 1
    outer_grad: int = 0
    outer_weight: int = 0
    bucket_size: int | None = None


@dataclass(frozen=True)
class StageUnits:
    """The units of one stage. forward: its accesses in F, in order; a unit may come twice (an embedding that is the
    output layer too). backward: those of B, BW and W."""

    units: tuple[UnitCosts, ...]
    forward: tuple[Access, ...]
    backward: tuple[Access, ...]

    def __post_init__(self) -> None:
        known = set(range(len(self.units)))
        for accesses in (self.forward, self.backward):
            named = {unit for access in accesses for unit in access}
            assert named == known, f"accesses of units {sorted(named)}, the stage has {len(self.units)}"

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> StageUnits:
        """What `dataclasses.asdict`, by way of JSON, has made of one."""
        forward, backward = (tuple(map(tuple, content[name])) for name in ("forward", "backward"))
        return cls(tuple(UnitCosts(**unit) for unit in content["units"]), forward, backward)

    def accesses(self, op: RawOp) -> tuple[Access, ...]:
        """Those of a computation, in order; of a W with a range of units only its own."""
        if op[0] == F:
            return self.forward
        if op[4] < 0:
            return self.backward
        kept = (tuple(unit for unit in access if op[4] <= unit < op[5]) for access in self.backward)
        return tuple(access for access in kept if access)

    def reads(self, op: RawOp) -> tuple[Access, ...]:
        """By access of a computation, the units whose weights it reads."""
        accesses = self.accesses(op)
        if op[0] == F or not READS_WEIGHTS[op[0]]:
            return accesses if op[0] == F else ((),) * len(accesses)
        first, last = _first_and_last(accesses)

        def is_read(at: int, unit: int) -> bool:
            looks_up = self.units[unit].begins_with_lookup and first[unit] < at == last[unit]
            return self.units[unit].backward_reads and not looks_up

        return tuple(
            tuple(unit for unit in access if is_read(at, unit)) for at, access in enumerate(accesses)
        )

    def shares(self, op: RawOp) -> tuple[float, ...]:
        """How the stage's time for F, B, W or BW is divided over the accesses of a computation: by its units' times,
        each divided evenly over its accesses. Of a W with a range of units they sum up to its part of the whole W."""
        times = [{F: one.f, B: one.b, W: one.w, BW: one.b + one.w}[op[0]] for one in self.units]
        if not any(times):
            times = [1.0] * len(times)
        whole, accesses = sum(times), self.accesses(op)
        count = Counter(unit for access in accesses for unit in access)
        return tuple(sum(times[unit] / count[unit] for unit in access) / whole for access in accesses)


def _first_and_last(accesses: Sequence[Access]) -> tuple[dict[int, int], dict[int, int]]:
    """By unit, its first and its last access."""
    last = {unit: at for at, access in enumerate(accesses) for unit in access}
    first = {unit: at for at, access in reversed([*enumerate(accesses)]) for unit in access}
    return first, last


def with_work_of(stage: StageUnits, other: StageUnits | None) -> StageUnits:
    """The same units with times, activations and states at rest (where it knows them) of another's units of these
    names; where it has others, or there is none, in proportion to their bytes of gradients: only shares of a stage's
    time are read."""
    known = {} if other is None else {unit.name: unit for unit in other.units}
    alike = set(known) == {unit.name for unit in stage.units}
    units = []
    for unit in stage.units:
        work = known.get(unit.name)
        if work is None or not alike:
            size = float(unit.grad_bytes)
            units.append(dataclasses.replace(unit, f=size, b=size, w=size))
            continue
        taken = {name: getattr(work, name) for name in ("f", "b", "w", "activation", "held_after_b")}
        units.append(dataclasses.replace(unit, **taken, shard_bytes=work.shard_bytes or unit.shard_bytes))
    return dataclasses.replace(stage, units=tuple(units))


@dataclass(frozen=True, slots=True)
class Use:
    """One access of a computation, by numbers of the rank's units. reads: weights that it needs. begins: units to whose
    gradients the computation contributes from here on. completes: those to which it has contributed when the access
    ends. share: of the computation's time."""

    reads: tuple[int, ...]
    begins: tuple[int, ...]
    completes: tuple[int, ...]
    share: float


class RankUnits:
    """The units of one pipeline rank, numbered: those of one name are one.

    stages: of the whole pipeline. of: stage -> number of each of its units. home: the first stage and the place in it
    of each. weight_bytes, grad_bytes: by number. extra_bytes: of (number, stage), where it is more than none.
    shard_bytes: of all.
    """

    def __init__(self, rank: int, placement: Placement, stages: Sequence[StageUnits]) -> None:
        if len(stages) != placement.num_stages:
            raise PlanError(f"units of {len(stages)} stages, the plan has {placement.num_stages}")
        self.rank, self.stages = rank, stages
        self.of: dict[int, tuple[int, ...]] = {}
        self.home: list[tuple[int, int]] = []
        self.weight_bytes: list[int] = []
        self.grad_bytes: list[int] = []
        self.extra_bytes: dict[tuple[int, int], int] = {}
        self.shard_bytes = 0
        self._uses: dict[tuple[int, int, int, int], tuple[Use, ...]] = {}
        numbers: dict[str, int] = {}
        for stage in placement.stages_of(rank):
            units = stages[stage].units
            self.of[stage] = mine = tuple(numbers.setdefault(unit.name, len(numbers)) for unit in units)
            assert len(set(mine)) == len(mine), f"stage {stage} has two units of one name"
            for place, (unit, number) in enumerate(zip(units, mine, strict=True)):
                if number == len(self.home):
                    self.home.append((stage, place))
                    self.weight_bytes.append(unit.weight_bytes)
                    self.grad_bytes.append(unit.grad_bytes)
                    self.shard_bytes += unit.shard_bytes
                sizes = (self.weight_bytes[number], self.grad_bytes[number])
                assert sizes == (unit.weight_bytes, unit.grad_bytes), (
                    f"unit {unit.name} has {sizes} bytes in stage {self.home[number][0]}, in stage {stage} "
                    f"{(unit.weight_bytes, unit.grad_bytes)}"
                )
                if unit.grad_bytes and unit.extra_grad_bytes:
                    self.extra_bytes[number, stage] = unit.extra_grad_bytes

    def __len__(self) -> int:
        return len(self.home)

    def unit(self, number: int) -> UnitCosts:
        """As its first stage has it."""
        stage, place = self.home[number]
        return self.stages[stage].units[place]

    def uses(self, op: RawOp) -> tuple[Use, ...]:
        """What each access of a computation needs, in order; at least one, of nothing where the stage has no units."""
        key = (op[0], op[1], op[4], op[5])
        found = self._uses.get(key)
        if found is None:
            found = self._uses[key] = self._compiled(op)
        return found

    def _compiled(self, op: RawOp) -> tuple[Use, ...]:
        stage, numbers = self.stages[op[1]], self.of[op[1]]
        accesses = stage.accesses(op)
        adds = [WRITES_GRADS[op[0]] and bool(unit.grad_bytes) for unit in stage.units]
        first, last = _first_and_last(accesses)
        uses = [
            Use(
                tuple(numbers[unit] for unit in reads if stage.units[unit].weight_bytes),
                tuple(numbers[unit] for unit in access if adds[unit] and first[unit] == at),
                tuple(numbers[unit] for unit in access if adds[unit] and last[unit] == at),
                share,
            )
            for at, (access, reads, share) in enumerate(
                zip(accesses, stage.reads(op), stage.shares(op), strict=True)
            )
        ]
        return tuple(uses) or (Use((), (), (), 1.0),)


@functools.lru_cache(maxsize=64)
def rank_units(placement: Placement, stages: tuple[StageUnits, ...]) -> tuple[RankUnits, ...]:
    """Of all pipeline ranks. Raises PlanError for units of other stages than the placement's."""
    return tuple(RankUnits(rank, placement, stages) for rank in range(placement.num_ranks))
