"""Number 7: `--check-config` judges a line whose checkpoint is on another machine, and says what it cannot know."""

import json

import pytest

from megatron.training.run import arguments
from megatron.training.run.arguments import launch_config

LINE = "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data".split()
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32".split()


def checked(capfd, *words):
    """(status, JSON object) of --check-config."""
    with pytest.raises(SystemExit) as ended:
        launch_config(["--check-config", "--json", *LINE, *words])
    return ended.value.code, json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("flag", ["--finetune", "--exit-on-missing-checkpoint", "--ckpt-step=7"])
def test_a_flag_that_needs_a_checkpoint_is_no_problem_where_it_is_not(capfd, flag):
    status, told = checked(capfd, *SHAPE, "--load", "/somewhere/else", flag)
    assert (status, told["problems"]) == (0, [])
    assert told["not_found"] == ["--load /somewhere/else"]
    (note,) = [note for note in told["notes"] if "--load" in note]
    assert note.startswith("--load /somewhere/else: not on this machine: whether it can be loaded")
    assert told["parameters"]["total"] > 0


def test_a_shape_that_the_checkpoint_has_is_not_known(capfd):
    words = ["--load", "/somewhere/else", "--use-checkpoint-args"]
    status, told = checked(capfd, *words)
    assert (status, told["problems"]) == (0, [])
    assert told["not_found"] == ["--load /somewhere/else"]
    assert told["parameters"]["why"] == "the model's shape is the checkpoint's, which is not on this machine"
    assert any("whatever the flags say, are not known" in note for note in told["notes"])
    # Flags that the checkpoint's values replace cannot be judged: all others are.
    status, told = checked(capfd, *words, "--num-attention-heads", "3", "--hidden-size", "64")
    assert (status, told["problems"]) == (0, [])
    status, told = checked(
        capfd, *words, "--bf16", "--fp16", "--global-batch-size", "3", "--mtp-num-layers", "2"
    )
    assert status == 2
    flags = {flag for problem in told["problems"] for flag in problem["flags"]}
    assert {"--bf16", "--global-batch-size", "--mtp-num-layers"} <= flags
    status, told = checked(capfd, *words, "--data-args-path", "/")
    assert (status, [problem["rule"] for problem in told["problems"]][-1:]) == (2, ["files"])


@pytest.mark.parametrize("shape", [[], SHAPE])
def test_the_page_states_nothing_that_only_the_checkpoint_knows(capfd, monkeypatch, shape):
    """It computed parameters, memory and FLOPs of flags that do not count, tokens of a length of 0, and named the
    vocabulary of a default tokenizer."""
    words = [*LINE, *shape, "--global-batch-size", "8", "--load", "/somewhere/else", "--use-checkpoint-args"]
    monkeypatch.setattr(arguments, "_columns", lambda fd: 400)
    with pytest.raises(SystemExit) as ended:
        launch_config(["--check-config", *words])
    assert ended.value.code == 0
    rows = (line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines())
    page = dict(row for row in rows if len(row) == 2)
    why = "not known: the model's shape is the checkpoint's, which is not on this machine"
    for label in ("model", "parameters", "pipeline", "memory", "compute"):
        assert page[label] == why
    assert page["data"] == "mock data; tokenizer not known"
    # The length is this line's where it is given, else the checkpoint's.
    step, run = ("8 samples a step, tokens not known", "80 samples, tokens not known")
    if shape:
        step, run = "8 samples = 256 tokens a step", "80 samples, 2,560 tokens"
    assert page["batch"] == f"{step}: 1 replica x 4 microbatches of 2"
    assert page["training"] == f"10 steps, {run}"
    status, told = checked(capfd, *words)
    assert (status, told["pipeline"], told["parameters"]["total"]) == (0, None, None)


def test_what_is_here_is_judged_as_before(capfd, tmp_path):
    status, told = checked(capfd, *SHAPE, "--load", str(tmp_path), "--finetune")
    assert status == 2
    assert "no checkpoint in" in told["problems"][0]["message"]
    status, told = checked(capfd, "--load", str(tmp_path), "--use-checkpoint-args")
    assert status == 2
    assert any("no checkpoint in" in warning for warning in told["warnings"])


def test_a_launch_still_needs_it(capfd, tmp_path):
    with pytest.raises(SystemExit) as ended:
        launch_config([*LINE, *SHAPE, "--load", str(tmp_path / "none"), "--finetune"])
    assert ended.value.code == 3
    assert "--finetune needs one" in capfd.readouterr().err
