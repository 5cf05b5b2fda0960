"""Pieces of whole tensors and of flat shards are views of what they came from."""

import pytest
import torch

from megatron.core.dist_checkpointing.state import FlatShard, flat_shards, whole_tensors


def test_whole_tensors_share_memory():
    weight = torch.zeros(2, 3, requires_grad=True)
    (piece, scalar) = whole_tensors({"w": weight, "s": torch.tensor(1.0)}, prefix="model.")
    assert (piece.name, piece.global_shape, piece.offset) == ("model.w", (2, 3), (0, 0))
    assert (scalar.global_shape, scalar.offset) == ((), ())
    piece.tensor.fill_(7)
    assert weight.detach().eq(7).all()


def test_flat_shards_are_views_that_tile_the_slice():
    whole = torch.arange(24.0).view(4, 6)
    buffer = whole.flatten()[4:21].clone()
    pieces = flat_shards([FlatShard("w", (4, 6), 4, 21, buffer)])
    for piece in pieces:
        region = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
        assert torch.equal(piece.tensor, whole[region])
        piece.tensor.zero_()
    assert sum(piece.tensor.numel() for piece in pieces) == 17
    assert buffer.eq(0).all()


def test_a_shard_of_the_wrong_length_is_a_bug():
    with pytest.raises(AssertionError, match=r"slice \[0, 3\) in a tensor of shape \(2,\)"):
        flat_shards([FlatShard("w", (4,), 0, 3, torch.zeros(2))])
