"""tools/describe_model.py: what ranks hold and what their microbatches take, as text and as JSON."""

import json

from tests.harness.launch_lines import SMALL
from tools.describe_model import main

LINE = [*SMALL, *"--global-batch-size 16 --padded-vocab-size 386 --pipeline-model-parallel-size 2".split()]


def test_one_rank_of_every_pipeline_rank_with_its_modules(capsys):
    assert main(["--ranks", "4", "--json", "--", *LINE]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(row["rank"], row["stages"]) for row in ranks] == [(0, [0]), (2, [1])]
    for row in ranks:
        assert row["at_rest_bytes"] == sum(row["by_kind"].values())
        parameters = sum(one["parameters"] for one in row["by_module"].values())
        assert 0 <= row["by_kind"]["weights"] - 4 * parameters < 4000  # what aligns buckets
        kept = sum(one["activation_bytes"] for one in row["by_module"].values())
        assert 0 < kept <= row["kept_bytes"]


def test_what_does_not_fit_is_told(capsys):
    assert main(["--ranks", "3", "--", *LINE]) == 2
    assert "3 ranks" in capsys.readouterr().err
