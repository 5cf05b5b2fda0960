"""Pieces of tensors that this rank holds, by their places, and as ranks describe them to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from megatron.core.dist_checkpointing.shard_files import PieceFacts
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.rectangles import Dims

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


def facts_of(piece: LocalPiece) -> PieceFacts:
    shape = tuple(piece.tensor.shape)
    return PieceFacts(piece.name, dtype_name(piece.tensor.dtype), piece.global_shape, piece.offset, shape)


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


@dataclasses.dataclass
class PlanCache:
    """The plan of the last save. Ranks' pieces rarely change, so most saves exchange digests only."""

    digests: list[str] = dataclasses.field(default_factory=list)
    plans: Plans = dataclasses.field(default_factory=list)
