"""DCP's planning over our pieces: every piece is a chunk of a global tensor.

torch.distributed.checkpoint plans which rank writes which of several replicas (balanced by size) and which parts of
which chunks make up a piece on load; here it is told what the pieces are. Ranks tell each other of theirs in JSON, and
every rank derives the same plan from it. Importing DCP takes a second of CPU, so only what reads or writes a checkpoint
imports this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.manifest import canonical
from megatron.core.dist_checkpointing.pieces import (
    TORCH_DTYPES,
    PieceFacts,
    Place,
    PlanCache,
    Plans,
    place_pieces,
)
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.rectangles import Dims, Rectangle, fill_error
from megatron.core.transport.parallel_state import ParallelState


def chunk_metadata(offset: Dims, shape: Dims) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))


def write_item(piece: PieceFacts) -> WriteItem:
    """What DCP is told of a piece."""
    chunk = chunk_metadata(piece.offset, piece.shape)
    properties = dcp.TensorProperties(dtype=TORCH_DTYPES[piece.dtype])
    data = TensorWriteData(chunk, properties, torch.Size(piece.global_shape))
    return WriteItem(dcp.MetadataIndex(piece.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def global_plan(held: Plans) -> tuple[Plans, dcp.Metadata]:
    """What every rank writes of what each rank holds, every element once; and DCP's description of it all."""
    _check_replicas(held)
    local = [SavePlan([write_item(piece) for piece in own]) for own in held]
    plans, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(local)
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, dcp.TensorStorageMetadata), f"{name}: only tensors enter DCP, found {entry}"
        boxes = [Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        problem = fill_error(tuple(entry.size), boxes)
        assert problem is None, f"{name}: {problem}"
    facts = {(one.name, one.offset): one for own in held for one in own}
    places = [[(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items] for plan in plans]
    return [[facts[place] for place in own] for own in places], metadata


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
    local = [PieceFacts.of(piece) for piece in pieces]
    digests = gather_json(hashlib.sha256(canonical(local)).hexdigest(), ps)
    if digests != cache.digests:
        told = gather_json(local, ps)
        held = [[PieceFacts(name, dtype, *map(tuple, dims)) for name, dtype, *dims in own] for own in told]
        cache.plans, _ = global_plan(held)
        cache.digests = digests
    return cache.plans


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the filling of pieces in place."""

    def __init__(self, pieces: Iterable[LocalPiece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {at: piece for at, piece in place_pieces(pieces).items() if piece.tensor.numel() > 0}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner(metadata=...) comes first"
        chunks: dict[str, list[dcp.ChunkStorageMetadata]] = {}
        for piece in self._pieces.values():
            chunks.setdefault(piece.name, []).append(chunk_metadata(piece.offset, piece.tensor.shape))
        saved = self.metadata.state_dict_metadata
        reads = (create_read_items_for_chunk_list(name, saved[name], of) for name, of in chunks.items())  # type: ignore[arg-type]
        return LoadPlan([item for items in reads for item in items])

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        return self._pieces[index.fqn, tuple(index.offset or ())].tensor
