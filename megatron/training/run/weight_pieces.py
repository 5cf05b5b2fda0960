"""A flat buffer's weights as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.dist_checkpointing.state import LocalPiece, part_pieces, pieces_of
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import Cut


def weight_pieces(buffer: FlatBuffer, names: Iterable[str] | None = None) -> list[LocalPiece]:
    """What this rank holds at rest of the model's weights, under `model.<name>`: their regions where weights are whole,
    rectangles of its parts where they are cut. Frozen ones too. Loading writes them in place; what others hold is
    gathered afterwards. names: all by default, in this order."""
    whole = buffer.sharding.weights is Cut.WHOLE
    pieces: list[LocalPiece] = []
    for name in buffer.param_meta if names is None else names:
        meta = buffer.param_meta[name]
        if whole or buffer.bucket_of(name) is None:
            pieces += pieces_of("model", meta, buffer.weight(name))
        else:
            start, end = buffer.part(name, buffer.sharding.weights)
            pieces += part_pieces("model", meta, buffer.weight_part(name), start, end)
    return pieces
