"""Units of made-up stages for plans, and residencies to ask of them."""

from megatron.core.pipeline_parallel.plan.held.units import StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.residency import Residency

W_BYTES, G_BYTES = 10, 20  # of a layer


def unit(name, size=1, **changes):
    """A layer of `size` times the bytes and times of the smallest."""
    words = {
        "f": size,
        "b": size,
        "w": size,
        "weight_bytes": size * W_BYTES,
        "grad_bytes": size * G_BYTES,
        "shard_bytes": size * 3,
        "outer_grad_bytes": size * 5,
        "outer_weight_bytes": size * 2,
    }
    return UnitCosts(name, **(words | changes))


def layers(stage, count):
    """A stage of equal layers."""
    accesses = tuple((place,) for place in range(count))
    return StageUnits(tuple(unit(f"{stage}.{place}") for place in range(count)), accesses, accesses[::-1])


def model(placement, count, *, tied=False, group=1, ends=3):
    """All stages of a model: `count` layers each, an embedding of `ends` layers before them and a head of as
    many behind.

    tied: the head's matrix is the embedding's, where both ends are on one rank. group: layers recomputed
    together.
    """
    last = placement.num_stages - 1
    together = tied and placement.rank_of(0) == placement.rank_of(last)
    stages = []
    for stage in range(last + 1):
        units = [unit(f"{stage}.{place}") for place in range(count)]
        forward = [(place,) for place in range(count)]
        backward = [tuple(range(start, min(start + group, count))) for start in range(0, count, group)][::-1]
        if stage == last:
            forward.append((len(units), *((len(units) + 1,) if together and last else ())))
            backward.insert(0, forward[-1])
            units.append(unit("head", ends))
            if together and last:
                units.append(unit("embedding", ends, f=0, b=0, w=0))
        if stage == 0:
            forward.insert(0, (len(units),))
            backward.append((len(units),))
            units.append(unit("embedding", ends, backward_reads=False, extra_grad_bytes=7 * tied))
        stages.append(StageUnits(tuple(units), tuple(forward), tuple(backward)))
    return tuple(stages)


def asked(strategy, policy, num_ranks, budget=6 * W_BYTES, **words):
    """4 ranks share the states."""
    limits = {"budget": (budget,) * num_ranks} if policy == "budget" else {}
    return Residency(strategy, **({"ways": 4, "policy": policy} | limits | words))
