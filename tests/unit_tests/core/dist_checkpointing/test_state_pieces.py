"""Pieces of a sharded state: rectangles for torch.distributed.checkpoint, a rank's 1-D tensor for everything else."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.dist_checkpointing.state_pieces import FlatSpan, StatePiece, as_pieces, taken
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta


def piece(shape: tuple[int, ...], start: int, end: int) -> StatePiece:
    whole = torch.arange(math.prod(shape), dtype=torch.float32)
    return StatePiece(whole[start:end].clone(), FlatSpan(ParamMeta("w", shape), start, end))


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_chunks_of_all_ranks_make_up_the_tensor(dims, data):
    shape = tuple(dims)
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    found = torch.full(shape, -1.0)
    for start, end in itertools.pairwise(cuts):
        part = piece(shape, start, end)
        for item in part.__create_write_items__("w", part):
            assert item.tensor_data.size == torch.Size(shape)
            chunk = item.tensor_data.chunk
            view = found
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                view = view.narrow(dim, offset, size)
            assert bool((view == -1).all()), "two chunks have an element"
            view.copy_(part.__get_tensor_shard__(MetadataIndex("w", chunk.offsets)))
    assert torch.equal(found.view(-1), torch.arange(numel, dtype=torch.float32))


def test_what_is_computed_with_it_is_the_ranks_own_part_or_refused():
    one = piece((3, 4), 2, 7)
    assert (one.shape, one.size(0), one.dim(), one.numel()) == ((3, 4), 3, 2, 12)
    assert one.to_local().tolist() == [2, 3, 4, 5, 6]
    for other in (one.clone(), one * 2 / 2, copy.deepcopy(one), one.detach().cpu(), one + torch.zeros(5)):
        assert isinstance(other, StatePiece)
        assert torch.equal(other, one)
    for partial in (torch.sum, torch.norm, lambda whole: whole[0], lambda whole: whole.view(-1)[-1]):
        with pytest.raises(
            ModelError, match=r" of this rank's part of 'w', 5 elements.*full_state_dict\(\) has"
        ):
            partial(one)
    with pytest.raises(ModelError, match=r"of shape \(3, 4\) and this rank's part of 'w', 5 elements"):
        torch.zeros(3, 4).copy_(one)
    with pytest.raises(ModelError, match=r"of shape \(3,\) and this rank's part of 'w', 1 elements"):
        torch.zeros(3) - piece((3,), 1, 2)  # would be spread over all three
    with pytest.raises(ModelError, match=r"'w' is pickled"):
        pickle.dumps(one)


def test_an_empty_one_notes_a_load_too():
    local = torch.zeros(0)
    one = StatePiece(local, FlatSpan(ParamMeta("w", (2,)), 2, 2))
    before = local._version
    assert one.__create_write_items__("w", one) == []
    assert local._version == before
    assert one.__create_chunk_list__() == []
    assert local._version > before


def test_what_is_taken_into_a_place():
    place = FlatSpan(ParamMeta("w", (3, 4)), 2, 7)
    assert taken(piece((3, 4), 2, 7), place).tolist() == [2, 3, 4, 5, 6]
    assert taken(torch.arange(12).view(3, 4), place).tolist() == [2, 3, 4, 5, 6]
    assert taken(other := torch.zeros(9), place) is other
    with pytest.raises(
        ModelError, match=r"\[0, 5\) are loaded where this rank has \[2, 7\).*checkpoint.load"
    ):
        taken(piece((3, 4), 0, 5), place)


def test_what_an_optimizer_keeps():
    place = FlatSpan(ParamMeta("w", (3, 4)), 2, 7)
    kept = as_pieces({"step": torch.ones(()), "sum": torch.ones(5), "old": [torch.ones(3)]}, place, "Some")
    assert type(kept["step"]) is torch.Tensor
    assert kept["sum"].shape == (3, 4)
    with pytest.raises(ModelError, match=r"Some keeps a tensor of shape \(3,\) for 'w'.*5 elements"):
        kept["old"][0].__create_write_items__("w", kept["old"][0])
