"""DCP's planners over our pieces: every piece is a chunk of a global tensor.

torch.distributed.checkpoint plans which rank writes which of several replicas (balanced by size) and which
parts of which chunks make up a piece on load; these subclasses only say what the pieces are. Nothing but
tensors enters DCP. Plans travel between ranks as JSON (`plan_to_json`), and every rank derives the same
global plan from them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.manifest import canonical
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.rectangles import Rectangle, fill_error
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


def chunk_metadata(box: Rectangle) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def index_pieces(pieces: Sequence[LocalPiece]) -> dict[dcp.MetadataIndex, LocalPiece]:
    """Pieces by name and offset. Empty pieces of tensors that have elements are left out."""
    out: dict[dcp.MetadataIndex, LocalPiece] = {}
    for piece in pieces:
        dims = (len(piece.global_shape), len(piece.offset), piece.tensor.dim())
        assert len(set(dims)) == 1, f"{piece.name}: dims of global shape, offset, tensor: {dims}"
        assert dtype_name(piece.tensor.dtype)
        if piece.tensor.numel() or 0 in piece.global_shape:
            index = dcp.MetadataIndex(piece.name, torch.Size(piece.offset))
            assert index not in out, f"{piece.name}: two pieces at offset {piece.offset} on one rank"
            out[index] = piece
    return out


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the writing of pieces instead of a state dict."""

    def __init__(self, pieces: Sequence[LocalPiece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = index_pieces([piece for piece in pieces if piece.written])
        self.set_up_planner({})

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                write_item(one.name, one.tensor.dtype, one.global_shape, one.box)
                for one in self._pieces.values()
            ]
        )
        return self.plan

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        _check_replicas(all_plans)
        plans, metadata = super()._create_global_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():  # all pieces are every element, once
            assert isinstance(entry, dcp.TensorStorageMetadata), (
                f"{name}: only tensors enter DCP, found {entry}"
            )
            boxes = [Rectangle(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            problem = fill_error(tuple(entry.size), boxes)
            assert problem is None, f"{name}: {problem}"
        return plans, metadata

    def lookup_object(self, index: dcp.MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the filling of pieces in place."""

    def __init__(self, pieces: Sequence[LocalPiece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {i: piece for i, piece in index_pieces(pieces).items() if piece.tensor.numel() > 0}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner(metadata=...) comes first"
        plan = LoadPlan([])
        ordered = sorted(self._pieces.values(), key=lambda piece: piece.name)
        for name, pieces in itertools.groupby(ordered, lambda piece: piece.name):
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, dcp.TensorStorageMetadata), (
                f"{name}: only tensors enter DCP, found {saved}"
            )
            chunks = [chunk_metadata(piece.box) for piece in pieces]
            plan.items += create_read_items_for_chunk_list(name, saved, chunks)
        return plan

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


def write_item(name: str, dtype: torch.dtype, global_shape: Sequence[int], box: Rectangle) -> WriteItem:
    """What DCP is told of a rectangle that this rank can write."""
    chunk, properties = chunk_metadata(box), dcp.TensorProperties(dtype=dtype)
    data = TensorWriteData(chunk, properties, torch.Size(global_shape))
    return WriteItem(dcp.MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def plan_to_json(plan: SavePlan) -> list[Any]:
    """A local plan for the other ranks: name, dtype, global shape, offset and shape of each piece."""
    rows = [(item.index.fqn, tensor_data(item)) for item in plan.items]
    return [
        [
            name,
            dtype_name(data.properties.dtype),
            *map(list, (data.size, data.chunk.offsets, data.chunk.sizes)),
        ]
        for name, data in rows
    ]


def plan_from_json(value: list[Any]) -> SavePlan:
    return SavePlan(
        [
            write_item(name, TORCH_DTYPES[dtype], global_shape, Rectangle(tuple(offset), tuple(shape)))
            for name, dtype, global_shape, offset, shape in value
        ]
    )


def tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index}: only tensors enter DCP"
    return item.tensor_data


def _check_replicas(all_plans: list[SavePlan]) -> None:
    """Ranks that hold a piece at the same place must mean the same one."""
    seen: dict[dcp.MetadataIndex, tuple[int, TensorWriteData]] = {}
    tensors: dict[str, tuple[int, tuple[torch.Size, torch.dtype]]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            data, name = tensor_data(item), item.index.fqn
            first_rank, first = seen.setdefault(item.index, (rank, data))
            assert first.chunk.sizes == data.chunk.sizes, (
                f"{name} at {tuple(data.chunk.offsets)}: rank {first_rank} holds shape "
                f"{tuple(first.chunk.sizes)}, rank {rank} holds {tuple(data.chunk.sizes)}"
            )
            facts = (data.size, data.properties.dtype)
            first_rank, first_facts = tensors.setdefault(name, (rank, facts))
            assert first_facts == facts, f"{name}: rank {first_rank} {first_facts}, rank {rank} {facts}"


@dataclasses.dataclass
class PlanCache:
    """The plans of the last save. Ranks' pieces rarely change, so most saves exchange digests only."""

    digests: list[str] = dataclasses.field(default_factory=list)
    plans: list[SavePlan] = dataclasses.field(default_factory=list)


def plan_save(planner: PieceSavePlanner, ps: ParallelState | None, cache: PlanCache) -> list[SavePlan]:
    """What every rank writes. Communicates over the whole world."""
    local = plan_to_json(planner.create_local_plan())
    digests = gather_json(hashlib.sha256(canonical(local)).hexdigest(), ps)
    if digests != cache.digests:
        cache.plans, _ = planner.create_global_plan(
            [plan_from_json(value) for value in gather_json(local, ps)]
        )
        cache.digests = digests
    return cache.plans
