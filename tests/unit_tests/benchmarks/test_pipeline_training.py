"""The benchmark of pipelined training steps: all contestants do the same work, ours by plans solved for what was
measured. No times are judged here."""

import json

import pytest

from benchmarks import pipeline_training
from benchmarks.pipeline_contestants import Work
from benchmarks.pipeline_training import check_same_work, main, ratios
from megatron.core.models.gpt.stage_layers import StageLayersError

CONTESTANTS = ["ours 1f1b", "ours zbv", "torch 1f1b", "torch zbv"]


def layers_of(work, schedule):
    return [len(spec.layers) for spec in work.config(schedule, 0).planner().spec.stages]


@pytest.mark.grid
def test_all_contestants_train_alike_and_ours_to_the_bit(tmp_path, monkeypatch, capsys):
    small = {"layers": 4, "hidden": 32, "heads": 4, "seq": 32, "vocab": 256}
    monkeypatch.setitem(pipeline_training.SIZES, "tiny", small)
    out = tmp_path / "out.json"
    words = "--size tiny --ours 1f1b zbv --torch 1f1b zbv --dtypes fp32 --measure 2 --steps 2 --timeout 60"
    (case,) = main(
        [*words.split(), "--json", str(out), "--log-pipeline-timeline", str(tmp_path / "timeline")]
    )
    assert list(case["losses"]) == CONTESTANTS
    # one step to warm up, two measured, two timed; the model learns, so that equal losses mean equal steps
    assert case["losses"]["ours 1f1b"] == case["losses"]["ours zbv"]
    assert len(case["losses"]["torch zbv"]) == 5
    assert case["losses"]["ours 1f1b"][-1] < case["losses"]["ours 1f1b"][0]
    for figures in ("wall_s", "cpu_s"):
        assert all(case[figures][name] > 0 for name in CONTESTANTS)
    assert set(case["wall_ratios"]) == set(case["cpu_ratios"])
    assert {"ours zbv / ours 1f1b", "ours zbv / torch zbv", "ours 1f1b / torch 1f1b"} <= set(
        case["wall_ratios"]
    )
    zbv, line = case["solved"]["ours zbv"], case["solved"]["ours 1f1b"]
    assert len(zbv["f_ms"]) == 4
    assert len(line["f_ms"]) == 2
    assert all(one > 0 for one in zbv["f_ms"] + zbv["b_ms"] + zbv["w_ms"])
    assert line["kept"] == "1f1b is a fixed order"
    assert json.loads(out.read_text())["cases"] == [json.loads(json.dumps(case))]
    assert sorted(one.name for one in (tmp_path / "timeline/fp32").iterdir()) == ["1f1b", "zbv"]
    assert "ours zbv / torch zbv" in capsys.readouterr().out


def test_splits_of_layers_hold_for_both_sides():
    """Peers take their stages from ours."""
    work = Work(layers=8, hidden=32, heads=4, seq=32, vocab=256)
    assert layers_of(work, "1f1b") == [4, 4]
    assert layers_of(work, "zbv") == [2, 2, 2, 2]
    uneven = Work(layers=8, hidden=32, heads=4, seq=32, vocab=256, line=(5, 3), v=(2, 3, 2, 1))
    assert layers_of(uneven, "1f1b") == [5, 3]
    assert layers_of(uneven, "zbv") == [2, 3, 2, 1]
    wrong = Work(layers=8, hidden=32, heads=4, seq=32, vocab=256, v=(4, 4))
    with pytest.raises((StageLayersError, ValueError), match="stages"):
        layers_of(wrong, "zbv")


def test_other_work_is_refused():
    check_same_work({"a": [1.0, 2.0], "b": [1.00001, 2.0]}, 1e-4)
    with pytest.raises(SystemExit, match="losses of step 1"):
        check_same_work({"a": [1.0, 2.0], "b": [1.0, 2.1]}, 1e-4)
    with pytest.raises(SystemExit, match="not the same work"):
        check_same_work({"a": [1.0], "b": [float("nan")]}, 1e-4)


def test_ratios_are_medians_of_pairs():
    times = {"ours 1f1b": [1.0, 2.0, 10.0], "ours zbv": [0.5, 2.0, 9.0], "torch zbv": [2.0, 2.0, 10.0]}
    assert ratios(times) == {
        "ours 1f1b / torch zbv": 1.0,
        "ours zbv / ours 1f1b": 0.9,
        "ours zbv / torch zbv": 0.9,
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--global-batch 3 --micro-batch 2", "multiple"),
        ("--steps 0", "--steps"),
        ("--measure -1", "--measure"),
        ("--torch gpipe", "gpipe"),
    ],
)
def test_refusals(words, named, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert named in capsys.readouterr().err
