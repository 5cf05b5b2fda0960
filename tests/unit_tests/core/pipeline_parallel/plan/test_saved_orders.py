"""Searched orders on disk: made once, read by all, and made again where a file is not what it should be."""

import json
import logging
import multiprocessing

import pytest

from megatron.core.pipeline_parallel.plan import saved_orders
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES

REQUEST = Request(4, 9, memory_limit=(4.0,) * 4)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "indices"


def refuse(request):
    raise AssertionError("searched again")


def saved(folder):
    return list(folder.glob("*-plan-zb-1p.json"))


def test_a_plan_is_searched_for_once(folder):
    plan = build_plan("zb-1p", REQUEST, str(folder))
    (file,) = saved(folder)
    assert plan_hash(saved_orders.saved_or_made("zb-1p", REQUEST, refuse, str(folder))) == plan_hash(plan)
    assert json.loads(file.read_text())["key"]["num_microbatches"] == 9
    with pytest.raises(AssertionError, match="searched again"):
        saved_orders.saved_or_made("zb-1p", Request(4, 10, memory_limit=(4.0,) * 4), refuse, str(folder))


def test_fixed_orders_are_not_kept(folder):
    build_plan("zb-h1", Request(4, 9), str(folder))
    assert not folder.exists()


def test_other_sources_are_another_key(folder, monkeypatch):
    build_plan("zb-1p", REQUEST, str(folder))
    monkeypatch.setattr(saved_orders, "_sources", lambda: "another version")
    build_plan("zb-1p", REQUEST, str(folder))
    assert len(saved(folder)) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "holds", "link"])
def test_what_is_not_the_plan_is_made_again_and_replaced(folder, damage, caplog, tmp_path):
    plan = build_plan("zb-1p", REQUEST, str(folder))
    (file,) = saved(folder)
    text = file.read_text()
    content = json.loads(text)
    if damage == "holds":
        content["plan"] = json.dumps(
            {**json.loads(content["plan"]), "ops": json.loads(_text_of("zb-h2"))["ops"]}
        )
    file.unlink()
    if damage == "link":
        (tmp_path / "elsewhere.json").write_text(text)
        file.symlink_to(tmp_path / "elsewhere.json")
    else:
        damaged = {
            "cut": text[:-40],
            "empty": "{}",
            "other": text.replace('"num_ranks": 4', '"num_ranks": 5'),
        }
        file.write_text(damaged.get(damage, json.dumps(content)))
    with caplog.at_level(logging.WARNING):
        assert plan_hash(build_plan("zb-1p", REQUEST, str(folder))) == plan_hash(plan)
    assert "is not used" in caplog.text
    assert plan_hash(saved_orders.saved_or_made("zb-1p", REQUEST, refuse, str(folder))) == plan_hash(plan)


def _text_of(name):
    from megatron.core.pipeline_parallel.plan.text import to_json

    return to_json(SCHEDULES[name].generate(Request(4, 9)))


def test_a_folder_that_cannot_be_written_is_told_and_searched_without(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert build_plan("zb-1p", REQUEST, str(tmp_path / "file")).schedule == "zb-1p"
    assert "--data-cache-path" in caplog.text


def test_a_request_that_nothing_fits_is_refused_as_without(folder):
    with pytest.raises(PlanError, match="rank 0 may hold"):
        build_plan("zb-1p", Request(4, 9, memory_limit=(0.5,) * 4), str(folder))
    assert not saved(folder)


def _search(folder, barrier, answers):
    made = []

    def make(request):
        made.append(1)
        return build_plan("zb-1p", request)

    barrier.wait()
    plan = saved_orders.saved_or_made("zb-1p", Request(8, 40), make, folder)
    answers.put((len(made), plan_hash(plan)))


def test_of_processes_that_start_together_one_searches(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_search, args=(str(tmp_path), barrier, answers), daemon=True) for _ in range(3)
    ]
    for one in processes:
        one.start()
    found = [answers.get(timeout=60) for _ in processes]
    for one in processes:
        one.join(60)
    assert sum(count for count, _ in found) == 1
    assert len({digest for _, digest in found}) == 1
