"""Tags, steps and samples reach every sink; wandb and mlflow are stood in for by recorders of their calls."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from megatron.core import optional
from megatron.training.config.config import Config
from megatron.training.guard.run_folder import OutputPathError
from megatron.training.report import writers
from megatron.training.report.metrics_file import read_metrics
from megatron.training.report.progress import ProgressLine, append_progress
from megatron.training.report.writers import Writers, open_writers
from megatron.training.state import TrainState


def config(**values):
    return Config.from_flat({"train_iters": 20, "seed": 7, "progress": "off", **values})


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_only_the_last_rank_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silent = open_writers(config(tensorboard_dir="tb"), tmp_path, enabled=False, resumed_iteration=0)
    silent.record({"lm loss": 1.0}, step=1, samples=8)
    silent.record({"a": 1.0}, step=1)
    silent.event("checkpoint", 1, path="x")
    silent.close()
    assert list(tmp_path.iterdir()) == []
    assert silent.handle("TensorBoard") is None


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, "runs/one/metrics.jsonl"),
        ({"save": "out/run1"}, "out/run1/metrics.jsonl"),
        ({"save": "out", "metrics_file": "elsewhere/m.jsonl"}, "elsewhere/m.jsonl"),
    ],
)
def test_metrics_are_always_written(tmp_path, monkeypatch, capsys, values, place):
    monkeypatch.chdir(tmp_path)
    folder = Path(values.get("save", "runs/one"))
    sinks = open_writers(config(**values), folder, enabled=True, resumed_iteration=0)
    sinks.record({"lm loss": 2.0}, step=5, samples=40)
    sinks.event("checkpoint", 5, path="iter_0000005")
    sinks.close()
    sinks.close()
    start, record, checkpoint = read_metrics(tmp_path / place)
    assert (start["event"], start["world_size"], start["config"]["seed"]) == ("start", 1, 7)
    assert (record["iteration"], record["consumed_samples"], record["lm loss"]) == (5, 40, 2.0)
    assert (checkpoint["event"], checkpoint["path"]) == ("checkpoint", "iter_0000005")
    assert f" > metrics: {place}" in capsys.readouterr().out


def test_tensorboard_has_every_tag_twice(tmp_path):
    sinks = open_writers(
        config(tensorboard_dir=str(tmp_path / "tb")), tmp_path, enabled=True, resumed_iteration=0
    )
    sinks.record({"lm loss": 2.0, "grad-norm": 1.5}, step=5, samples=40)
    sinks.record({"optimizer-time": 0.25}, step=5)
    assert sinks.handle("TensorBoard") is not None
    sinks.close()
    assert read_tensorboard(tmp_path / "tb") == {
        "lm loss": [(5, 2.0)],
        "lm loss vs samples": [(40, 2.0)],
        "grad-norm": [(5, 1.5)],
        "grad-norm vs samples": [(40, 1.5)],
        "optimizer-time": [(5, 0.25)],
    }


def test_flags_keep_tags_out_of_the_trackers_but_never_out_of_the_file(tmp_path):
    settings = {
        "tensorboard_dir": str(tmp_path / "tb"),
        "save": str(tmp_path),
        "log_learning_rate_to_tensorboard": False,
        "log_loss_scale_to_tensorboard": False,
        "log_world_size_to_tensorboard": True,
    }
    sinks = open_writers(config(**settings), tmp_path, enabled=True, resumed_iteration=0)
    scalars = {"lm loss": 1.0, "learning-rate": 0.1, "loss-scale": 2.0, "iteration-time": 3.0}
    sinks.record(scalars, step=1, samples=8)
    sinks.close()
    assert {tag for tag in read_tensorboard(tmp_path / "tb") if "vs" not in tag} == {"lm loss", "world-size"}
    assert scalars.items() <= list(read_metrics(tmp_path / "metrics.jsonl"))[-1].items()


def test_progress_shows_the_newest_figures_and_the_checkpoints_age(capsys):
    progress = ProgressLine(20, first_iteration=11)
    progress.figures(loss=3.25, tokens_per_s=1234.0)
    for iteration in range(11, 20):
        progress.update(iteration)
    progress.checkpoint_saved()
    progress.update(20)
    progress.show()
    progress.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" progress:")]
    assert "100.0% | step 20/20 | loss 3.2500 | tokens/s 1,234 | ETA 0:00:00" in lines[-1]
    assert lines[-1].endswith("last checkpoint 0 s ago")


def test_a_missing_package_is_a_line_with_the_pip_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(optional, "available", lambda module: False)
    for values, extra in (
        ({"wandb_project": "p"}, "wandb"),
        ({"mlflow_experiment": "e"}, "mlflow"),
        ({"tensorboard_dir": str(tmp_path)}, "tb"),
    ):
        open_writers(config(**values), tmp_path, enabled=True, resumed_iteration=0).close()
        (line,) = capsys.readouterr().err.splitlines()
        assert f"pip install 'megatron-zero[{extra}]'" in line
        assert line.endswith("; the run goes on")


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Calls:
    """Stands in for a module: records every call of it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name in ("info", "run_id"):
            return self
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs)) or self


@pytest.fixture
def stand_ins(monkeypatch):
    modules = {"wandb": Calls(), "mlflow": Calls(), "mlflow.entities": SimpleNamespace(Metric=Metric)}
    real = optional.require
    monkeypatch.setattr(optional, "require", lambda m, extra: modules[m] if m in modules else real(m, extra))
    return modules


def test_wandb_calls(tmp_path, stand_ins):
    settings = {"wandb_project": "p", "wandb_exp_name": "n", "wandb_entity": "e", "save": str(tmp_path)}
    sinks = open_writers(config(**settings), tmp_path, enabled=True, resumed_iteration=0)
    assert sinks.handle("wandb") is stand_ins["wandb"]
    sinks.record({"lm loss": 2.0}, step=5, samples=40)
    sinks.record({"x-time": 1.0}, step=5)
    sinks.close()
    (init, _, options), *calls = stand_ins["wandb"].calls
    assert init == "init"
    assert (options["project"], options["entity"], options["name"]) == ("p", "e", "n")
    assert options["dir"] == str(tmp_path)
    assert options["config"]["seed"] == 7
    assert calls == [
        ("log", ({"lm loss": 2.0, "samples": 40},), {"step": 5}),
        ("log", ({"x-time": 1.0},), {"step": 5}),
        ("finish", (), {}),
    ]


def test_mlflow_calls(tmp_path, stand_ins):
    settings = {"mlflow_experiment": "e", "mlflow_run_name": "n", "mlflow_tracking_uri": "file:x"}
    sinks = open_writers(config(**settings), tmp_path, enabled=True, resumed_iteration=0)
    sinks.record({"lm loss": 2.0}, step=5, samples=40)
    sinks.close()
    *before, (name, (run_id, metrics), _), after = stand_ins["mlflow"].calls
    assert before == [
        ("set_tracking_uri", ("file:x",), {}),
        ("set_experiment", ("e",), {}),
        ("start_run", (), {"run_name": "n"}),
        ("MlflowClient", (), {}),
    ]
    assert name == "log_batch"
    assert [(one.key, one.value, one.step) for one in metrics] == [("lm loss", 2.0, 5)]
    assert after == ("set_terminated", (run_id,), {})


def test_a_tracker_that_fails_is_switched_off_with_one_warning(capsys):
    class Broken:
        name = "wandb"
        calls = 0

        def write(self, scalars, step, samples=None):
            self.calls += 1
            raise ConnectionError("no route")

        def close(self):
            pytest.fail("it is gone")

    broken = Broken()
    sinks = Writers(None, (broken,))
    sinks.record({"a": 1.0, "b": 2.0}, step=1)
    sinks.record({"a": 1.0}, step=2)
    sinks.close()
    assert broken.calls == 1
    assert (
        capsys.readouterr().err
        == "WARNING: wandb is switched off: ConnectionError: no route; the run goes on\n"
    )


def test_a_full_disk_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    sinks = open_writers(config(), tmp_path, enabled=True, resumed_iteration=0)

    def full(record):
        raise OSError(28, "No space left")

    monkeypatch.setattr(sinks._file, "_write", full)
    sinks.record({"a": 1.0}, step=1)
    sinks.record({"a": 1.0}, step=2)
    sinks.close()
    assert capsys.readouterr().err.count("is not written any more") == 1


def test_untracked_tags_follow_the_flags():
    log = config().logging
    assert writers.untracked_tags(log) == {"iteration-time"}
    assert writers.untracked_tags(dataclasses.replace(log, log_timers_to_tensorboard=True)) == frozenset()


def test_values_are_json(tmp_path):
    sinks = open_writers(config(), tmp_path, enabled=True, resumed_iteration=0)
    sinks.close()
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert "wandb" not in sys.modules


def test_mlflow_and_wandb_record_in_the_runs_folder_unless_told(tmp_path, stand_ins):
    folder = tmp_path / "runs" / "one"
    for is_set in (False, True):
        stand_ins["mlflow"].calls.clear()
        stand_ins["mlflow"].is_tracking_uri_set = lambda is_set=is_set: is_set
        open_writers(
            config(mlflow_experiment="e", wandb_project="p"), folder, enabled=True, resumed_iteration=0
        ).close()
        told = [args for name, args, _ in stand_ins["mlflow"].calls if name == "set_tracking_uri"]
        assert told == ([] if is_set else [(f"sqlite:///{folder}/mlflow.db",)])
    assert stand_ins["wandb"].calls[0][2]["dir"] == str(folder)
    assert folder.is_dir()


def test_a_metrics_file_that_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "m.jsonl").symlink_to(tmp_path / "target.jsonl")
    named = dataclasses.replace(
        config(metrics_file=str(tmp_path / "m.jsonl")), origin={"metrics_file": "command line"}
    )
    open_writers(named, tmp_path, enabled=True, resumed_iteration=0).close()
    assert list(read_metrics(tmp_path / "target.jsonl"))
    with pytest.raises(OutputPathError, match="symbolic link"):
        open_writers(
            config(metrics_file=str(tmp_path / "m.jsonl")), tmp_path, enabled=True, resumed_iteration=0
        )


def test_progress_is_not_written_through_a_planted_link(tmp_path, capsys):
    (tmp_path / "progress.txt").symlink_to(tmp_path / "target")
    state = TrainState(20, 160, iteration=1, consumed_train_samples=8)
    append_progress(str(tmp_path), "Starting job", job_id="", world_size=1, state=state)
    assert not (tmp_path / "target").exists()
    assert "is a symbolic link" in capsys.readouterr().err
