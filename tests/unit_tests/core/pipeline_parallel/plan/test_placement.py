import pytest

from megatron.core.pipeline_parallel.plan.placement import Placement


def test_stages_of_ranks_by_hand():
    assert Placement("linear", 3).ranks() == (0, 1, 2)
    assert Placement("looped", 3, 2).ranks() == (0, 1, 2, 0, 1, 2)
    assert Placement("v", 3, 2).ranks() == (0, 1, 2, 2, 1, 0)
    assert Placement("v", 2, 3).ranks() == (0, 1, 1, 0, 0, 1)


@pytest.mark.parametrize("kind", ["looped", "v"])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 3), (5, 2), (8, 4)])
def test_stage_and_chunk_are_inverse(kind, ranks, chunks):
    placement = Placement(kind, ranks, chunks)
    for stage in range(placement.num_stages):
        assert placement.stage_of(placement.rank_of(stage), placement.chunk_of(stage)) == stage


def test_bad_placements_are_refused():
    with pytest.raises(ValueError, match="none of"):
        Placement("ring", 2)
    with pytest.raises(ValueError, match="at least 1"):
        Placement("looped", 0)
    with pytest.raises(ValueError, match="one chunk"):
        Placement("linear", 2, 2)
