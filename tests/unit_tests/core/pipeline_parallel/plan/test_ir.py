import json
import subprocess
import sys

import pytest

from megatron.core.pipeline_parallel.plan.ir import (
    BW,
    B,
    F,
    Kind,
    Plan,
    PlanError,
    W,
    compute,
    op_text,
    parse_op,
    parse_row,
    partner_of,
    plan_hash,
    row_texts,
)
from megatron.core.pipeline_parallel.plan.placement import Placement

# (kind, stage, microbatch, slice, first unit, end unit, peer, pair)
TEXTS = {
    "2F0": (Kind.F, 2, 0, 0, -1, -1, -1, -1),
    "2BW13": (Kind.BW, 2, 13, 0, -1, -1, -1, -1),
    "0B1": (Kind.B, 0, 1, 0, -1, -1, -1, -1),
    "7W4": (Kind.W, 7, 4, 0, -1, -1, -1, -1),
    "2F0.1": (Kind.F, 2, 0, 1, -1, -1, -1, -1),
    "2F0[4:8].3": (Kind.F, 2, 0, 3, 4, 8, -1, -1),
    "0SEND_F3@1#17": (Kind.SEND_F, 0, 3, 0, -1, -1, 1, 17),
    "1RECV_B3@2#0": (Kind.RECV_B, 1, 3, 0, -1, -1, 2, 0),
    "3UNSHARD[0:2]": (Kind.UNSHARD, 3, -1, 0, 0, 2, -1, -1),
    "3REDUCE": (Kind.REDUCE, 3, -1, 0, -1, -1, -1, -1),
    "0SEND_STATE@1#5": (Kind.SEND_STATE, 0, -1, 0, -1, -1, 1, 5),
    "0VALIDATE": (Kind.VALIDATE, 0, -1, 0, -1, -1, -1, -1),
    "0STEP": (Kind.STEP, 0, -1, 0, -1, -1, -1, -1),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_every_kind(text):
    assert op_text(TEXTS[text]) == text
    assert parse_op(text) == TEXTS[text]


@pytest.mark.parametrize(
    "text", ["F0", "2X0", "2F", "2STEP3", "2F0[4:4]", "2F0#3", "2F0@1", "", "2F-1", "2F0 1F0", "0SEND_F@1"]
)
def test_what_is_no_operation_is_shown(text):
    with pytest.raises(PlanError, match=r"F|expected|units"):
        parse_op(text)


def test_overlapped_pairs_are_one_text():
    texts = ["0F0", "(0F3;7BW1)", "(1F3;6BW1)", "0W2"]
    row = parse_row(texts)
    assert [op[7] for op in row] == [-1, 0, 0, 1, 1, -1]
    assert row_texts(row) == texts
    with pytest.raises(PlanError, match="two computations overlap"):
        parse_row(["(0F0;0F1;0F2)"])
    with pytest.raises(PlanError, match="two computations overlap"):
        parse_row(["(0F0;0SEND_F0@1#1)"])


def test_operations_of_data_parallelism_may_stand_between_an_overlapped_pair():
    """A reader of the row finds the partner behind them, and the text has them between the two."""
    texts = ["0UNSHARD[0:1]", "(0F3;7UNSHARD[1:2];7RESHARD[0:1].1;7BW1)", "7REDUCE[0:1]", "0F4"]
    row = parse_row(texts)
    assert row_texts(row) == texts
    assert [partner_of(row, place) for place in range(len(row))] == [-1, 4, -1, -1, -1, -1, -1]
    with pytest.raises(PlanError, match="two computations overlap"):
        parse_row(["(0F0;0UNSHARD)"])


def tiny(*kinds, name="x", bitwise=True):
    return Plan(name, Placement("linear", 1), 1, (tuple(compute(kind, 0, 0) for kind in kinds),), bitwise)


def test_hash_is_of_version_placement_and_operations_only():
    plan = tiny(F, BW)
    # the canonical JSON, by hand
    text = '{"ops":[["0F0","0BW0"]],"placement":{"chunks":1,"kind":"linear","ranks":1},"version":1}'
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
    code = f"import hashlib; print(hashlib.sha256({text!r}.encode()).hexdigest())"
    known = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert plan_hash(plan) == known
    assert plan_hash(tiny(F, BW, name="y", bitwise=False)) == known
    assert plan_hash(tiny(F, B, W)) != known


def test_views():
    plan = tiny(F, B, W)
    assert list(map(op_text, plan.rows[0])) == ["0F0", "0B0", "0W0"]
    assert plan.num_ops == 3
    assert not plan.has_transfers
    assert op_text(compute(W, 3, 2)) == "3W2"
