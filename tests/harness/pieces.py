"""Tensors as pieces of checkpoints, for tests that have neither an engine nor an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import Tensor

from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.rectangles import cut_flat_slice


@dataclasses.dataclass(frozen=True)
class FlatShard:
    """Elements [start, end) of a flattened global tensor. tensor: 1-D, end - start elements."""

    name: str
    global_shape: tuple[int, ...]
    start: int
    end: int
    tensor: Tensor


def whole_tensors(tensors: Mapping[str, Tensor], prefix: str = "") -> list[LocalPiece]:
    """One piece for each tensor, whole. Names get `prefix` (`"model."`)."""
    return [
        LocalPiece(prefix + name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())
        for name, tensor in tensors.items()
    ]


def flat_shards(shards: Iterable[FlatShard]) -> list[LocalPiece]:
    """The rectangles of flat shards, each a view of its part of the shard's tensor."""
    out: list[LocalPiece] = []
    for shard in shards:
        boxes = cut_flat_slice(shard.global_shape, shard.start, shard.end)
        parts = shard.tensor.detach().split([box.numel for box in boxes])
        for box, part in zip(boxes, parts, strict=True):
            out.append(LocalPiece(shard.name, shard.global_shape, box.offset, part.view(box.shape)))
    return out
