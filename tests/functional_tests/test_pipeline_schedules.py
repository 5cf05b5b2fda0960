"""Zero-bubble schedules through the entry script: the quick setting, resumes between schedules, files, refusals."""

import functools

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.text import from_json, to_json
from tests.harness import launch
from tests.harness.runs import copy_checkpoint

# Five layers, which divide over nothing; validation in between and at the end.
FLAGS = [
    *launch.TINY,
    *"--num-layers 5 --train-iters 4 --padded-vocab-size 128 --allow-padding-num-layers".split(),
    *"--save ck --save-interval 2 --load ck --eval-interval 2 --eval-iters 2".split(),
]
PP = "--pipeline-model-parallel-size 2"
RUNS = {
    "one": (1, ""),
    "1f1b": (2, PP),
    "zbv": (2, f"{PP} --zero-bubble-v-schedule"),
    "zb-1p": (2, f"{PP} --enable-zero-bubble"),
}
PLAIN = "tests/functional_tests/trainers/plain_pipeline.py"


def train(folder, name, *more):
    ranks, flags = RUNS[name]
    return launch.ok(launch.run_forked([*FLAGS, *flags.split(), *more], ranks=ranks, cwd=folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A straight run and its folder, by name."""

    @functools.cache
    def one(name):
        folder = tmp_path_factory.mktemp("trained")
        return folder, train(folder, name)

    return one


def validations(run):
    return [line for line in run.output.splitlines() if line.lstrip().startswith("validation loss")]


@pytest.mark.grid
def test_the_quick_setting_runs_on_any_number_of_layers_with_the_bits_of_one_process(trained):
    (alone, one), (folder, zbv) = trained("one"), trained("zbv")
    assert zbv.losses() == one.losses()
    assert list(zbv.losses()) == [1, 2, 3, 4]
    assert validations(zbv) == validations(one)
    assert len(validations(one)) >= 2
    assert launch.digests(folder / "ck", 4) == launch.digests(alone / "ck", 4)
    for line in (
        "stage 0 on pipeline rank 0: embedding, layer 0",
        "stage 1 on pipeline rank 1: layer 1",
        "stage 2 on pipeline rank 1: layers 2-3",
        "stage 3 on pipeline rank 0: layer 4, loss",
    ):
        assert line in zbv.output


@pytest.mark.grid
@pytest.mark.parametrize(("source", "target"), [("1f1b", "zbv"), ("zbv", "zb-1p")])
def test_another_schedule_goes_on_bit_for_bit(trained, tmp_path, source, target):
    """Layers move between ranks, the embedding's second copy comes and goes."""
    straight, run = trained("one")
    copy_checkpoint(trained(source)[0], tmp_path, 2)
    resumed = train(tmp_path, target)
    assert resumed.losses() == {n: text for n, text in run.losses().items() if n > 2}
    assert launch.digests(tmp_path / "ck", 4) == launch.digests(straight / "ck", 4)


@pytest.mark.grid
def test_a_saved_plan_and_auto(trained, tmp_path):
    _, run = trained("one")
    plan = build_plan("v-min", Request(2, 4))
    (tmp_path / "plan.json").write_text(to_json(plan))
    words = [*FLAGS, *PP.split(), "--train-iters", "1", "--eval-iters", "0"]
    filed = launch.ok(
        launch.run_forked([*words, "--pipeline-schedule-file", "plan.json"], ranks=2, cwd=tmp_path / ".")
    )
    assert filed.losses()[1] == run.losses()[1]
    assert '"schedule": "v-min"' in filed.output
    assert plan_hash(from_json(to_json(plan))) == plan_hash(plan)
    (tmp_path / "auto").mkdir()
    auto = launch.ok(
        launch.run_forked([*words, "--pipeline-schedule", "auto"], ranks=2, cwd=tmp_path / "auto")
    )
    assert auto.losses()[1] == run.losses()[1]
    told = [line for line in auto.output.splitlines() if "--pipeline-schedule auto: " in line]
    assert any(line.endswith("chosen") for line in told)
    assert len(told) > 5


def test_a_model_whose_backward_cannot_be_split_is_refused(tmp_path):
    words = [*launch.TINY, *PP.split(), "--train-iters", "2", "--enable-zero-bubble"]
    run = launch.ended(launch.run_forked(words, ranks=2, script=PLAIN, cwd=tmp_path), 2)
    # Both ranks have such parameters: one of them says it.
    assert run.output.count("--enable-zero-bubble (schedule zb-1p) computes weight gradients apart") == 1
    assert "'blocks.0.up.weight'" in run.output or "'embedding.weight'" in run.output
    assert "use --pipeline-schedule 1f1b" in run.output
