"""NaN and infinity: one decision on all ranks, before any weight changes."""

import json
import re

import pytest

from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty.py"
FLAGS = [*launch.TINY, "--train-iters", "6", "--save", "ck", "--save-interval", "3"]


def faulty(tmp_path, *flags, ranks=1):
    return launch.run_forked([*FLAGS, *flags], script=FAULTY, ranks=ranks, cwd=tmp_path)


def saved(tmp_path):
    return sorted(path.name for path in (tmp_path / "ck").glob("iter_*"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Ranks -> folder and run in which nothing goes wrong."""
    out = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"clean{ranks}")
        out[ranks] = (folder, launch.ok(launch.run_forked(FLAGS, ranks=ranks, cwd=folder)))
    return out


@pytest.mark.grid
@pytest.mark.parametrize(
    ("ranks", "rank", "where"),
    [(1, 0, "loss"), (1, 0, "grad"), (2, 1, "loss"), (2, 1, "grad"), (2, 0, "grad")],
)
def test_abort_names_rank_and_place(tmp_path, ranks, rank, where):
    flags = f"--inject-nan-iteration 5 --inject-nan-rank {rank} --inject-where {where} --inject-microbatch 1".split()
    run = launch.ended(faulty(tmp_path, *flags, ranks=ranks), 5)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["iteration"], record["checkpoint"]) == (5, 4, "ck/iter_0000003")
    assert not record["requeue"]
    what = rf"the loss of microbatch 1 and the gradient of (?:decoder|embedding)\.[\w.]+ are not finite on rank {rank}"
    if where == "grad":
        what = rf"the gradient of (?:decoder|embedding)\.[\w.]+ is not finite on rank {rank}"
    assert re.search(f"iteration 5: {what}", record["reason"]), record["reason"]
    assert record["reason"] in run.output
    assert run.output.count("error (non finite") == 1  # every rank knows, one says it
    assert "Traceback" not in run.output
    assert saved(tmp_path) == ["iter_0000003"]


@pytest.mark.grid
def test_skip_leaves_weights_and_optimizer_alone(tmp_path):
    """Skipped from the second iteration on: what is saved after the third is what is saved after the first."""
    flags = "--inject-nan-iteration 2 --inject-lasts 9 --nan-policy skip --inject-nan-rank 1".split()
    run = launch.ok(faulty(tmp_path, *flags, "--save-interval", "1", ranks=2))
    first = launch.digests(tmp_path / "ck", 1)
    assert all(launch.digests(tmp_path / "ck", n) == first for n in range(2, 7))
    states = [
        json.loads((tmp_path / "ck" / f"iter_{n:07d}" / "manifest.json").read_text())["common"]
        for n in (1, 6)
    ]
    assert states[0]["optimizer"] == states[1]["optimizer"]
    assert states[0]["scheduler"] == states[1]["scheduler"]
    assert states[1]["nan_policy"] == {"consecutive_skips": 5}
    assert list(run.losses()) == [1]
    assert run.output.count("number of skipped iterations:   1 | number of nan iterations:   1") == 5


@pytest.mark.grid
def test_skipping_has_a_limit(tmp_path):
    flags = "--inject-nan-iteration 2 --inject-lasts 9 --nan-policy skip --nan-max-skips 2".split()
    launch.ended(faulty(tmp_path, *flags), 5)
    record = launch.exit_record(tmp_path / "ck")
    assert record["iteration"] == 3
    assert "3 non-finite steps in a row, --nan-max-skips is 2" in record["reason"]


@pytest.mark.grid
def test_skips_in_a_row_survive_a_restart(tmp_path):
    flags = [
        *"--inject-nan-iteration 2 --inject-lasts 9 --nan-policy skip --nan-max-skips 3 --load ck".split()
    ]
    launch.ok(faulty(tmp_path, *flags, "--exit-interval", "3"))
    launch.ended(faulty(tmp_path, *flags), 5)
    assert launch.exit_record(tmp_path / "ck")["iteration"] == 4


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "where"), [(1, "grad"), (2, "loss")])
def test_transient_fault_is_run_again(tmp_path, clean, ranks, where):
    flags = f"--inject-nan-iteration 4 --inject-how once --inject-where {where} --inject-nan-rank {ranks - 1}".split()
    run = launch.ok(faulty(tmp_path, *flags, "--nan-policy", "rerun-once", ranks=ranks))
    folder, undisturbed = clean[ranks]
    assert "iteration 4: transient fault: the second run of the step is finite and is used" in run.output
    assert run.losses() == undisturbed.losses()
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(folder / "ck", 6)


@pytest.mark.grid
@pytest.mark.parametrize(("how", "status"), [("same", 16), ("different", 17)])
def test_persistent_and_different_results(tmp_path, clean, how, status):
    flags = f"--inject-nan-iteration 5 --inject-how {how} --inject-nan-rank 1 --nan-policy rerun-once".split()
    launch.ended(faulty(tmp_path, *flags, ranks=2), status)
    record = launch.exit_record(tmp_path / "ck")
    assert record["requeue"] == (status == 16)
    if status == 17:
        assert saved(tmp_path) == ["iter_0000003"]
        return
    # The state before the step was kept: another machine goes on from it as if nothing had been.
    assert record["checkpoint"] == "ck/iter_0000004"
    folder, undisturbed = clean[2]
    run = launch.ok(launch.run_forked([*FLAGS, "--load", "ck"], ranks=2, cwd=tmp_path))
    assert run.losses() == {n: undisturbed.losses()[n] for n in (5, 6)}
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(folder / "ck", 6)


@pytest.mark.grid
def test_fp16_overflow_lowers_the_scale_and_goes_on(tmp_path):
    flags = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --nan-policy abort --train-iters 8".split()
    run = launch.ok(launch.run_forked([*FLAGS, *flags], ranks=2, cwd=tmp_path))
    scales = [float(scale) for scale in re.findall(r"loss scale: (\S+) \|", run.output)]
    assert scales[0] == 4194304.0
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] < scales[0]
    skipped = [int(n) for n in re.findall(r"number of skipped iterations: +(\d+)", run.output)]
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert run.losses()


@pytest.mark.grid
def test_the_check_can_be_turned_off(tmp_path):
    flags = "--inject-nan-iteration 5 --no-check-for-nan-in-loss-and-grad".split()
    run = launch.ended(faulty(tmp_path, *flags), 5)  # the step is taken, as asked; its weights are looked at
    assert "iteration 5: the weight of embedding.word_embeddings.weight is NaN on rank 0" in run.output
    assert launch.exit_record(tmp_path / "ck")["checkpoint"] == "ck/iter_0000003"
    assert saved(tmp_path) == ["iter_0000003"]
