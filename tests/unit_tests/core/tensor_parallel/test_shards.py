"""Every row of a parameter is held, by as many ranks as the region says, and the ranks that share a group hold it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models.gpt.vocabulary_size import leaves_ranks_empty
from megatron.core.param_meta import ParamMeta, Region
from megatron.core.tensor_parallel.mappings import ALONE
from megatron.core.tensor_parallel.sink_module import (
    Band,
    band_regions,
    even_bands,
    vocabulary_band,
    whole_region,
)
from megatron.core.transformer.self_attention import qkv_bands


class Rank:
    """Size and rank are all that a plan wants of `TensorParallel`."""

    def __init__(self, size, rank):
        self.size, self.rank = size, rank


def test_alone_nothing_is_cut():
    assert even_bands(10, ALONE, parts=2) == (Band(0, 5), Band(5, 5))
    assert band_regions((10, 3), even_bands(10, ALONE), 0, ALONE) == ()
    assert whole_region((10, 3), ALONE, partial=False) == ()


def test_gate_and_up_rows():
    tp = Rank(2, 1)
    bands = even_bands(8, tp, parts=2)
    assert band_regions((8, 3), bands, 0, tp) == (
        Region((0, 0), (2, 0), (2, 3)),
        Region((2, 0), (6, 0), (2, 3)),
    )
    assert band_regions((8,), bands, 0, tp) == (Region((0,), (2,), (2,)), Region((2,), (6,), (2,)))


def test_columns():
    tp = Rank(4, 3)
    assert band_regions((5, 8), even_bands(8, tp), 1, tp) == (Region((0, 0), (0, 6), (5, 2)),)


def test_whole():
    assert whole_region((6,), Rank(4, 2), partial=True) == (Region((0,), (0,), (6,), 4, True),)


def test_uneven_is_refused():
    with pytest.raises(AssertionError, match="9 = 1 parts over 2 ranks"):
        even_bands(9, Rank(2, 0))


@given(st.integers(1, 300), st.integers(1, 16))
def test_a_vocabulary_is_cut_whatever_its_size(rows, size):
    """Each row once, no rank without any; where the ranks divide it, in equal parts."""
    if leaves_ranks_empty(rows, size):
        with pytest.raises(AssertionError, match=f"{rows} rows: none for rank {size - 1} of {size}"):
            vocabulary_band(rows, Rank(size, size - 1))
        return
    bands = [vocabulary_band(rows, Rank(size, rank)) for rank in range(size)]
    assert [row for band in bands for row in range(band.offset, band.offset + band.size)] == list(range(rows))
    assert len({band.size for band in bands[:-1]} | {bands[0].size}) == 1
    if rows % size == 0:
        assert bands == [even_bands(rows, Rank(size, rank))[0] for rank in range(size)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_qkv_rows(data):
    groups = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    size = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16) if groups % n == 0 or n % groups == 0]))
    per_group = data.draw(st.integers(1, 3)) * max(size // groups, 1)
    head_dim = data.draw(st.integers(1, 4))
    heads = groups * per_group
    rows = (heads + 2 * groups) * head_dim
    held = torch.zeros(rows, dtype=torch.int64)
    copies = torch.zeros(rows, dtype=torch.int64)
    kinds = torch.tensor(([0] * per_group + [1, 2]) * groups).repeat_interleave(head_dim)  # q, k, v
    group_of = torch.arange(groups).repeat_interleave((per_group + 2) * head_dim)
    for rank in range(size):
        tp = Rank(size, rank)
        bands = qkv_bands(heads, groups, head_dim, tp)
        mine = torch.cat([torch.arange(band.offset, band.offset + band.size) for band in bands])
        held[mine] += 1
        for band in bands:
            copies[band.offset : band.offset + band.size] = band.copies
        assert (kinds[mine] == 0).sum() == heads // size * head_dim
        assert set(group_of[mine[kinds[mine] == 0]].tolist()) == set(
            group_of[mine[kinds[mine] == 1]].tolist()
        )
        # Local order stays grouped: for each local group its queries, its key, its value.
        local_groups = max(groups // size, 1)
        shape = [0] * (heads // size // local_groups) + [1, 2]
        assert kinds[mine].tolist() == [kind for kind in shape * local_groups for _ in range(head_dim)]
        regions = band_regions((rows, 5), bands, 0, tp)
        assert all(region.partial == (region.copies > 1) for region in regions)
        assert ParamMeta("w", (rows, 5), regions=regions).local_shape == (len(mine), 5)
    assert torch.equal(held, copies)
