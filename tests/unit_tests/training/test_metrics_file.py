import json
import math
import os

import pytest

from megatron.training.report.metrics_file import MetricsFile, read_metrics


def iterations(path):
    return [r["iteration"] for r in read_metrics(path)]


def write(path, upto, resumed=0, **kw):
    file = MetricsFile(path, resumed_iteration=resumed)
    for i in range(resumed + 1, upto + 1):
        file.record({"lm loss": 10.0 - i, **kw}, i, i * 8)
    file.close()
    return file


def test_one_line_per_iteration(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    file = MetricsFile(path)
    file.record({"forward-time": 0.5, "lm loss": 2.5, "num-zeros": 3}, 1, 8)
    file.record({"a": 1.0}, 2)
    file.record({"b": 2.0}, 3)
    file.event("checkpoint", 3, path="x")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time") > 1.7e9
    assert lines == [
        {"iteration": 1, "forward-time": 0.5, "lm loss": 2.5, "num-zeros": 3, "consumed_samples": 8},
        {"iteration": 2, "a": 1.0},
        {"iteration": 3, "b": 2.0},
        {"event": "checkpoint", "iteration": 3, "path": "x"},
    ]
    file.close()


def test_not_finite_values_are_valid_json_and_come_back(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    file.record({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    file.close()
    line = path.read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_every_line_is_on_its_way_at_once(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.record({"a": 1.0}, 1)
    assert iterations(tmp_path / "m.jsonl") == [1], "a killed run keeps what it had written"
    file.close()


def test_resume_drops_what_is_trained_again(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 15)
    with open(path, "a") as file:
        file.write('{"iteration": 16, "lm lo')  # cut short by a kill
    resumed = write(path, 12, resumed=10, again=1.0)
    assert iterations(path) == list(range(1, 13))
    assert [r.get("again") for r in read_metrics(path)][9:] == [None, 1.0, 1.0]
    assert "10 lines kept, 6 after iteration 10 dropped" in resumed.note
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_resume_into_a_new_folder_starts_a_file(tmp_path):
    write(tmp_path / "m.jsonl", 12, resumed=10)
    assert iterations(tmp_path / "m.jsonl") == [11, 12]


def test_a_run_from_scratch_keeps_the_earlier_record(tmp_path):
    for length in (3, 4, 5):
        note = write(tmp_path / "metrics.jsonl", length).note
    assert "metrics.old-2.jsonl" in note
    assert len(iterations(tmp_path / "metrics.jsonl")) == 5
    assert len(iterations(tmp_path / "metrics.old-1.jsonl")) == 3
    assert len(iterations(tmp_path / "metrics.old-2.jsonl")) == 4


def test_damage_is_named_except_a_last_line_cut_short(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2')
    assert iterations(path) == [1]
    path.write_text('{"iteration": 1}\nnonsense\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: not a JSON object"):
        list(read_metrics(path))


@pytest.mark.parametrize("resumed", [0, 3])
@pytest.mark.parametrize("content", [None, "", '{"iteration": 1}\n'])
def test_a_planted_link_is_refused(tmp_path, resumed, content):
    target, path = tmp_path / "target", tmp_path / "metrics.jsonl"
    if content is not None:
        target.write_text(content)
    path.symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic link"):
        MetricsFile(path, resumed_iteration=resumed)
    assert (target.read_text() if target.exists() else None) == content


def test_names_of_kept_records_that_are_links_to_nowhere_are_passed_over(tmp_path):
    (tmp_path / "metrics.old-1.jsonl").symlink_to(tmp_path / "nowhere")
    write(tmp_path / "metrics.jsonl", 2)
    assert "kept as metrics.old-2.jsonl" in write(tmp_path / "metrics.jsonl", 3).note
