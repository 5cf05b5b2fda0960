"""Trainers and configuration files that users write."""

import pytest

from tests.harness import launch

EXAMPLE = "examples/custom_trainer/pretrain_small_mlp_lm.py"


@pytest.mark.grid
def test_custom_trainer_as_its_docstring_says(tmp_path):
    text = (launch.ROOT / EXAMPLE).read_text()
    line = (
        text.partition("launch.py --nproc-per-node 2 -- ")[2].partition('"""')[0].replace("\\\n", " ").split()
    )
    assert line[0] == EXAMPLE
    words = [*line[1:], "--save", "ck", "--save-interval", "10", "--load", "ck"]
    run = launch.ok(launch.run_forked(words, script=EXAMPLE, ranks=2, cwd=tmp_path))
    losses = [float(text.split()[0]) for text in run.losses().values()]
    assert list(run.losses()) == [1, 5, 10, 15, 20]
    assert losses[-1] < losses[0]
    for noise in ("Traceback", "Exception", "terminate called"):
        assert noise not in run.output, run.output
    assert run.output.count("building a model that looks back 4 tokens ...") == 1
    again = [*words, "--train-iters", "22", "--override-opt_param-scheduler", "--log-interval", "1"]
    assert list(launch.ok(launch.run_forked(again, script=EXAMPLE, ranks=2, cwd=tmp_path)).losses()) == [
        21,
        22,
    ]


@pytest.mark.grid
def test_yaml_file_with_the_command_line_on_top(tmp_path):
    names = {}
    words = iter(launch.TINY)
    flat = []
    for word in words:
        if word in ("--mock-data", "--no-create-attention-mask-in-dataloader"):
            flat.append(word)
        else:
            names[word[2:].replace("-", "_")] = next(words)
    lines = [f"{name}: {value}" for name, value in names.items() if name != "lr"]
    (tmp_path / "run.yaml").write_text(
        "\n".join([*lines, "mock_data: true", "optimizer:", "  lr: 0.01", "train_iters: 9"])
    )
    more = ["--yaml-cfg", "run.yaml", "--train-iters", "3", "--no-create-attention-mask-in-dataloader"]
    run = launch.ok(launch.run_forked(more, cwd=tmp_path))
    plain = launch.ok(launch.run_forked([*launch.TINY, "--train-iters", "3"], cwd=tmp_path))
    assert run.losses() == plain.losses()
    assert list(run.losses()) == [1, 2, 3]
