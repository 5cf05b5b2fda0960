"""What a stage is made of for data parallelism: units, which are gathered and reduced together, and their order.

[Note: accesses] A computation goes through its stage's units access by access. An access names the units that are
needed together from one moment on: mostly one unit; layers that are recomputed together are one access of their
backward. It begins when the first module of one of its units runs, when the first gradient of one arrives, or, in W,
with the first weight gradient of one. A unit is in use from the beginning of each access that names it to the beginning
of the next one that does not, or to the computation's end. A W of some units only, `0W7[2:4]`, has the accesses that
name one of these.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.plan.ir import BW, READS_WEIGHTS, WRITES_GRADS, B, F, PlanError, RawOp, W
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, PlannedResidency, Residency, of_several
from megatron.core.sharding_table import RankGroup

Access = tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What a unit has to do with one group of ranks, in bytes.

    gathered: its whole weights as a gather makes them, padding included; over instances, the parts that these gather
    where they cut the optimizer. reduced: its whole gradients as a reduction takes them, or as instances sum them. 0:
    nothing to gather, or to reduce. at_rest: what this rank holds of its weights, gradients and main weights between
    steps. calls: collectives that a reduction, or a sum over instances, is made of.
    """

    group: RankGroup
    gathered: int = 0
    reduced: int = 0
    at_rest: int = 0
    calls: int = 1


@dataclass(frozen=True)
class UnitCosts:
    """One unit of one stage: what one microbatch costs on one rank, and what its weights and gradients take.

    name: unique on a rank; units of two stages of a rank that have one name are one unit (a tied embedding). f, b, w:
    times in the cost model's unit. activation, held_after_b: as in `CostModel`. shares: by group of ranks. Where
    weights are sharded the gathered ones are held while they are in use; where gradients are, whole ones from the first
    contribution to the end of their reduction. extra_grad_bytes: accumulators of further uses that this stage's
    contributions need (a tied matrix's lookup), held from the unit's last access of a computation to the end of its
    REDUCE. optimizer_bytes: moments, and copies to take a step back by. backward_reads: whether B and BW read its
    weights. begins_with_lookup: not in the last of its several accesses there, that of a lookup. slot: of a double
    buffer, which its gathered weights take in turns with other units'.
    """

    name: str
    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    activation: float = 0.0
    held_after_b: float = 0.0
    shares: tuple[Share, ...] = ()
    extra_grad_bytes: int = 0
    optimizer_bytes: int = 0
    backward_reads: bool = True
    begins_with_lookup: bool = False
    slot: int | None = None

    @functools.cached_property
    def cut(self) -> tuple[Share, ...]:
        """With groups of several ranks that cut its states: what UNSHARD gathers and REDUCE sums."""
        return tuple(one for one in self.shares if one.group.size > 1 and not one.group.instances)

    @functools.cached_property
    def repeated(self) -> tuple[Share, ...]:
        """With several instances: what HSDP_ALL_REDUCE sums."""
        return tuple(one for one in self.shares if one.group.size > 1 and one.group.instances)

    @property
    def weight_bytes(self) -> int:
        """What its gathered weights take."""
        return sum(share.gathered for share in self.cut)

    @property
    def grad_bytes(self) -> int:
        """What its whole gradients take where they are cut."""
        return sum(share.reduced for share in self.cut)

    @property
    def reduced_bytes(self) -> int:
        """Of gradients that ranks sum up, whoever they are; 0 where it is frozen."""
        return self.grad_bytes or sum(share.reduced for share in self.repeated)

    @property
    def bytes_at_rest(self) -> int:
        return sum(share.at_rest for share in self.shares) + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Use:
    """One access of a computation. units: that it names. reads: whose weights it needs. begins: to whose gradients the
    computation contributes from here on. completes: those to which it has contributed when the access ends. share: of
    the computation's time."""

    units: Access
    reads: Access
    begins: Access
    completes: Access
    share: float


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
        return cls(tuple(map(_unit_of_dict, content["units"])), forward, backward)

    def uses(self, op: RawOp) -> tuple[Use, ...]:
        """What each access of a computation needs, in order; of a W with a range of units each of its own accesses. At
        least one, of nothing where the stage has no units.

        The stage's time is divided by its units' times, each divided evenly over its accesses. Of a W with a range of
        units the shares sum up to its part of the whole W.
        """
        kind, accesses = op[0], self.forward if op[0] == F else self.backward
        if kind != F and op[4] >= 0:
            kept = (tuple(unit for unit in access if op[4] <= unit < op[5]) for access in accesses)
            accesses = tuple(access for access in kept if access)
        last = {unit: at for at, access in enumerate(accesses) for unit in access}
        first = {unit: at for at, access in reversed([*enumerate(accesses)]) for unit in access}
        count = Counter(itertools.chain(*accesses))
        times = [{F: one.f, B: one.b, W: one.w, BW: one.b + one.w}[kind] for one in self.units]
        if not any(times):
            times = [1.0] * len(times)
        whole, adds = sum(times), WRITES_GRADS[kind]

        def is_read(at: int, unit: int) -> bool:
            its = self.units[unit]
            looks_up = its.begins_with_lookup and first[unit] < at == last[unit]
            return kind == F or (READS_WEIGHTS[kind] and its.backward_reads and not looks_up)

        uses = [
            Use(
                access,
                tuple(unit for unit in access if is_read(at, unit)),
                tuple(unit for unit in access if adds and first[unit] == at),
                tuple(unit for unit in access if adds and last[unit] == at),
                sum(times[unit] / count[unit] for unit in access) / whole,
            )
            for at, access in enumerate(accesses)
        ]
        return tuple(uses) or (Use((), (), (), (), 1.0),)


def groups_of(stages: Iterable[StageUnits]) -> tuple[RankGroup, ...]:
    """The groups of ranks that have to do with any unit."""
    every = (share.group for stage in stages for unit in stage.units for share in unit.shares)
    return tuple(dict.fromkeys(every))


def are_shared(stages: Iterable[StageUnits]) -> bool:
    """Whether ranks share anything; without, a plan has no operations of data parallelism."""
    return any(group.size > 1 for group in groups_of(stages))


def residency_note(asked: Residency, stages: Sequence[StageUnits], grouping: Grouping) -> PlannedResidency:
    """What a plan was made for, as it says it."""
    names = tuple(tuple(unit.name for unit in stage.units) for stage in stages)
    cuts = any(share.gathered for stage in stages for unit in stage.units for share in unit.repeated)
    return PlannedResidency(
        asked.strategy, of_several(groups_of(stages)), cuts, asked.policy, names, grouping
    )


def _unit_of_dict(content: Mapping[str, Any]) -> UnitCosts:
    shares = (Share(**{**share, "group": RankGroup(**share["group"])}) for share in content["shares"])
    return UnitCosts(**{**content, "shares": tuple(shares)})


def differing(planned: StageUnits, built: StageUnits) -> str | None:
    """The first unit in which a stage that was built differs from what its plan was made from, with the figures of both
    sides; None where they are alike. What only a plan knows, times and the optimizer's states, is not compared."""
    nothing: dict[str, object] = {}
    for mine, theirs in itertools.zip_longest(_built_facts(planned), _built_facts(built), fillvalue=nothing):
        for what in (what for what in mine | theirs if mine.get(what) != theirs.get(what)):
            unit = mine.get("name", theirs.get("name"))
            return f"unit {unit}: {what} is {mine.get(what)} by the plan, {theirs.get(what)} in the model"
    return None


def _built_facts(stage: StageUnits) -> Iterator[dict[str, object]]:
    """By unit."""
    for place, unit in enumerate(stage.units):
        names = ("name", "extra_grad_bytes", "backward_reads", "begins_with_lookup")
        facts: dict[str, object] = {name: getattr(unit, name) for name in names}
        for what, row in (("forward", stage.forward), ("backward", stage.backward)):
            facts[f"its place in the {what}"] = [at for at, access in enumerate(row) if place in access]
        for share in unit.shares:
            over = f"over {share.group.size} ranks of {share.group.name}"
            sizes = ("gathered", "reduced", "at_rest", "calls")
            facts |= {f"{name} {over}": getattr(share, name) for name in sizes}
        yield facts


class RankUnits:
    """The units of one pipeline rank, numbered: those of one name are one.

    stages: of the whole pipeline. of: stage -> number of each of its units. units: by number, as the first stage has
    each. weight_bytes, grad_bytes: by number, what whole ones take. extra_bytes: of (number, stage), where it is more
    than none. bytes_at_rest: of all.
    """

    def __init__(self, rank: int, placement: Placement, stages: Sequence[StageUnits]) -> None:
        if len(stages) != placement.num_stages:
            raise PlanError(f"units of {len(stages)} stages, the plan has {placement.num_stages}")
        self.rank, self.stages = rank, stages
        self.of: dict[int, tuple[int, ...]] = {}
        self.units: list[UnitCosts] = []
        self.extra_bytes: dict[tuple[int, int], int] = {}
        self._uses: dict[tuple[int, int, int, int], tuple[Use, ...]] = {}
        numbers: dict[str, int] = {}
        for stage in placement.stages_of(rank):
            units = stages[stage].units
            self.of[stage] = mine = tuple(numbers.setdefault(unit.name, len(numbers)) for unit in units)
            assert len(set(mine)) == len(mine), f"stage {stage} has two units of one name"
            for unit, number in zip(units, mine, strict=True):
                self.units += [unit] * (number == len(self.units))
                before = self.units[number].shares
                assert before == unit.shares, f"unit {unit.name} has {before}, in stage {stage} {unit.shares}"
                if unit.grad_bytes and unit.extra_grad_bytes:
                    self.extra_bytes[number, stage] = unit.extra_grad_bytes
        self.weight_bytes = [unit.weight_bytes for unit in self.units]
        self.grad_bytes = [unit.grad_bytes for unit in self.units]
        self.bytes_at_rest = sum(unit.bytes_at_rest for unit in self.units)

    def __len__(self) -> int:
        return len(self.units)

    def uses(self, op: RawOp) -> tuple[Use, ...]:
        """Those of a computation (`StageUnits.uses`), by number: reads of what is gathered, contributions to what is
        summed up."""
        key = (op[0], op[1], op[4], op[5])
        found = self._uses.get(key)
        if found is None:
            stage, numbers = self.stages[op[1]], self.of[op[1]]
            gathered = {place: numbers[place] for place, unit in enumerate(stage.units) if unit.weight_bytes}
            summed = {place: numbers[place] for place, unit in enumerate(stage.units) if unit.reduced_bytes}

            def numbered(units: Access, known: Mapping[int, int]) -> Access:
                return tuple(known[unit] for unit in units if unit in known)

            found = self._uses[key] = tuple(
                Use(
                    tuple(numbers[unit] for unit in use.units),
                    numbered(use.reads, gathered),
                    numbered(use.begins, summed),
                    numbered(use.completes, summed),
                    use.share,
                )
                for use in stage.uses(op)
            )
        return found


@functools.lru_cache(maxsize=64)
def rank_units(placement: Placement, stages: tuple[StageUnits, ...]) -> tuple[RankUnits, ...]:
    """Of all pipeline ranks. Raises PlanError for units of other stages than the placement's."""
    return tuple(RankUnits(rank, placement, stages) for rank in range(placement.num_ranks))
