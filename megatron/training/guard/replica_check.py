"""`--check-weight-hash-across-dp-replicas-interval`: ranks that should hold the same weights do, bit for bit.

Which ranks these are: the data parallel ranks of one place in the model; where weights are sharded, those that hold the
same shard, one an instance of the optimizer. A step's sums hide such a difference: all replicas then get the gradients
of several models, and the run goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.sharding import Cut
from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.engine import Engine


class ReplicaMismatchError(ArithmeticError):
    """Replicas of the model hold different weights."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """ranks: the fewer ones, in global numbers; others: those they are compared with. what: the first parameter (shard
    of a unit) that differs."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)} and {list(self.others)} hold different bits of {self.what}"


def check_replicas(engine: Engine, ps: ParallelState, iteration: int) -> None:
    """Compare the weights as the next forward will use them. Communicates over world, and over data parallel ranks
    where updated weights have not been gathered yet. Raises ReplicaMismatchError, on every rank alike."""
    engine.model.settle_weights()
    digests = {name: digest(tensor) for name, tensor in _weights(engine)}
    mine = [*place_of(engine, ps), hashlib.blake2b("".join(digests.values()).encode()).hexdigest()]
    everyone = host_data.all_gather_json(mine, ps.control_group)
    if all_alike(everyone):
        return
    # Only now what differs: names and digests of every parameter are much to tell.
    difference = first_difference(everyone, host_data.all_gather_json(digests, ps.control_group))
    raise ReplicaMismatchError(
        f"iteration {iteration}: {difference}. These replicas started alike and are updated alike, so a device, its "
        "memory or a link has failed, or code of the user's own writes weights. Start again from the last checkpoint, "
        "on other machines."
    )


def place_of(engine: Engine, ps: ParallelState) -> list[int]:
    """What two ranks have in common that should hold the same weights."""
    buffer = engine.model.buffer
    return [ps.tp_rank, ps.pp_rank, buffer.place.index(buffer.sharding.weights)]


def digest(tensor: Tensor) -> str:
    """Of its bits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # sync: asked for by an interval
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()


def all_alike(everyone: list[list[Any]]) -> bool:
    """everyone: [*place, digest] a rank. Whether ranks of one place have one digest."""
    return len({tuple(told) for told in everyone}) == len({tuple(told[:-1]) for told in everyone})


def first_difference(everyone: list[list[Any]], digests: list[dict[str, str]]) -> Difference:
    """The first place in which ranks differ, and who holds what few others hold (ties: not the lowest rank)."""
    for place in dict.fromkeys(tuple(told[:-1]) for told in everyone):
        ranks = [rank for rank, told in enumerate(everyone) if tuple(told[:-1]) == place]
        for name in digests[ranks[0]]:
            held = [digests[rank][name] for rank in ranks]
            counted = Counter(held)
            if len(counted) > 1:
                most = counted.most_common(1)[0][0]
                return Difference(
                    tuple(rank for rank, one in zip(ranks, held, strict=True) if one != most),
                    tuple(rank for rank, one in zip(ranks, held, strict=True) if one == most),
                    name,
                )
    raise AssertionError("digests of all weights differ, and of none of them")


def _weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Whole weights by parameter; where they are sharded, this rank's part of each bucket by its units."""
    buffer = engine.model.buffer
    if buffer.sharding.weights is Cut.WHOLE:
        for name in (*buffer.names, *buffer.frozen):
            yield name, buffer.weight(name)
        return
    for memory in buffer.buckets:
        yield f"the shard of unit {memory.name}", memory.resting
