"""A run without --save writes runs/<UTC time>-<pid>/ and nothing else; a launch that is refused writes nothing."""

import json
import re

import pytest

from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty.py"
SHORT = [*launch.TINY, "--train-iters", "2"]
NAME = re.compile(r"\d{8}T\d{6}\.\d{3}Z-\d+")


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_two_runs_write_two_folders_that_the_log_names_and_nothing_else(tmp_path):
    folders = []
    for ranks in (1, 2):
        run = launch.ok(launch.run_forked(SHORT, ranks=ranks, cwd=tmp_path))
        folder = launch.run_folder(tmp_path)
        assert NAME.fullmatch(folder.name), folder
        assert run.output.count(f" > run folder: runs/{folder.name}\n") == 1
        assert f" > metrics: runs/{folder.name}/metrics.jsonl" in run.output
        folders.append(folder)
    assert files(tmp_path) == sorted(
        f"runs/{folder.name}/{name}" for folder in folders for name in ("exit.json", "metrics.jsonl")
    )
    for folder in folders:
        assert json.loads((folder / "exit.json").read_text())["reason"] == "trained to the end"


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_leaves_its_record_in_the_folder_that_rank_0_chose(tmp_path, rank):
    flags = [*SHORT, *f"--kill-iteration 2 --fault-rank {rank}".split()]
    run = launch.run_forked(flags, ranks=2, script=FAULTY, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f" > run folder: runs/{folder.name}\n" in run.output
    assert files(tmp_path) == [f"runs/{folder.name}/exit.json", f"runs/{folder.name}/metrics.jsonl"]
    assert launch.exit_record(tmp_path)["rank"] == 1 - rank


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-attention-heads", "5"],  # before torch
        ["--padded-vocab-size", "64"],  # once the tokenizer is known
    ],
)
def test_a_launch_that_is_refused_writes_nothing(tmp_path, flags):
    launch.ended(launch.run_forked([*SHORT, *flags], cwd=tmp_path), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.grid
def test_what_flags_name_goes_where_they_say(tmp_path):
    """--metrics-file, --tensorboard-dir and the pipeline's timeline; exit.json alone is left for the run's folder."""
    flags = [
        *SHORT,
        *"--metrics-file m/run.jsonl --log-pipeline-timeline t --pipeline-model-parallel-size 2".split(),
    ]
    launch.ok(launch.run_forked(flags, ranks=2, cwd=tmp_path))
    folder = launch.run_folder(tmp_path)
    kept = [name for name in files(tmp_path) if not name.startswith("t/")]
    assert kept == ["m/run.jsonl", f"runs/{folder.name}/exit.json"]
