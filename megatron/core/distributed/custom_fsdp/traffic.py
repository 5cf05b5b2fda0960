"""What a step moves and holds under each sharding strategy, to the byte (floor 0, pure).

A call moves all buckets of a unit at once, however many; its payload is these buckets whole, padding included, and a
ring moves (ways - 1) / ways of it. Recomputing a unit in its backward moves nothing more: one gather serves both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

from megatron.core.distributed.custom_fsdp.reshard_plan import Keep, UnitPolicy
from megatron.core.distributed.custom_fsdp.run_order import RunOrder
from megatron.core.distributed.sharding import Cut, Sharding, ShardPlace
from megatron.core.distributed.traffic import Traffic, moved
from megatron.core.traffic_counter import Moved


@dataclasses.dataclass(frozen=True)
class UnitSize:
    """A unit's full buckets, with padding.

    weight_bytes: all weights; frozen_bytes: those of them that are not trained; wire_bytes: gradients as they travel;
    numel: elements gathered; backward_reads: its backward needs the weights; buckets: how many it has.
    """

    name: str
    weight_bytes: int
    wire_bytes: int
    numel: int
    backward_reads: bool = True
    buckets: int = 1
    frozen_bytes: int = 0

    def __post_init__(self) -> None:
        assert min(self.weight_bytes, self.wire_bytes, self.numel, self.buckets) >= 0, self
        assert 0 <= self.frozen_bytes <= self.weight_bytes, self


def predict_step(
    units: Sequence[UnitSize],
    sharding: Sharding,
    *,
    inner_size: int,
    outer_size: int = 1,
    num_microbatches: int,
    policies: Sequence[UnitPolicy] | None = None,
    kept_to_last_use: Collection[int] = frozenset(),
    forward_order: Sequence[int] | None = None,
    outer_grad_bytes: Sequence[int] = (),
    outer_weight_bytes: Sequence[int] = (),
) -> Traffic:
    """What the collectives of one step move on a rank, for num_microbatches forwards and backwards of each unit.

    units: in the order of the forward; forward_order: their uses in it, where some are used more than once.
    kept_to_last_use: units gathered once a microbatch whatever the policy (tied ones). outer_grad_bytes: by dtype, the
    inner shards of all main gradients, summed over the outer ranks once a step; outer_weight_bytes: by dtype, the
    inner shards of all trained weights, gathered from the outer ranks where these cut the optimizer.
    """
    assert num_microbatches >= 1, num_microbatches
    policies = policies if policies is not None else (UnitPolicy(),) * len(units)
    assert len(policies) == len(units), (len(policies), len(units))
    traffic = _outer(sharding, outer_size, outer_grad_bytes, outer_weight_bytes)
    if inner_size == 1:
        return traffic
    wire = [unit.wire_bytes for unit in units]
    if sharding.optimizer is Cut.WHOLE:
        assert outer_size == 1, f"nothing is cut: one instance, not {outer_size}"
        return traffic + Traffic(all_reduce=moved(wire))
    reduced = Moved()
    for size, policy in zip(wire, policies, strict=True):
        late = sharding.main_grads is Cut.WHOLE or policy.reduce_late
        reduced += moved([size], 1 if late else num_microbatches)
    if sharding.weights is Cut.WHOLE:
        gathered = moved(unit.weight_bytes - unit.frozen_bytes for unit in units)
        return traffic + Traffic(all_gather=gathered, reduce_scatter=reduced)
    gathered = Moved()
    uses = gathers_of(units, forward_order, kept_to_last_use=kept_to_last_use)
    for unit, a_microbatch, policy in zip(units, uses, policies, strict=True):
        if policy.keep is Keep.STEP:
            gathered += moved([unit.weight_bytes], min(a_microbatch, 1))
        else:
            times = min(a_microbatch, 1) if policy.keep is Keep.TO_BACKWARD else a_microbatch
            gathered += moved([unit.weight_bytes], times * num_microbatches)
    return traffic + Traffic(all_gather=gathered, reduce_scatter=reduced)


def _outer(sharding: Sharding, outer_size: int, grads: Sequence[int], weights: Sequence[int]) -> Traffic:
    """Once a step, a call a dtype: what instances hold alike is summed; what they cut is scattered and gathered."""
    if outer_size == 1:
        return Traffic()
    if sharding.optimizer is Cut.FULL:
        return Traffic(outer_reduce_scatter=moved(grads), outer_all_gather=moved(weights))
    return Traffic(outer_all_reduce=moved(grads))


def persistent_bytes(
    numel: int,
    sharding: Sharding,
    place: ShardPlace,
    *,
    weight_itemsize: int,
    main_itemsize: int,
    grad_itemsize: int,
    moment_itemsize: int = 4,
    num_moments: int = 2,
    frozen_numel: int = 0,
) -> dict[str, int]:
    """Bytes on a rank between steps, by category: weights, main_weights, main_grads, moments.

    numel: elements of all trained buckets, padding included; frozen_numel: of the others, which have weights only.
    main_itemsize: 0 where the optimizer updates the model's weights themselves.
    """
    for elements in (numel, frozen_numel):
        assert elements % place.dp_size == 0, f"{elements} elements are not padded for {place.dp_size} ranks"
    optimizer = numel // place.ways(sharding.optimizer)
    return {
        "weights": (numel + frozen_numel) // place.ways(sharding.weights) * weight_itemsize,
        "main_weights": optimizer * main_itemsize,
        "main_grads": numel // place.ways(sharding.main_grads) * grad_itemsize,
        "moments": optimizer * moment_itemsize * num_moments,
    }


def default_bound(units: Sequence[UnitSize]) -> int:
    """Elements gathered at any time where --suggested-communication-unit-size is left out: 2 x the mean unit."""
    return math.ceil(2 * sum(unit.numel for unit in units) / max(1, len(units)))


def demand_order(units: Sequence[UnitSize], forward_order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The units needed in a microbatch: a forward and its reverse, without those whose backward reads no weights."""
    forward = tuple(range(len(units)) if forward_order is None else forward_order)
    return forward + tuple(unit for unit in reversed(forward) if units[unit].backward_reads)


def gathers_of(
    units: Sequence[UnitSize],
    forward_order: Sequence[int] | None = None,
    *,
    kept_to_last_use: Collection[int] = frozenset(),
) -> tuple[int, ...]:
    """How often each unit is gathered in a microbatch that keeps nothing: 2, but 1 for the last of the forward (it is
    the first of the backward), where backward reads no weights, and for units kept from first to last use."""
    demands = Counter(unit for unit, _ in itertools.groupby(demand_order(units, forward_order)))
    return tuple(
        min(demands[unit], 1) if unit in kept_to_last_use else demands[unit] for unit in range(len(units))
    )


def peak_gathered(
    units: Sequence[UnitSize],
    order: Sequence[int],
    bound: int | None = None,
    *,
    kept_to_last_use: Collection[int] = frozenset(),
    policies: Sequence[UnitPolicy] | None = None,
) -> int:
    """The most elements gathered at once while microbatches demand units in this order (demand_order).

    bound: what may be gathered when a unit is gathered ahead, all included (default_bound where None). Without kept
    units the answer is at most the bound, or the largest unit where that is larger.
    """
    return run_gathers(units, order, bound, kept_to_last_use=kept_to_last_use, policies=policies)[0]


def run_gathers(
    units: Sequence[UnitSize],
    order: Sequence[int],
    bound: int | None = None,
    *,
    kept_to_last_use: Collection[int] = frozenset(),
    policies: Sequence[UnitPolicy] | None = None,
    num_microbatches: int = 3,
) -> tuple[int, int]:
    """The most elements gathered at once in a step, and its gathers, by running the rule.

    The rule: a unit is gathered when it is needed; then those needed next, in order, as long as all that is gathered
    stays within the bound. It is freed after a use, unless the next use is its own or it is kept for a later one. The
    first microbatch gathers nothing ahead: it is recorded.
    """
    bound = default_bound(units) if bound is None else bound
    run = RunOrder()
    gathered: set[int] = set()
    held = peak = gathers = 0
    for microbatch in range(num_microbatches):
        is_last = microbatch + 1 == num_microbatches
        run.begin(repeats=not is_last)
        for place, unit in enumerate(order):
            run.need(unit)
            for wanted in (unit, *run.upcoming()):
                if wanted in gathered:
                    continue
                if wanted != unit and held + units[wanted].numel > bound:
                    break
                gathered.add(wanted)
                gathers += 1
                held += units[wanted].numel
            peak = max(peak, held)
            keep = policies[unit].keep if policies else Keep.NOTHING
            waits = unit in kept_to_last_use or keep is not Keep.NOTHING
            later = order[place + 1 :]
            stays = (waits and unit in later) or unit in later[:1] or (keep is Keep.STEP and not is_last)
            if not stays:
                gathered.remove(unit)
                held -= units[unit].numel
    assert not gathered, f"units {sorted(gathered)} are still gathered after the step"
    return peak, gathers
