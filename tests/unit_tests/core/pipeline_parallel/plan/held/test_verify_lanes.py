"""Plans with operations of data parallelism in files, and held to their own words where units are not known."""

import dataclasses
import json

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError, parse_op, parse_row, plan_hash, row_texts
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency
from megatron.core.pipeline_parallel.plan.text import from_json, to_json
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.core.sharding_table import ShardPlace
from tests.harness.unit_stages import asked, model

SHARDED = "optim_grads_params"


def made(name="zb-h1", policy="memory", outer=1, **words):
    plan = build_plan(name, Request(2, 4))
    costs = CostModel.of_ranks(plan.placement)
    stages = model(plan.placement, 2, outer=outer)
    residency = asked(SHARDED, policy, 2, **words)
    return add_residency(lower(plan, costs), stages, residency, costs), costs, stages, residency


def edited(plan, rank, old, new):
    texts = " ".join(row_texts(plan.rows[rank]))
    assert old in texts
    rows = list(plan.rows)
    rows[rank] = parse_row(texts.replace(old, new, 1).split())
    return dataclasses.replace(plan, rows=tuple(rows))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0RESHARD[2:3].2 ", "", "unit embedding is gathered already"),
        ("0UNSHARD[0:1].2 ", "", "place 3, 0RESHARD\\[0:1\\].3: unit 0.0 is not gathered"),
        ("0UNSHARD[2:3]", "0UNSHARD[3:4]", "stage 0 has 3 units"),
        ("0UNSHARD[2:3]", "1UNSHARD[2:3]", "the stage is not on this rank"),
        ("0RESHARD[2:3].2", "0RESHARD[2:3].9 0RESHARD[2:3].2", "stands behind one of a later moment"),
        ("0W0 ", "0W0 0REDUCE[0:1] ", "comes before 2 microbatches were added to unit 0.0"),
    ],
)
def test_what_a_plan_itself_forbids(old, new, message):
    plan, costs, *_ = made()
    verify(plan, costs)
    with pytest.raises(PlanError, match=message):
        verify(edited(plan, 0, old, new), costs)


def test_a_missing_reduction_and_a_gather_that_stays():
    plan, costs, *_ = made()
    last = row_texts(plan.rows[0])[-1]
    with pytest.raises(PlanError, match="is reduced 3 times, its microbatches are in 4 groups"):
        verify(edited(plan, 0, last, ""), costs)
    dropped = [op for op in plan.rows[1] if op != parse_op("1RESHARD[0:1]")]
    rows = (plan.rows[0], tuple(dropped))
    with pytest.raises(PlanError, match="gathered"):
        verify(dataclasses.replace(plan, rows=rows), costs)


def test_a_plan_says_what_it_gathers():
    plan, costs, *_ = made()
    with pytest.raises(PlanError, match="does not say which: it has no `residency`"):
        verify(dataclasses.replace(plan, residency=None), costs)
    words = dataclasses.replace(plan.residency, units=plan.residency.units[:1])
    with pytest.raises(PlanError, match="units of 1 stages, and 2 stages"):
        verify(dataclasses.replace(plan, residency=words), costs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"units": (("0.0", "0.1", "other"), ("1.0", "1.1", "head"))}, "made for units .*other"),
        ({"groups": ShardPlace(inner_size=8).groups}, "made for ranks '8 ranks', here are '4 ranks'"),
        ({"strategy": "optim_grads"}, "made for strategy 'optim_grads'"),
        ({"policy": "step"}, "made for policy 'step'"),
    ],
)
def test_a_plan_for_something_else_is_refused(changed, message):
    plan, costs, stages, residency = made()
    foreign = dataclasses.replace(plan, residency=dataclasses.replace(plan.residency, **changed))
    with pytest.raises(PlanError, match=message):
        verify(foreign, costs, stages=stages, residency=residency)


def test_no_peers_no_operations():
    plan, costs, _, residency = made()
    alone = model(plan.placement, 2, ways=1)
    with pytest.raises(PlanError, match="no data parallel peers"):
        verify(plan, costs, stages=alone, residency=residency)


def test_more_than_the_policy_allows_is_refused():
    plan, costs, stages, residency = made("1f1b", "budget", budget=40)
    smaller = dataclasses.replace(residency, budget=(5, 5))
    with pytest.raises(PlanError, match="are allowed"):
        verify(plan, costs, stages=stages, residency=smaller)
    limited = dataclasses.replace(residency, budget=None, limit=(100.0, 100.0))
    with pytest.raises(PlanError, match="bytes are held, the limit is 100"):
        verify(plan, costs, stages=stages, residency=limited)
    kept, costs, stages, residency = made("1f1b", "step")
    kept = dataclasses.replace(kept, residency=dataclasses.replace(kept.residency, policy="memory"))
    with pytest.raises(PlanError, match="gathers in a row, policy memory has"):
        verify(kept, costs, stages=stages, residency=dataclasses.replace(residency, policy="memory"))


def test_parts_of_a_w():
    plan, costs, *_ = made("zb-h1", "step", overlap_reduce=False)
    split = edited(plan, 0, "0W3", "0W3[2:3] 0W3[0:2]")
    verify(split, costs)
    for parts, message in (
        ("0W3[2:3]", "0W3 is missing"),
        ("0W3[0:2] 0W3[1:3]", r"0W3\[1:3\]: is there twice"),
        ("0W3[0:2] 0W3", "0W3: is there twice"),
        ("0W3[0:2] 0W3[2:4]", "stage 0 has 3 units"),
    ):
        with pytest.raises(PlanError, match=message):
            verify(edited(plan, 0, "0W3", parts), costs)
    late = edited(edited(plan, 0, "0W3", "0W3[2:3] 0W2[0:2] 0W3[0:2]"), 0, "0W2 ", "0W2[2:3] ")
    verify(late, costs)
    swapped = edited(edited(plan, 0, "0W3", "0W3[2:3] 0W3[0:2] 0W2[0:2]"), 0, "0W2 ", "0W2[2:3] ")
    with pytest.raises(PlanError, match="must be added in increasing microbatch order"):
        verify(swapped, costs)
    with pytest.raises(PlanError, match="does not say which units"):
        verify(dataclasses.replace(split, residency=None), costs)


def test_texts_of_operations():
    for text in ("0UNSHARD[3:4].2", "0W7[2:4]", "12HSDP_ALL_REDUCE[0:1]", "0REDUCE"):
        assert row_texts([parse_op(text)]) == [text]
    row = parse_row(["(0F3;7UNSHARD[0:1];7RESHARD[1:2].3;7BW1)"])
    assert row_texts(row) == ["(0F3;7UNSHARD[0:1];7RESHARD[1:2].3;7BW1)"]


def test_files_say_what_they_are_for():
    plan, *_ = made("zbv", "step", outer=2)
    assert from_json(to_json(plan)) == plan
    content = json.loads(to_json(plan))
    assert content["residency"]["grouping"] == [["4*1"] * 3, ["4*1"] * 2, ["4*1"] * 2, ["4*1"] * 3]
    assert plan_hash(dataclasses.replace(plan, residency=None)) != plan_hash(plan)
    content["residency"]["ways"] = 2
    with pytest.raises(PlanError, match="it was changed"):
        from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ways", 0, r"residency.ways.* an integer"),
        ("ways", True, r"residency.ways.* an integer"),
        ("ways", "4", r"residency.ways.* an integer"),
        ("outer_optimizer", 1, r"residency.outer_optimizer.*true or false"),
        ("strategy", "zero", r"residency.strategy.*one of"),
        ("policy", ["memory"], r"residency.policy.*one of"),
        ("units", [["a", 1]], r"residency.units.*text"),
        ("units", "ab", r"residency.units.*array"),
        ("grouping", [["1*999999999"]], "more groups of microbatches than operations"),
        ("grouping", [["1-4"]], "is no list of groups"),
        ("more", 1, r"residency.*more"),
    ],
)
def test_hostile_words_are_refused(field, value, message):
    plan, *_ = made()
    content = plan.residency.as_json() | {field: value}
    with pytest.raises(ValueError, match=message):
        PlannedResidency.from_json(content, plan.num_ops)
    whole = json.loads(to_json(plan)) | {"residency": content}
    with pytest.raises(PlanError, match="header is wrong"):
        from_json(json.dumps(whole))
