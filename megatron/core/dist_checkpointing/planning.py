"""Which rank writes which pieces of a checkpoint: every element once.

Ranks tell each other of their pieces in JSON, and every rank derives the same plan from it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.manifest import canonical
from megatron.core.dist_checkpointing.pieces import Place, PlanCache, Plans, facts_of
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.dist_checkpointing.shard_files import PieceFacts
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.rectangles import Rectangle, fill_error
from megatron.core.transport.parallel_state import ParallelState


def global_plan(held: Plans) -> Plans:
    """What every rank writes of what each rank holds; of replicas, who has least to write."""
    _check_replicas(held)
    holders: dict[PieceFacts, list[int]] = {}
    for rank, piece in ((rank, piece) for rank, own in enumerate(held) for piece in own):
        holders.setdefault(piece, []).append(rank)
    boxes: dict[tuple[str, tuple[int, ...]], list[Rectangle]] = {}
    for piece in holders:
        boxes.setdefault((piece.name, piece.global_shape), []).append(Rectangle(piece.offset, piece.shape))
    for (name, shape), pieces in boxes.items():
        problem = fill_error(shape, pieces)
        assert problem is None, f"{name}: {problem}"
    plans: Plans = [[] for _ in held]
    num_bytes = [0] * len(held)
    # What one rank alone has comes first.
    for piece in sorted(holders, key=lambda piece: len(holders[piece])):
        rank = min(holders[piece], key=num_bytes.__getitem__)
        plans[rank].append(piece)
        num_bytes[rank] += math.prod(piece.shape) * ITEM_BYTES[piece.dtype]
    return plans


def _check_replicas(held: Plans) -> None:
    """Ranks that name a tensor must mean the same one, and those at the same place the same piece of it."""
    known: dict[str | Place, tuple[int, tuple[object, ...]]] = {}
    for rank, one in ((rank, one) for rank, own in enumerate(held) for one in own):
        whole, place = (one.dtype, one.global_shape), (one.name, one.offset)
        for key, facts in ((one.name, whole), (place, one.shape)):
            first, theirs = known.setdefault(key, (rank, facts))
            assert theirs == facts, f"{place}: rank {first} holds {theirs}, rank {rank} holds {facts}"


def plan_save(pieces: Iterable[LocalPiece], ps: ParallelState, cache: PlanCache) -> Plans:
    """What every rank writes. Communicates over the whole world."""
    local = [facts_of(piece) for piece in pieces]
    digests = gather_json(hashlib.sha256(canonical(local)).hexdigest(), ps)
    if digests != cache.digests:
        told = gather_json(local, ps)
        cache.plans = global_plan(
            [[PieceFacts(name, dtype, *map(tuple, dims)) for name, dtype, *dims in own] for own in told]
        )
        cache.digests = digests
    return cache.plans
