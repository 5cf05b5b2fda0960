"""What a step has made: whether weights are finite, where it went wrong, whether replicas hold the same bits.

Finite gradients may make weights that are not: 0 / 0 in the update, a learning rate too large, an fp32 weight that fp16
cannot hold. The weights before are gone then, so the run ends, whatever `--nan-policy` says.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.squared_sums import all_finite, nonfinite_place
from megatron.core.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.core.sharding_table import ShardOver
from megatron.core.transport import collectives, host_data
from megatron.core.transport.host_data import host_values
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.engine import Engine
from megatron.training.guard.nan_policy import NonFiniteSite, first_site

ADVICE = (
    "so no --nan-policy can go on from here; the iteration does not count, and nothing of it is saved. Lower --lr, "
    "give --adam-eps more than 0 (or with --fp16 use --bf16, whose range is larger)"
)


class NonFiniteWeightsError(ArithmeticError):
    """What a checkpoint would hold is NaN or infinite. Raised on every rank alike."""


class WeightCheck:
    """Whether the weights that a step has made are finite on all ranks; the answer is on its way while ranks go on. All
    ranks ask alike. Communicates over world."""

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self._buffer, self._ps = optimizer.buffer, optimizer.ps
        self._finite = optimizer.weights_finite().to(device=self._ps.device.torch_device).float()
        self._pending = collectives.all_reduce(self._finite, self._ps.world_group, "min", async_op=True)

    def passed(self, step: str, advice: str = ADVICE) -> None:
        """Return once all ranks have said yes. step: that made the weights. advice: to whom made it. Raises
        NonFiniteWeightsError."""
        self._pending.wait()
        if host_values(self._finite, imagined=1.0):  # sync: whether the step counts
            return
        buffer = self._buffer
        weights = ((name, buffer.main_weight_part(name), buffer.weight(name).dtype) for name in buffer.names)
        told = (
            f"the weight of {place} is {_what_is_wrong(main) or f'larger than {dtype} can hold'}"
            for name, main, dtype in weights
            if (place := _nonfinite_weight(buffer, name, dtype)) is not None
        )
        where = _first_told(next(told, None), self._ps) or "some weight was not finite"
        raise NonFiniteWeightsError(
            f"{step}: {where} after the optimizer's update. The weights before it are overwritten, {advice}, and start "
            "again from the last checkpoint"
        )


def first_nonfinite(pieces: Sequence[LocalPiece], ps: ParallelState | None) -> str | None:
    """Of what is about to be saved, or was loaded, the first tensor that is not finite, what is wrong with it, and on
    which rank: the same on all ranks. Communicates over control."""
    mine = None
    if not all_finite(piece.tensor for piece in pieces):  # sync: before a save, after a load
        mine = next(_told_of(one, wrong) for one in pieces if (wrong := _what_is_wrong(one.tensor)))
    return _first_told(mine, ps)


def _told_of(piece: LocalPiece, wrong: str) -> str:
    """Of a piece that is not finite."""
    if not piece.experts:
        return f"{piece.name} is {wrong}"
    number = next(number for number, of_expert in enumerate(piece.tensor) if not all_finite([of_expert]))
    return f"expert {piece.offset[0] + number} of {piece.name} is {wrong}"


def _nonfinite_weight(buffer: FlatBuffer, name: str, dtype: torch.dtype | None = None) -> str | None:
    """`nonfinite_place` of what this rank's optimizer updates of a weight. dtype: that it is rounded to."""
    start, _ = buffer.updated_part(name)
    part = buffer.main_weight_part(name)
    return nonfinite_place(buffer.param_meta[name], part.to(dtype or part.dtype), start)


def _first_told(mine: str | None, ps: ParallelState | None) -> str | None:
    told = gather_json(mine, ps)
    return next((f"{one} on rank {rank}" for rank, one in enumerate(told) if one is not None), None)


def _what_is_wrong(tensor: Tensor) -> str | None:
    """NaN, infinite, or None where all is finite."""
    if all_finite([tensor]):  # sync: before a save, after a load, or a failed step
        return None
    return "NaN" if bool(tensor.isnan().any()) else "infinite"  # sync: as above


def _bits(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # sync: a failed step, or an interval
    return flat.view(torch.uint8).numpy().data


# --- where a failed step went wrong


def step_digest(losses: Mapping[str, tuple[float, float]], engine: Engine) -> bytes:
    """Bits of the losses (sums and counts) and of this rank's part of every reduced gradient."""
    found = hashlib.blake2b(repr(sorted(losses.items())).encode())
    buffer = engine.model.buffer
    for grad in map(buffer.main_grad_part, buffer.names):  # not the buckets: their padding means nothing
        # A copy: numpy pins what it is given, and memory of sharded gradients comes and goes.
        found.update(_bits(grad.detach().clone()))
    return found.digest()


def find_site(microbatch: int | None, engine: Engine, ps: ParallelState) -> NonFiniteSite:
    """On which rank and in which parameter a step went wrong that has just been run without reducing its gradients.

    microbatch: this rank's first with a non-finite loss. The same on all ranks. Communicates over control.
    """
    mine = _local_site(microbatch, engine, ps)
    sites = host_data.all_gather_json(mine and dataclasses.asdict(mine), ps.control_group)
    found = first_site(site and NonFiniteSite(**site) for site in sites)
    # Finite on every rank and yet not in the sum: the sum itself overflowed.
    return found or NonFiniteSite(ps.rank, value="finite on every rank, but the sum over ranks is not")


def _local_site(microbatch: int | None, engine: Engine, ps: ParallelState) -> NonFiniteSite | None:
    """This rank's own, from gradients that were not reduced; None where all is finite."""
    buffer = engine.model.buffer
    for name in buffer.names:
        if (place := _nonfinite_weight(buffer, name)) is not None:
            return NonFiniteSite(ps.rank, microbatch, place, bad_weight=True, pp_rank=ps.pp_rank)
    bad = engine.model.nonfinite_keys()
    places = (bad[key] for name in buffer.names for key in buffer.param_meta[name].grad_keys if key in bad)
    site = NonFiniteSite(ps.rank, microbatch, next(places, None), pp_rank=ps.pp_rank)
    return None if site.parameter is None and microbatch is None else site


# --- --check-weight-hash-across-dp-replicas-interval


class ReplicaMismatchError(ArithmeticError):
    """Replicas of the model hold different weights."""


def check_replicas(engine: Engine, ps: ParallelState, iteration: int) -> None:
    """Compare the weights as the next forward will use them, bit for bit, between ranks that should hold the same: the
    data parallel ranks of one place in the model; where weights are sharded, one an instance of the optimizer. A step's
    sums hide a difference: all replicas then get the gradients of several models, and the run goes on.

    Communicates over world, and over data parallel ranks where updated weights have not been gathered yet. Raises
    ReplicaMismatchError, on every rank alike.
    """
    engine.model.settle_weights()
    for place, weights in _held(engine.model.buffer, ps):
        digests = {name: tensor_digest(tensor) for name, tensor in weights.items()}
        mine = [*place, hashlib.blake2b("".join(digests.values()).encode()).hexdigest()]
        everyone = host_data.all_gather_json(mine, ps.control_group)
        if not all_alike(everyone):
            # Only now what differs: names and digests of every parameter are much to tell.
            difference = first_difference(everyone, host_data.all_gather_json(digests, ps.control_group))
            raise _mismatch(iteration, difference)


def _held(buffer: FlatBuffer, ps: ParallelState) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """What ranks of one place hold alike: of the layers, and where they lie on a grid of their own of the experts."""
    for experts in (False, True) if ps.experts is not None else (None,):
        row, place = buffer.sharding, buffer.place
        buckets = [
            memory
            for memory in buffer.buckets
            if experts is None or buffer.arenas[memory.arena].layout.expert is experts
        ]
        names = [name for memory in buckets for name in memory.bucket.names]
        if buckets:
            row, place = buffer.arenas[buckets[0].arena].sharding, buffer.arenas[buckets[0].arena].place
        coordinates = ps.expert_coordinates if experts else ps.coordinates
        where = [*(coordinates[axis] for axis in ("tp", "ep", "pp")), place.index(row.weights)]
        if row.weights is ShardOver.NONE:
            alone = () if experts else (one for one in buffer.frozen if buffer.bucket_of(one) is None)
            yield where, {name: buffer.weight(name) for name in (*names, *alone)}
        else:  # this rank's part of each bucket
            yield where, {f"the shard of unit {memory.name}": memory.weights_at_rest for memory in buckets}


def _mismatch(iteration: int, difference: str) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"iteration {iteration}: {difference}. These replicas started alike and are updated alike, so a device, its "
        "memory or a link has failed, or code of the user's own writes weights. Start again from the last checkpoint, "
        "on other machines."
    )


def tensor_digest(tensor: Tensor) -> str:
    """Of its bits."""
    return hashlib.blake2b(_bits(tensor), digest_size=16).hexdigest()


def all_alike(everyone: list[list[Any]]) -> bool:
    """everyone: [*place, digest] a rank. Whether ranks of one place have one digest."""
    return len({tuple(told) for told in everyone}) == len({tuple(told[:-1]) for told in everyone})


def first_difference(everyone: list[list[Any]], digests: list[dict[str, str]]) -> str:
    """The first parameter (shard of a unit) in which ranks of one place differ, and who holds what few others hold
    (ties: not the lowest rank)."""
    for place in dict.fromkeys(tuple(told[:-1]) for told in everyone):
        ranks = [rank for rank, told in enumerate(everyone) if tuple(told[:-1]) == place]
        for name in digests[ranks[0]]:
            most = Counter(digests[rank][name] for rank in ranks).most_common(1)[0][0]
            if few := [rank for rank in ranks if digests[rank][name] != most]:
                others = [rank for rank in ranks if rank not in few]
                return f"ranks {few} and {others} hold different bits of {name}"
    raise AssertionError("digests of all weights differ, and of none of them")
