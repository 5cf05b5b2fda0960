"""Number 9: no logger can end a run: one line, and training goes on; MLflow records in a database by default."""

import sys
import threading
import time

import pytest

from megatron.core import optional
from megatron.training.config.config import Config
from megatron.training.report import writers
from megatron.training.report.writers import Tracker, Writers, open_writers
from tests.harness import launch

TRAINER = "tests/functional_tests/trainers/broken_loggers.py"
# As packages of today answer: MLflow takes no folder of files; wandb closes for ever, behind a server that is gone.
MLFLOW = """
def is_tracking_uri_set():
    return False

def set_tracking_uri(uri):
    pass

def set_experiment(name):
    raise RuntimeError("the filesystem tracking backend\\nis in maintenance mode")
"""
WANDB = """
import sys, time

class Run:
    def log(self, scalars, step):
        pass

    def finish(self):
        time.sleep(600)

def init(**settings):
    return Run()
"""


def test_a_run_whose_loggers_fail_and_hang_ends_well(tmp_path):
    packages = tmp_path / "packages"
    (packages / "mlflow").mkdir(parents=True)
    (packages / "mlflow" / "__init__.py").write_text(MLFLOW)
    (packages / "mlflow" / "entities.py").write_text("")
    (packages / "wandb.py").write_text(WANDB)
    (tmp_path / "tb").write_text("a file, where a folder is asked for")
    words = "--mlflow-experiment e --wandb-project p --wandb-exp-name n --tensorboard-dir tb/events --train-iters 2"
    options = {"cwd": tmp_path, "env": {"PACKAGES": str(packages), "WAIT": "0.5"}, "script": TRAINER}
    run = launch.ok(launch.run_forked([*launch.TINY, "--log-interval", "1", *words.split()], **options))
    assert list(run.losses()) == [1, 2]
    said = [line for line in run.output.splitlines() if " is switched off: " in line]
    assert [line.split()[1] for line in said] == ["TensorBoard", "mlflow", "wandb"]
    assert "the filesystem tracking backend is in maintenance mode; the run goes on" in said[1]
    assert "no answer within 0.5 s" in said[2]
    assert "Traceback" not in run.output
    assert launch.exit_record(tmp_path)["status"] == 0


@pytest.fixture
def impatient(monkeypatch):
    for name in ("OPEN_S", "WRITE_S", "CLOSE_S"):
        monkeypatch.setattr(writers, name, 0.2)


def leaves():
    sys.exit(3)  # as a library that finds no key


def hangs():
    threading.Event().wait()


def fails():
    raise ConnectionError("no\nroute")


WAYS = {
    leaves: "SystemExit: 3",
    hangs: "no answer within 0.2 s",
    fails: "ConnectionError: no route",
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("place", ["open", "write", "close"])
def test_whatever_a_logger_does_the_run_goes_on(way, place, tmp_path, monkeypatch, capsys):
    calls = []

    def tracker(*_):
        if place == "open":
            way()
        write = way if place == "write" else lambda: None
        close = way if place == "close" else lambda: None
        return Tracker("wandb", None, lambda *_: (calls.append("write"), write()), close)

    monkeypatch.setattr(writers, "_wandb", tracker)
    config = Config.from_flat({"train_iters": 2, "progress": "off", "wandb_project": "p"})
    sinks = open_writers(config, tmp_path, enabled=True, resumed_iteration=0)
    for step in (1, 2):
        sinks.record({"lm loss": 1.0}, step=step, samples=step)
    began = time.monotonic()
    sinks.close()
    assert time.monotonic() - began < 30  # not for ever
    assert capsys.readouterr().err == f"WARNING: wandb is switched off: {WAYS[way]}; the run goes on\n"
    assert calls == {"open": [], "write": ["write"], "close": ["write", "write"]}[place]


def test_a_tracker_that_answers_has_each_record_before_the_next_begins():
    order = []
    slow = Tracker(
        "wandb", None, lambda scalars, *_: (time.sleep(0.01), order.append(dict(scalars))), lambda: None
    )
    sinks = Writers(None, [slow], frozenset({"untracked"}))
    for step in range(3):
        sinks.record({"a": step, "untracked": 1.0}, step=step)
        order.append(step)
    assert order == [{"a": 0}, 0, {"a": 1}, 1, {"a": 2}, 2]


# --- as installed


def recorded(folder, **flags):
    config = Config.from_flat({"train_iters": 2, "progress": "off", **flags})
    sinks = open_writers(config, folder, enabled=True, resumed_iteration=0)
    for step in (1, 2):
        sinks.record({"lm loss": 3.0 - step, "lm loss validation ppl": 2.0}, step=step, samples=step)
    handle = next(iter(sinks._trackers)).handle
    sinks.close()
    return handle


def test_tensorboard_as_installed(tmp_path, capsys):
    recorded(tmp_path, tensorboard_dir=str(tmp_path / "tb"))
    assert list((tmp_path / "tb").glob("*tfevents*"))
    assert capsys.readouterr().err == ""


def test_mlflow_as_installed(tmp_path):
    if not optional.available("mlflow"):
        pytest.skip("no MLflow is installed")
    mlflow = optional.require("mlflow", "mlflow")
    run = recorded(tmp_path / "run", mlflow_experiment="e", mlflow_run_name="n")
    found = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db").get_run(run.info.run_id)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "n")
    assert found.data.metrics == {"lm loss": 1.0, "lm loss validation ppl": 2.0}


def test_wandb_as_installed(tmp_path, monkeypatch, capsys):
    if not optional.available("wandb"):
        pytest.skip("no wandb is installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recorded(tmp_path, wandb_project="p", wandb_exp_name="n")
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert "switched off" not in capsys.readouterr().err
