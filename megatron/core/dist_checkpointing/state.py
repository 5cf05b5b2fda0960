"""What a checkpoint is made of: pieces of global tensors."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class LocalPiece:
    """A rectangle of a global tensor that this rank holds.

    Saving reads `tensor`; loading writes it in place, so it is a view into the buffer that the rectangle lives in.
    Several ranks may hold the same rectangle (replicas): one of them writes it.

    tensor: shape of the rectangle. offset: its first element in the global tensor, one index a dim.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
