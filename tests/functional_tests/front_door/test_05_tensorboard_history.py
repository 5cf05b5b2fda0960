"""TensorBoard's history over resumes, read by TensorBoard's own reader: whole, and one value a step on either axis."""

import pytest

from tests.harness import launch

FLAGS = [*launch.TINY, *"--save ck --load ck --save-interval 2 --tensorboard-dir tb".split()]


@pytest.fixture(autouse=True, scope="module")
def _imported_once():
    """Here, so that no forked run has to."""
    pytest.importorskip("torch.utils.tensorboard")


def run(tmp_path, words):
    return launch.ok(launch.run_forked([*FLAGS, *words.split()], cwd=tmp_path))


def history(tmp_path):
    """tag -> its steps, in the order of time."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tb"), {accumulator.SCALARS: 0})
    events.Reload()
    return {tag: [point.step for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def check(tmp_path, num_iterations):
    found = history(tmp_path)
    iterations = list(range(1, num_iterations + 1))
    for tag in ("lm loss", "grad-norm", "learning-rate"):
        assert found[tag] == iterations
        assert found[f"{tag} vs samples"] == [8 * iteration for iteration in iterations]


@pytest.mark.grid
def test_nothing_is_purged_where_a_run_goes_on(tmp_path):
    for end in (2, 4, 6):
        run(tmp_path, f"--train-iters 6 --exit-interval {end}")
        check(tmp_path, end)


@pytest.mark.grid
def test_what_is_trained_again_is_there_once(tmp_path):
    """Back by one iteration, and then by more than an attempt: over two files."""
    timers = "--timing-log-level 1 --log-timers-to-tensorboard --override-opt_param-scheduler"
    run(tmp_path, f"--train-iters 3 {timers} --save-interval 1")
    run(tmp_path, f"--train-iters 5 {timers} --ckpt-step 2 --save-interval 1")
    check(tmp_path, 5)
    finished = run(tmp_path, f"--train-iters 4 {timers} --ckpt-step 1")
    check(tmp_path, 4)
    assert history(tmp_path)["optimizer-time"] == [1, 2, 3, 4]
    assert " > TensorBoard: tb (what 2 files had after iteration 1 is dropped)" in finished.output


def test_files_are_cut_where_user_code_counts_what_it_likes(tmp_path):
    """Steps of a user's tag say nothing of iterations: what was written before the place stays."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    from megatron.training.report.writers import drop_after

    with writer(str(tmp_path / "tb")) as events:
        for iteration in range(1, 6):
            events.add_scalar("tokens", 1.0, 1000 * iteration)
            events.add_scalar("lm loss", 2.0, iteration)
            events.add_scalar("lm loss vs samples", 2.0, 8 * iteration)
            events.add_scalar("optimizer-time", 2.0, iteration)
    path = next((tmp_path / "tb").iterdir())
    with open(path, "ab") as file:
        file.write(b"\x09\x00\x00")  # a kill cut the last record short
    assert drop_after(str(tmp_path / "tb"), 3).startswith(" (what 1 files had")
    assert drop_after(str(tmp_path / "tb"), 3) == ""
    assert history(tmp_path) == {
        "tokens": [1000, 2000, 3000, 4000],  # of iteration 4: it came before that iteration's record
        "lm loss": [1, 2, 3],
        "lm loss vs samples": [8, 16, 24],
        "optimizer-time": [1, 2, 3],
    }


def test_links_are_not_followed_and_remote_folders_are_told(tmp_path):
    from megatron.core.safe_files import UnsafeFileError
    from megatron.training.report.writers import drop_after

    (tmp_path / "other").write_bytes(b"somebody's")
    (tmp_path / "events.out.tfevents.1.host.1.0").symlink_to(tmp_path / "other")
    with pytest.raises(UnsafeFileError):
        drop_after(str(tmp_path), 1)
    assert "not a local folder" in drop_after("gs://bucket/tb", 1)
    assert drop_after(str(tmp_path / "none"), 1) == ""
