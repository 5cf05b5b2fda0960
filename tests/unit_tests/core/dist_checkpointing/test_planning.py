"""Which rank writes what, and which parts of it a rank reads."""

import json

import pytest
import torch

from megatron.core.dist_checkpointing import planning
from megatron.core.dist_checkpointing.catalog import choose
from megatron.core.dist_checkpointing.loading import planned_reads
from megatron.core.dist_checkpointing.pieces import PlanCache, facts_of, place_pieces
from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from tests.harness.pieces import FlatShard, flat_shards, whole_tensors


def global_plan(*ranks):
    return planning.global_plan([[facts_of(piece) for piece in place_pieces(own).values()] for own in ranks])


def test_replicas_are_written_once_and_shared_out_over_the_ranks():
    tensors = {f"w{i}": torch.zeros(10) for i in range(6)}
    plans = global_plan(*[whole_tensors(tensors) for _ in range(3)])
    written = [item.name for plan in plans for item in plan]
    assert sorted(written) == sorted(tensors)
    assert [len(plan) for plan in plans] == [2, 2, 2]


def test_plans_survive_json(monkeypatch):
    pieces = [
        *flat_shards(
            [FlatShard("w", (4, 3), a, b, torch.zeros(b - a)) for a, b in ((2, 11), (0, 2), (11, 12))]
        ),
        *whole_tensors({"s": torch.tensor(1)}),
    ]
    (plan,) = global_plan(pieces)
    monkeypatch.setattr(planning, "gather_json", lambda value, ps: [json.loads(json.dumps(value))])
    assert planning.plan_save(place_pieces(pieces).values(), None, PlanCache()) == [plan]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (LocalPiece("w", (4,), (0,), torch.zeros(3)), r"rank 0 holds shape \(2,\), rank 1 holds \(3,\)"),
        (LocalPiece("w", (5,), (2,), torch.zeros(3)), "rank 0 .*rank 1"),
        (LocalPiece("w", (4,), (2,), torch.zeros(2, dtype=torch.int32)), "rank 0 .*float32.*rank 1 .*int32"),
        (LocalPiece("w", (4,), (3,), torch.zeros(1)), "hold 3 elements"),
    ],
)
def test_ranks_that_disagree_are_a_bug_that_names_the_tensor(second, message):
    with pytest.raises((AssertionError, ValueError), match="w"):
        global_plan([LocalPiece("w", (4,), (0,), torch.zeros(2))], [second])


def test_a_hole_is_a_bug_on_one_rank_too():
    with pytest.raises(AssertionError, match="w: the pieces hold 2 elements"):
        global_plan([LocalPiece("w", (4,), (0,), torch.zeros(2))])


def test_two_pieces_at_one_place_on_one_rank_are_a_bug():
    piece = LocalPiece("w", (4,), (0,), torch.zeros(2))
    with pytest.raises(AssertionError, match="two pieces at offset"):
        place_pieces([piece, piece])


def test_a_dtype_that_cannot_be_stored_is_a_bug():
    with pytest.raises(AssertionError, match="complex64"):
        global_plan(whole_tensors({"c": torch.zeros(2, dtype=torch.complex64)}))


def test_loading_reads_only_what_the_pieces_need(tmp_path):
    """A rank that wants rows 1 and 2 of four saved rows reads the two chunks that hold them, one row each."""
    save(tmp_path, 1, [LocalPiece("w", (4, 3), (row, 0), torch.zeros(2, 3)) for row in (0, 2)], {}, {})
    piece = LocalPiece("w", (4, 3), (1, 0), torch.zeros(2, 3))
    reads = [(read.box.offset, read.box.shape) for read in planned_reads(choose(tmp_path).found, [piece])]
    assert sorted(reads) == [((0, 0), (1, 3)), ((1, 0), (1, 3))]
