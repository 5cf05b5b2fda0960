"""What a row holds at each boundary and moves, by hand; rows that are wrong, and what is said of them."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.ir import PlanError, parse_row
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Residency
from tests.harness.unit_stages import layers, unit

ALONE = Placement("linear", 1)
SHARDED = Residency("optim_grads_params")


def walk(text, residency=SHARDED, stage=None, outer=1, **words):
    units = RankUnits(
        0, ALONE, [stage or layers(0, 2, outer=outer)]
    )  # 10 bytes of weights, 20 of gradients each
    return walk_row(parse_row(text.split()), units, residency, **words)


# Gathers each unit where it is used, and reduces it behind its last gradient.
GOOD = (
    "0UNSHARD[0:1] 0RESHARD[0:1].2 0UNSHARD[1:2].2 0F0 0RESHARD[1:2].2 0UNSHARD[0:1].2 0B0 0RESHARD[0:1] "
    "0REDUCE[1:2].2 0W0 0REDUCE[0:1]"
)


def test_bytes_at_every_boundary():
    costs = CostModel((1.0,), (1.0,), (1.0,), activation=(7.0,), held_after_b=(9.0,))
    found = walk(GOOD, costs=costs, boundaries=True)
    assert [tuple(one) for one in found.boundaries] == [
        # place, access, gathered, gradients, under way, activation
        (0, -1, 10, 0, 0, 0.0),  # UNSHARD
        (3, 0, 10, 0, 0, 7.0),  # F begins with its activation
        (1, 1, 0, 0, 0, 7.0),  # freed behind the first unit
        (2, 1, 10, 0, 0, 7.0),
        (3, 1, 10, 0, 0, 7.0),
        (3, -1, 10, 0, 0, 7.0),
        (6, 0, 10, 0, 0, 9.0),  # B leaves more than F did, and takes it at its start
        (4, 1, 0, 0, 0, 9.0),
        (5, 1, 10, 0, 0, 9.0),
        (6, 1, 10, 0, 0, 9.0),
        (6, -1, 10, 0, 0, 9.0),
        (7, -1, 0, 0, 0, 9.0),
        (9, 0, 0, 20, 0, 9.0),  # W adds to the last unit
        (8, 1, 0, 0, 20, 9.0),  # which is reduced when the first begins
        (9, 1, 0, 20, 20, 9.0),
        (9, -1, 0, 20, 20, 0.0),
        (10, -1, 0, 0, 40, 0.0),
        (10, -1, 0, 0, 0, 0.0),
    ]
    assert (found.peak.total, found.most_transient) == (49.0, 40)
    assert found.most[2:] == (10, 20, 40, 9.0)
    assert (found.moves.gathers.calls, found.moves.gathers.payload_bytes) == (3, 30)
    assert (found.moves.reductions.calls, found.moves.reductions.payload_bytes) == (2, 40)
    assert found.groups == (({0: 1},), ({0: 1},))


def test_two_reductions_are_under_way_and_new_gradients_wait_for_their_own():
    text = (
        "0UNSHARD[0:3] 0F0 0REDUCE[2:3].2 0REDUCE[1:2].3 0BW0 0REDUCE[0:1] 0F1 0REDUCE[2:3].2 0REDUCE[1:2].3 "
        "0BW1 0RESHARD[0:3] 0REDUCE[0:1]"
    )
    found = walk(text, stage=layers(0, 3), boundaries=True)
    in_second = [(one.gradients, one.under_way) for one in found.boundaries if one.place in (7, 8, 9)]
    # the first reduction ended with the third's beginning; units 1 and 0 are under way still
    assert in_second == [(20, 40), (0, 40), (20, 40), (0, 40), (20, 40), (20, 40)]


def test_extra_accumulators_come_late_and_go_with_the_reduction():
    tied = StageUnits(
        (unit("both", extra_grad_bytes=6), unit("layer")), ((0,), (1,), (0,)), ((0,), (1,), (0,))
    )
    text = "0UNSHARD[0:2] 0F0 0BW0 0RESHARD[0:2] 0REDUCE[0:1] 0REDUCE[1:2]"
    found = walk(text, stage=tied, boundaries=True)
    in_backward = [one.gradients for one in found.boundaries if one.place == 2]
    assert in_backward == [20, 40, 46, 46]
    assert found.boundaries[-3].under_way == 26


def test_instances_gather_once_a_row_and_sum_behind_the_last_reduction():
    stage = layers(0, 2, outer=2, outer_optimizer=True)
    text = GOOD + " 0HSDP_ALL_REDUCE[1:2] 0HSDP_ALL_REDUCE[0:1]"
    moves = walk(text, stage=stage).moves
    assert (moves.outer_gathers.calls, moves.outer_gathers.payload_bytes) == (2, 4)
    assert (moves.outer_sums.calls, moves.outer_sums.payload_bytes) == (2, 10)


def test_whole_states_hold_nothing():
    text = "0UNSHARD[0:1] 0UNSHARD[1:2] 0F0 0BW0 0F1 0REDUCE[1:2].2 0BW1 0REDUCE[0:1]"
    found = walk(text, Residency("optim"))
    assert found.most_transient == 0
    assert found.moves.gathers.calls == found.moves.reductions.calls == 2
    assert found.groups == (({0: 2},), ({0: 2},))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0UNSHARD[0:1] 0RESHARD[0:1].2", "0RESHARD[0:1].2", "place 2, 0F0: needs the weights of unit 0.0"),
        ("0UNSHARD[1:2].2 0F0", "0F0", "0F0: needs the weights of unit 0.1, which are not gathered"),
        (
            "0UNSHARD[1:2].2 0F0",
            "0UNSHARD[1:2].1 0F0",
            "0UNSHARD\\[1:2\\].1: stands behind one of a later moment",
        ),
        (
            "0UNSHARD[0:1] 0RESHARD",
            "0UNSHARD[0:2] 0RESHARD",
            "0UNSHARD\\[1:2\\].2: unit 0.1 is gathered already",
        ),
        ("0RESHARD[0:1].2 0UNSHARD[1:2].2 0F0", "0UNSHARD[1:2].2 0F0", "unit 0.0 is gathered already"),
        ("0RESHARD[1:2].2 0UNSHARD[0:1].2 0B0", "0RESHARD[1:2].1 0UNSHARD[0:1].2 0B0", "unit 0.1 is in use"),
        ("0B0 0RESHARD[0:1]", "0B0", "place 9, 0REDUCE\\[0:1\\]: unit 0.0 is still gathered here"),
        ("0B0 0RESHARD[0:1]", "0B0 0RESHARD[0:1] 0RESHARD[0:1]", "unit 0.0 is not gathered"),
        ("0REDUCE[1:2].2 0W0", "0REDUCE[1:2].1 0W0", "unit 0.1 has no gradients since they were last summed"),
        ("0REDUCE[1:2].2 0W0", "0REDUCE[1:2].3 0W0", "0W0 has only 2 accesses"),
        ("0REDUCE[1:2].2 0W0", "0REDUCE[0:1].2 0W0", "unit 0.0 has no gradients"),
        ("0W0 0REDUCE[0:1]", "0W0", "gradients of unit 0.0 are never reduced"),
        ("0W0 0REDUCE[0:1]", "0W0 0REDUCE[0:1] 0REDUCE[0:1]", "unit 0.0 has no gradients since"),
        ("0W0 0REDUCE[0:1]", "0W0 0REDUCE[0:1].1", "no computation follows"),
        ("0W0 0REDUCE[0:1]", "0W0 0REDUCE[0:3]", "stage 0 has 2 units on this rank"),
        ("0W0 0REDUCE[0:1]", "0W0 0REDUCE[0:1] 0HSDP_ALL_REDUCE[0:1]", "unit 0.0 has no other instances"),
    ],
)
def test_wrong_rows_are_refused(old, new, message):
    assert old in GOOD
    with pytest.raises(PlanError, match=message):
        walk(GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("text", "residency", "message"),
    [
        ("0UNSHARD[0:2] 0F0 0BW0 0REDUCE[0:2]", Residency("no_shard"), "is whole at rest"),
        ("0F0 0BW0 0REDUCE[0:2]", Residency("optim"), "0F0: needs the weights of unit 0.0"),
        (
            "0UNSHARD[0:2] 0F0 0BW0 0RESHARD[0:2] 0REDUCE[0:2]",
            Residency("optim"),
            "0RESHARD.*whole at rest",
        ),
        (
            "0F0 0BW0 0REDUCE[0:2] 0F1 0BW1 0REDUCE[0:2]",
            Residency("no_shard"),
            "0BW1: adds to the gradients of unit 0.1 after their last sum",
        ),
        (
            "0F0 0BW0 0REDUCE[0:2] 0HSDP_ALL_REDUCE[0:1]",
            Residency("no_shard"),
            "gradients of unit 0.1 are not summed over instances",
        ),
        (
            "0F0 0BW0 0HSDP_ALL_REDUCE[0:2] 0REDUCE[0:2]",
            Residency("no_shard"),
            "unit 0.0 is summed over instances before its last reduction",
        ),
        (
            "0F0 0BW0 0REDUCE[0:2] 0HSDP_ALL_REDUCE[0:2] 0HSDP_ALL_REDUCE[0:1]",
            Residency("no_shard"),
            "unit 0.0 is summed over instances twice",
        ),
        (
            "0F0 0BW0 0STEP 0REDUCE[0:2]",
            Residency("no_shard"),
            "0STEP: gradients of unit 0.0 are never",
        ),
    ],
)
def test_wrong_rows_of_other_strategies_are_refused(text, residency, message):
    with pytest.raises(PlanError, match=message):
        walk(text, residency, outer=2 if "HSDP" in text else 1)
