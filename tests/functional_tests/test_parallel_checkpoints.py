"""Checkpoints of cut models: runs that go on bit for bit. Layouts that load others' are in test_checkpoint_matrix."""

import functools
import json
import signal

import pytest

from tests.harness import launch
from tests.harness.runs import common_state, copy_checkpoint
from tools import checkpoint

LAYOUTS = {
    "one": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2 x 2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "TP2 x PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
FLAGS = [*launch.TINY, *"--num-layers 4 --save ck --save-interval 3 --load ck".split()]
VOCABULARY = ["--padded-vocab-size", "128"]


def train(folder, layout, *more):
    ranks, flags = LAYOUTS[layout]
    words = [*FLAGS, *VOCABULARY, *flags.split(), *more]
    return launch.ok(launch.run_forked(words, ranks=ranks, cwd=folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """layout -> folder and run of six iterations, saved after the third and the last."""

    @functools.cache
    def one(layout):
        folder = tmp_path_factory.mktemp("trained")
        return folder, train(folder, layout, "--train-iters", "6")

    return one


def copy_of_third(trained, layout, folder):
    """A run's checkpoint of iteration 3, as if the run had ended there."""
    source, _ = trained(layout)
    copy_checkpoint(source, folder, 3)
    return launch.digests(source / "ck", 3)


@pytest.mark.grid
@pytest.mark.parametrize(("source", "target"), [("PP2", "PP2"), ("one", "PP2 x 2"), ("PP2", "one")])
def test_a_pipeline_goes_on_bit_for_bit(trained, tmp_path, source, target):
    """Whatever pipeline wrote it and whatever goes on from it: the run of one process that nobody stopped."""
    straight, run = trained("one")
    copy_of_third(trained, source, tmp_path)
    resumed = train(tmp_path, target, "--train-iters", "6")
    assert list(resumed.losses()) == [4, 5, 6]
    assert resumed.losses() == {n: text for n, text in run.losses().items() if n > 3}
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(straight / "ck", 6)
    assert common_state(tmp_path, 6)["train_state"] == common_state(straight, 6)["train_state"]


@pytest.mark.grid
@pytest.mark.parametrize("layout", ["TP2", pytest.param("TP2 x PP2", marks=pytest.mark.full)])
def test_tensor_parallel_ranks_go_on_bit_for_bit(trained, tmp_path, layout):
    straight, run = trained(layout)
    copy_of_third(trained, layout, tmp_path)
    resumed = train(tmp_path, layout, "--train-iters", "6")
    assert resumed.losses() == {n: text for n, text in run.losses().items() if n > 3}
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(straight / "ck", 6)


@pytest.mark.grid
def test_the_vocabulary_of_the_checkpoint_holds(tmp_path):
    """Padded for two tensor parallel ranks, loaded by one process, which would pad to half of it."""
    two, one = (LAYOUTS[name] for name in ("TP2", "one"))
    for (ranks, flags), last in ((two, 3), (one, 6)):
        words = [*FLAGS, "--train-iters", "6", "--exit-interval", str(last), *flags.split()]
        run = launch.ok(launch.run_forked(words, ranks=ranks, cwd=tmp_path))
        assert "padded vocab (size: 128) with 128 dummy tokens (new size: 256)" in run.output
    assert list(run.losses()) == [4, 5, 6]


@pytest.mark.grid
def test_stopped_by_a_signal(tmp_path):
    """All stages stop after the same iteration, once it is saved; going on is as if nobody had stopped them."""
    endless = [
        *FLAGS,
        *VOCABULARY,
        *LAYOUTS["PP2"][1].split(),
        "--train-iters",
        "100000",
        "--save-interval",
        "100000",
    ]
    with launch.forked([*endless, "--async-save"], ranks=2, cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        group.signal(signal.SIGTERM, 0)  # one is enough
        run = launch.ended(group.wait(), 75)
    record = launch.exit_record(tmp_path / "ck")
    stopped = record["iteration"]
    assert (record["status"], record["requeue"], record["checkpoint"]) == (75, True, f"ck/iter_{stopped:07d}")
    assert max(run.losses()) == stopped
    last = ["--exit-interval", str(stopped + 3)]
    (tmp_path / "straight").mkdir()
    for folder in (tmp_path, tmp_path / "straight"):
        launch.ok(launch.run_forked([*endless, *last], ranks=2, cwd=folder))
    assert launch.digests(tmp_path / "ck", stopped + 3) == launch.digests(
        tmp_path / "straight" / "ck", stopped + 3
    )


@pytest.mark.grid
def test_every_tensor_is_saved_once_under_its_global_name(trained, capsys):
    """Whoever wrote it; and the tool that checks a checkpoint finds it whole."""
    folders = [trained(layout)[0] / "ck" for layout in ("TP2 x PP2", "one")]
    manifests = [json.loads((folder / "iter_0000006" / "manifest.json").read_text()) for folder in folders]
    shapes = [{name: tensor["shape"] for name, tensor in m["tensors"].items()} for m in manifests]
    assert shapes[0] == shapes[1]
    assert any(len(tensor["chunks"]) == 2 for tensor in manifests[0]["tensors"].values())
    assert checkpoint.main(["inspect", str(folders[0]), "--verify"]) == 0
    assert "6" in capsys.readouterr().out
