"""Stopping: by a signal, by a flag, at the end. What is left behind must be enough to go on, bit for bit."""

import re
import signal
import time

import pytest

from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty.py"
ENDLESS = [*launch.TINY, "--train-iters", "100000"]
SAVING = ["--save", "ck", "--load", "ck", "--save-interval", "100000"]


def stopped_at(folder):
    record = launch.exit_record(folder / "ck")
    assert record["status"] == 75, record
    assert record["requeue"]
    assert record["checkpoint"] == f"ck/iter_{record['iteration']:07d}"
    return record["iteration"]


def assert_goes_on_bit_for_bit(tmp_path, ranks, stopped):
    """Five more iterations end where a run that nobody stopped ends."""
    last = stopped + 5
    more = ["--exit-interval", str(last)]
    launch.ok(launch.run_forked([*ENDLESS, *SAVING, *more], ranks=ranks, cwd=tmp_path))
    (tmp_path / "straight").mkdir()
    launch.ok(launch.run_forked([*ENDLESS, *SAVING, *more], ranks=ranks, cwd=tmp_path / "straight"))
    assert launch.digests(tmp_path / "ck", last) == launch.digests(tmp_path / "straight" / "ck", last)


@pytest.mark.grid
def test_sigterm_to_torchrun(tmp_path):
    """The launcher forwards the signal; every rank stops after the same iteration, once saved."""
    with launch.started([*ENDLESS, *SAVING], ranks=2, cwd=tmp_path) as process:
        output = launch.read_until(process, lambda line: "iteration        3/" in line)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode != 0  # torchrun's own; exit.json tells the truth
    stopped = stopped_at(tmp_path)
    assert launch.exit_record(tmp_path / "ck")["reason"] == "received SIGTERM"
    assert re.search(r"\[exiting program after receiving SIGTERM\.\] datetime: ", rest), output + rest
    assert_goes_on_bit_for_bit(tmp_path, 2, stopped)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_to_a_single_process(tmp_path, name):
    with launch.forked([*ENDLESS, *SAVING, "--async-save"], cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        group.signal(getattr(signal, name))
        run = launch.ended(group.wait(), 75)
    stopped = stopped_at(tmp_path)
    assert f"[exiting program after receiving {name}.] datetime: " in run.output
    assert max(run.losses()) == stopped
    if name == "SIGTERM":
        assert_goes_on_bit_for_bit(tmp_path, 1, stopped)


@pytest.mark.grid
def test_signal_to_one_rank_only(tmp_path):
    with launch.forked([*ENDLESS, *SAVING], ranks=2, cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        group.signal(signal.SIGTERM, 1)
        output = launch.ended(group.wait(), 75).output
    stopped = stopped_at(tmp_path)
    assert launch.exit_record(tmp_path / "ck")["reason"] == "received SIGTERM"
    told = (f"iteration {stopped:8d}/", "[exiting program after receiving SIGTERM.]", "saving checkpoint at")
    assert sorted(told, key=output.rindex) == list(told), output


@pytest.mark.grid
def test_signal_before_the_first_iteration(tmp_path):
    with launch.forked([*ENDLESS, *SAVING], cwd=tmp_path) as group:
        group.wait_for("threads per rank")
        group.signal(signal.SIGTERM)
        launch.ended(group.wait(), 75)
    assert stopped_at(tmp_path) == 1


@pytest.mark.grid
def test_signal_without_save(tmp_path):
    with launch.forked(ENDLESS, cwd=tmp_path) as group:
        group.wait_for("iteration        1/")
        group.signal(signal.SIGTERM)
        launch.ended(group.wait(), 143)
    record = launch.exit_record(tmp_path)
    assert (record["status"], record["checkpoint"], record["requeue"]) == (143, None, False)


@pytest.mark.parametrize("saved", [True, False])
def test_second_signal_stops_at_once(tmp_path, saved):
    """Rank 0 hangs in its forward: the first signal waits for the iteration, the second does not."""
    flags = [*ENDLESS, *SAVING, "--sleep-iteration", "4", "--fault-rank", "0", "--fault-microbatch", "0"]
    flags += ["--save-interval", "2" if saved else "100000"]
    with launch.forked(flags, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("rank 0 sleeps")
        group.signal(signal.SIGTERM)
        time.sleep(0.6)
        start = time.monotonic()
        group.signal(signal.SIGTERM)
        run = launch.ended(group.wait(), 75 if saved else 143)
        assert time.monotonic() - start < 2.0
    record = launch.exit_record(tmp_path / "ck")
    assert record["checkpoint"] == ("ck/iter_0000002" if saved else None)
    assert record["requeue"] == saved
    assert "second SIGTERM: stopped at once, without saving" in run.output
    if saved:
        assert list(launch.digests(tmp_path / "ck", 2))


@pytest.mark.grid
def test_exit_interval(tmp_path):
    run = launch.ok(launch.run_forked([*ENDLESS, *SAVING, "--exit-interval", "3"], ranks=2, cwd=tmp_path))
    assert list(run.losses()) == [1, 2, 3]
    assert "[exiting program at iteration 3] datetime: " in run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["reason"], record["checkpoint"]) == (
        0,
        "--exit-interval",
        "ck/iter_0000003",
    )


@pytest.mark.grid
def test_exit_duration(tmp_path):
    flags = [*ENDLESS, *SAVING, "--exit-duration-s", "1.5", "--slow-s", "0.1"]
    run = launch.ok(launch.run_forked(flags, script=FAULTY, ranks=2, cwd=tmp_path))
    assert "[exiting program after 0.025 minutes] datetime: " in run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["reason"]) == (0, "--exit-duration-in-mins")
    assert record["checkpoint"] == f"ck/iter_{max(run.losses()):07d}"


@pytest.mark.grid
def test_skip_train(tmp_path):
    flags = [*launch.TINY, "--train-iters", "2", *SAVING, "--eval-iters", "2"]
    trained = launch.ok(launch.run_forked(flags, cwd=tmp_path))
    evaluated = launch.ok(launch.run_forked([*flags, "--skip-train"], cwd=tmp_path))
    assert not evaluated.losses()
    pattern = r"validation loss at iteration 2 on (\w+) set \| lm loss value: (\S+)"
    losses = dict(re.findall(pattern, evaluated.output))
    assert set(losses) == {"validation", "test"}
    # Both sets are read from their start, as the first run did at its end.
    assert losses == dict(re.findall(pattern, trained.output))
    assert launch.exit_record(tmp_path / "ck")["reason"] == "evaluated"


@pytest.mark.grid
def test_skip_train_needs_neither_length_nor_schedule_nor_optimizer(tmp_path):
    """Evaluation of a checkpoint of weights only, by a command line that says nothing of training."""
    train = [*launch.TINY, "--train-iters", "3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "1"]
    train += ["--save", "ck", "--save-interval", "3", "--eval-iters", "2", "--no-save-optim", "--no-save-rng"]
    trained = launch.ok(launch.run_forked(train, cwd=tmp_path))
    evaluate = [word for word in launch.TINY if word not in ("--lr", "1e-2", "--lr-decay-style", "constant")]
    evaluate += ["--skip-train", "--load", "ck", "--eval-iters", "2"]
    pattern = r"validation loss at iteration 3 on (\w+) set \| lm loss value: (\S+)"
    expected = dict(re.findall(pattern, trained.output))
    assert set(expected) == {"validation", "test"}
    for ranks in (1, 2):
        evaluated = launch.ok(launch.run_forked(evaluate, ranks=ranks, cwd=tmp_path))
        losses = dict(re.findall(pattern, evaluated.output))
        assert {name: float(loss) for name, loss in losses.items()} == pytest.approx(
            {name: float(loss) for name, loss in expected.items()}, rel=1e-5
        )
        assert not evaluated.losses()
    cyclic = launch.ok(launch.run_forked([*evaluate, "--dataloader-type", "cyclic"], cwd=tmp_path))
    assert set(dict(re.findall(pattern, cyclic.output))) == set(expected)
    assert launch.exit_record(tmp_path)["reason"] == "evaluated"


@pytest.mark.grid
def test_an_old_exit_record_does_not_outlive_the_next_start(tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "exit.json").write_text("{}")
    with launch.forked([*ENDLESS, *SAVING], cwd=tmp_path) as group:
        group.wait_for("iteration        1/")
        group.kill()
        group.wait()
    assert not (tmp_path / "ck" / "exit.json").exists()
