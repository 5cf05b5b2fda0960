"""Units of made-up stages for plans, and residencies to ask of them."""

import dataclasses

from megatron.core.pipeline_parallel.plan.held.units import Share, StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.sharding_table import ShardPlace

W_BYTES, G_BYTES = 10, 20  # of a layer


def shares(weight_bytes, grad_bytes, at_rest=0, *, ways=4, instances=(0, 0), outer=1):
    """Over so many ranks that cut states, and so many instances. instances: bytes that these sum, and gather."""
    inner, repeats = ShardPlace(inner_size=ways, outer_size=outer).groups
    summed, gathered = instances
    return Share(inner, weight_bytes, grad_bytes, at_rest), Share(repeats, gathered, summed)


def unit(name, size=1, *, ways=4, outer=1, outer_optimizer=False, **changes):
    """A layer of `size` times the bytes and times of the smallest; 4 ranks share its states."""
    instances = 5 * size, 2 * size * outer_optimizer
    sizes = size * W_BYTES, size * G_BYTES, size * 3
    of_groups = shares(*sizes, ways=ways, outer=outer, instances=instances)
    return UnitCosts(name, **({"f": size, "b": size, "w": size, "shares": of_groups} | changes))


def whole_at_rest(stages):
    """The same where a rank holds all weights and gradients between steps."""

    def rest(one):
        return dataclasses.replace(one, at_rest=one.gathered + one.reduced)

    def of(one):
        return dataclasses.replace(one, shares=(rest(one.shares[0]), *one.shares[1:]))

    return tuple(dataclasses.replace(stage, units=tuple(map(of, stage.units))) for stage in stages)


def layers(stage, count, **ranks):
    """A stage of equal layers."""
    accesses = tuple((place,) for place in range(count))
    units = tuple(unit(f"{stage}.{place}", **ranks) for place in range(count))
    return StageUnits(units, accesses, accesses[::-1])


def model(placement, count, *, tied=False, group=1, ends=3, **ranks):
    """All stages of a model: `count` layers each, an embedding of `ends` layers before them and a head of as
    many behind.

    tied: the head's matrix is the embedding's, where both ends are on one rank. group: layers recomputed
    together. ranks: that share its states.
    """
    last = placement.num_stages - 1
    together = tied and placement.rank_of(0) == placement.rank_of(last)
    stages = []
    for stage in range(last + 1):
        units = [unit(f"{stage}.{place}", **ranks) for place in range(count)]
        forward = [(place,) for place in range(count)]
        backward = [tuple(range(start, min(start + group, count))) for start in range(0, count, group)][::-1]
        if stage == last:
            forward.append((len(units), *((len(units) + 1,) if together and last else ())))
            backward.insert(0, forward[-1])
            units.append(unit("head", ends, **ranks))
            if together and last:
                units.append(unit("embedding", ends, f=0, b=0, w=0, **ranks))
        if stage == 0:
            forward.insert(0, (len(units),))
            backward.append((len(units),))
            units.append(unit("embedding", ends, backward_reads=False, extra_grad_bytes=7 * tied, **ranks))
        stages.append(StageUnits(tuple(units), tuple(forward), tuple(backward)))
    return tuple(stages)


def asked(strategy, policy, num_ranks, budget=6 * W_BYTES, **words):
    """The same on all ranks."""
    limits = {"budget": (budget,) * num_ranks} if policy == "budget" else {}
    return Residency(strategy, **({"policy": policy} | limits | words))
