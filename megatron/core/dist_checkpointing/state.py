"""What a checkpoint is made of: pieces of global tensors."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from megatron.core.param_meta import ParamMeta, region_parts


@dataclasses.dataclass(frozen=True)
class LocalPiece:
    """A rectangle of a global tensor that this rank holds.

    Saving reads `tensor`; loading writes it in place, so it is a view into the buffer that the rectangle
    lives in. Several ranks may hold the same rectangle (replicas): one of them writes it.

    tensor: shape of the rectangle. offset: its first element in the global tensor, one index a dim. written: False for
    what other ranks write, who may have cut it elsewhere; it is only read. experts: its first dim counts experts.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    written: bool = True
    experts: bool = False


def pieces_of(prefix: str, meta: ParamMeta, tensor: Tensor) -> list[LocalPiece]:
    """The regions of a parameter's local tensor (or of anything in its shape: a moment), under `prefix.name`."""
    assert tuple(tensor.shape) == meta.local_shape, (
        f"{meta.name}: shape {tuple(tensor.shape)} here, by its ParamMeta {meta.local_shape}"
    )
    tensor = tensor.detach()
    return [
        LocalPiece(
            f"{prefix}.{meta.name}", meta.global_shape, part.offset, part.view(tensor), experts=meta.expert
        )
        for part in meta.parts
    ]


def part_pieces(prefix: str, meta: ParamMeta, part: Tensor, start: int, end: int) -> list[LocalPiece]:
    """The same of what a rank holds of the flattened local tensor: elements [start, end), 1-D. Views of `part`.

    A parameter without elements is everybody's: a checkpoint knows its shape.
    """
    if math.prod(meta.local_shape) == 0:
        return pieces_of(prefix, meta, part.view(meta.local_shape))
    part = part.detach()
    return [
        LocalPiece(f"{prefix}.{meta.name}", meta.global_shape, offset, view, experts=meta.expert)
        for region in meta.parts
        for offset, view in region_parts(region, meta.local_shape, part, start, end)
    ]
