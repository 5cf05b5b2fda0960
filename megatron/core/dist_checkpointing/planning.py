"""DCP's planning over our pieces: every piece is a chunk of a global tensor.

torch.distributed.checkpoint plans which rank writes which of several replicas (balanced by size) and which parts of
which chunks make up a piece on load; here it is told what the pieces are. Ranks tell each other of theirs in JSON, and
every rank derives the same plan from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.manifest import canonical
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.rectangles import Dims, Rectangle, fill_error
from megatron.core.transport.parallel_state import ParallelState

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name."""
    assert dtype in DTYPE_NAMES, f"{dtype} cannot be stored; storable: {sorted(DTYPE_NAMES.values())}"
    return DTYPE_NAMES[dtype]


class PieceFacts(NamedTuple):
    """What ranks tell each other of a piece: its tensor, safetensors' name of the dtype, and where it lies in it."""

    name: str
    dtype: str
    global_shape: Dims
    offset: Dims
    shape: Dims

    @classmethod
    def of(cls, piece: LocalPiece) -> PieceFacts:
        shape = tuple(piece.tensor.shape)
        return cls(piece.name, dtype_name(piece.tensor.dtype), piece.global_shape, piece.offset, shape)

    @property
    def stored(self) -> StoredTensor:
        """What it is in a file: under its name and rectangle, `w[0:2,0:3]`."""
        box = ",".join(f"{begin}:{begin + n}" for begin, n in zip(self.offset, self.shape, strict=True))
        return StoredTensor(f"{self.name}[{box}]", self.dtype, self.shape)

    def write_item(self) -> WriteItem:
        """What DCP is told of it."""
        chunk = chunk_metadata(self.offset, self.shape)
        properties = dcp.TensorProperties(dtype=TORCH_DTYPES[self.dtype])
        data = TensorWriteData(chunk, properties, torch.Size(self.global_shape))
        return WriteItem(dcp.MetadataIndex(self.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def chunk_metadata(offset: Dims, shape: Dims) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))


Place = tuple[str, Dims]  # name of a tensor, offset in it
Plans = list[list[PieceFacts]]  # of each rank


def place_pieces(pieces: Iterable[LocalPiece]) -> dict[Place, LocalPiece]:
    """Pieces by their places. Empty pieces of tensors that have elements are left out."""
    out: dict[Place, LocalPiece] = {}
    for piece in pieces:
        dims = (len(piece.global_shape), len(piece.offset), piece.tensor.dim())
        assert len(set(dims)) == 1, f"{piece.name}: dims of global shape, offset, tensor: {dims}"
        if piece.tensor.numel() or 0 in piece.global_shape:
            place = piece.name, tuple(piece.offset)
            assert place not in out, f"{piece.name}: two pieces at offset {piece.offset} on one rank"
            out[place] = piece
    return out


def global_plan(held: Plans) -> tuple[Plans, dcp.Metadata]:
    """What every rank writes of what each rank holds, every element once; and DCP's description of it all."""
    _check_replicas(held)
    local = [SavePlan([one.write_item() for one in own]) for own in held]
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


@dataclasses.dataclass
class PlanCache:
    """The plan of the last save. Ranks' pieces rarely change, so most saves exchange digests only."""

    digests: list[str] = dataclasses.field(default_factory=list)
    plans: Plans = dataclasses.field(default_factory=list)


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
