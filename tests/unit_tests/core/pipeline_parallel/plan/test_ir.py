import json
import subprocess
import sys

import pytest

from megatron.core.pipeline_parallel.plan.ir import (
    BW,
    B,
    F,
    Kind,
    Op,
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

TEXTS = {
    "2F0": Op(Kind.F, 2, 0),
    "2BW13": Op(Kind.BW, 2, 13),
    "0B1": Op(Kind.B, 0, 1),
    "7W4": Op(Kind.W, 7, 4),
    "2F0.1": Op(Kind.F, 2, 0, slice=1),
    "2F0[4:8].3": Op(Kind.F, 2, 0, slice=3, units=(4, 8)),
    "0SEND_F3@1#17": Op(Kind.SEND_F, 0, 3, peer=1, pair=17),
    "1RECV_B3@2#0": Op(Kind.RECV_B, 1, 3, peer=2, pair=0),
    "3UNSHARD[0:2]": Op(Kind.UNSHARD, 3, units=(0, 2)),
    "3REDUCE": Op(Kind.REDUCE, 3),
    "0SEND_STATE@1#5": Op(Kind.SEND_STATE, 0, peer=1, pair=5),
    "0VALIDATE": Op(Kind.VALIDATE, 0),
    "0STEP": Op(Kind.STEP, 0),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_every_kind(text):
    op = TEXTS[text]
    assert str(op) == text
    assert parse_op(text) == op.raw
    assert Op.of(op.raw) == op


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
    assert [str(Op.of(op)) for op in plan.rows[0]] == ["0F0", "0B0", "0W0"]
    assert plan.num_ops == 3
    assert not plan.has_transfers
    assert op_text(compute(W, 3, 2)) == "3W2"
