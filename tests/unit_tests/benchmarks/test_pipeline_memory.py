"""The benchmark of pipeline memory: what ranks really hold is what their plans say."""

import json

import pytest

from benchmarks import pipeline_memory
from benchmarks.pipeline_memory import Result, Work, main, measure_all, problems, table

# Layers large beside messages and the nodes of graphs.
WORK = Work(ranks=2, layers=8, num_microbatches=5, hidden=128, heads=2, seq=128, vocab=128)


@pytest.mark.grid
def test_measured_peaks_are_those_of_the_plans():
    """Of a schedule that splits, and whose B's leave more than their F's did, and of one that does not."""
    fused, split = measure_all(WORK, ("1f1b", "v-min"), timeout=120)
    for result in (fused, split):
        assert abs(result.off) <= pipeline_memory.WITHIN, result
        for between, anywhere in zip(result.between, result.anywhere, strict=True):
            assert between <= 1.01 * anywhere  # temporaries of operations on top
    # V-Min's ranks hold alike, 1F1B's first twice as much as its last.
    assert max(split.between) < 1.15 * min(split.between)
    assert max(fused.between) > 1.6 * min(fused.between)
    assert problems([fused, split], ranks=2) == []


def result_of(schedule, planned, between, anywhere):
    return Result(schedule, planned, between, anywhere, ("0F0",) * len(planned))


def test_promises_that_are_not_kept_are_named():
    base = result_of("1f1b", (100, 50), (103, 51), (110, 60))
    half = result_of("v-half", (70, 70), (71, 78), (90, 72))
    assert half.off == pytest.approx(0.1143, abs=1e-4)
    assert half.over(base, "between") == pytest.approx(78 / 103)
    lines = problems([base, half], ranks=4)
    assert lines == [
        "v-half: +11.4 % of its plan",
        "v-half: 0.818 of 1f1b (anywhere), more than 0.8",
    ]
    assert problems([base, half], ranks=2) == lines[:1]  # bounds are of 4 and of 8 ranks
    assert "0.757" in table([base, half]).splitlines()[2]


def test_figures_are_written_and_checked(tmp_path, monkeypatch, capsys):
    base = result_of("1f1b", (100, 50), (100, 50), (100, 50))
    least = result_of("v-min", (70, 70), (70, 70), (70, 70))
    monkeypatch.setattr(pipeline_memory, "measure_all", lambda work, schedules, timeout: [base, least])
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["x", "--ranks", "4", "--flags", "--bf16 --swiglu", "--json", str(out)])
    main()
    told = json.loads(out.read_text())
    assert told["work"]["flags"] == ["--bf16", "--swiglu"]
    assert told["results"][1]["between"] == [70, 70]
    assert told["problems"] == [
        f"v-min: 0.700 of 1f1b ({kind}), more than 0.55" for kind in ("between", "anywhere")
    ]
    assert told["problems"][0] in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["x", "--ranks", "4", "--check"])
    with pytest.raises(SystemExit):
        main()
