"""Where a run's numbers go: metrics.jsonl always; TensorBoard, wandb and MLflow when a flag asks for them.

Only the last rank has sinks, as it knows the loss; elsewhere every call does nothing. Tags are Megatron's
(docs/logging.md). A resumed run drops what metrics.jsonl and TensorBoard's files have after the iteration it resumes
from (that is trained again), so they never tell two stories; wandb and MLflow get a run of their own at each start.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.core import optional
from megatron.core.safe_files import SHARED_MODE, open_for_append
from megatron.training.config.config import Config
from megatron.training.config.training_config import LoggingConfig
from megatron.training.guard.run_folder import OutputPathError
from megatron.training.report.metrics import IterationRecord
from megatron.training.report.metrics_file import MetricsFile
from megatron.training.report.progress import ProgressLine
from megatron.training.report.tensorboard_files import VS_SAMPLES, drop_after
from megatron.training.state import TrainState

PROGRESS_FILE = "progress.txt"


@dataclasses.dataclass(frozen=True)
class Tracker:
    """One optional sink. handle: what user code gets of it. scalar(tag, value, step, samples): samples is None for what
    has no place on that axis."""

    name: str
    handle: Any
    scalar: Callable[[str, float, int, int | None], Any]
    close: Callable[[], Any]


def _tensorboard(log: LoggingConfig, directory: str, resumed_iteration: int) -> Tracker:
    """Every tag twice: over iterations, and as `<tag> vs samples` over consumed samples."""
    optional.require("tensorboard", "tb")
    summary_writer = optional.require("torch.utils.tensorboard", "tb").SummaryWriter
    note = drop_after(directory, resumed_iteration) if resumed_iteration else ""
    print(f" > TensorBoard: {directory}{note}", flush=True)
    writer = summary_writer(log_dir=directory, max_queue=log.tensorboard_queue_size)

    def scalar(tag: str, value: float, step: int, samples: int | None) -> None:
        writer.add_scalar(tag, value, step)
        if samples is not None:
            writer.add_scalar(tag + VS_SAMPLES, value, samples)

    return Tracker("TensorBoard", writer, scalar, writer.close)


def _wandb(log: LoggingConfig, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """One Weights & Biases run; offline if the user's wandb is set so."""
    if log.wandb_save_dir is None:  # wandb takes another place for a folder that is not there
        folder.mkdir(parents=True, exist_ok=True)
    run = optional.require("wandb", "wandb").init(
        project=log.wandb_project,
        entity=log.wandb_entity,
        name=log.wandb_exp_name,
        dir=log.wandb_save_dir or str(folder),
        config=dict(config),
    )

    def scalar(tag: str, value: float, step: int, samples: int | None) -> None:
        run.log({tag: value} if samples is None else {tag: value, "samples": samples}, step=step)

    return Tracker("wandb", run, scalar, run.finish)


def _mlflow(log: LoggingConfig, folder: Path) -> Tracker:
    """One MLflow run, recorded in the run's folder where neither flag nor environment says where."""
    mlflow = optional.require("mlflow", "mlflow")
    if log.mlflow_tracking_uri is not None:
        mlflow.set_tracking_uri(log.mlflow_tracking_uri)
    elif not mlflow.is_tracking_uri_set():
        mlflow.set_tracking_uri((folder / "mlruns").absolute().as_uri())
    mlflow.set_experiment(log.mlflow_experiment)
    run = mlflow.start_run(run_name=log.mlflow_run_name)

    def scalar(tag: str, value: float, step: int, samples: int | None) -> None:
        mlflow.log_metric(tag, value, step=step)

    return Tracker("mlflow", run, scalar, mlflow.end_run)


class Writers:
    """All sinks of this rank behind one interface.

    A sink that fails while training (a full disk, a lost connection) is switched off with one warning: it
    must not take the run with it. What cannot be opened at the start is an error. untracked: tags that no tracker gets.
    """

    def __init__(
        self,
        metrics_file: MetricsFile | None = None,
        trackers: tuple[Tracker, ...] = (),
        *,
        progress: ProgressLine | None = None,
        untracked: frozenset[str] = frozenset(),
    ) -> None:
        self._file, self._trackers, self._progress = metrics_file, list(trackers), progress
        self._untracked = untracked

    def record(self, scalars: Mapping[str, float], *, step: int, samples: int | None = None) -> None:
        """Write the scalars of one iteration: one line of metrics.jsonl, one point per tag elsewhere."""
        self._to_file(lambda file: file.record(scalars, step, samples))
        for tag, value in scalars.items():
            self._to_trackers(tag, value, step, samples)

    def scalar(self, tag: str, value: float, step: int, samples: int | None = None) -> None:
        """One number; it joins the next `record` of the same step in metrics.jsonl."""
        self._to_file(lambda file: file.scalar(tag, value, step, samples))
        self._to_trackers(tag, value, step, samples)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Something that happened ("start", "checkpoint", "exit"): metrics.jsonl only."""
        self._to_file(lambda file: file.event(name, step, **fields))

    def checkpoint_saved(self, iteration: int, path: str) -> None:
        """Mark a committed checkpoint in the record and in the progress line."""
        self.event("checkpoint", iteration, path=path)
        if self._progress is not None:
            self._progress.checkpoint_saved()

    def progress(self, record: IterationRecord) -> None:
        """Give the progress display the figures of an iteration line."""
        if self._progress is not None:
            loss = next(iter(record.losses.values()), None)
            self._progress.figures(loss=loss, tokens_per_s=record.tokens_per_s)

    def iteration_done(self, iteration: int) -> None:
        """Move the progress display; call it every iteration, after `progress` where there is a line."""
        if self._progress is not None:
            self._progress.update(iteration)

    @property
    def tensorboard(self) -> Any:
        """torch's SummaryWriter, or None: for user code that adds its own."""
        return self._handle("TensorBoard")

    @property
    def wandb(self) -> Any:
        """The wandb run, or None."""
        return self._handle("wandb")

    def _handle(self, name: str) -> Any:
        return next((tracker.handle for tracker in self._trackers if tracker.name == name), None)

    def close(self) -> None:
        """Close all; a second call does nothing."""
        if self._progress is not None:
            self._progress.close()
        self._to_file(MetricsFile.close)
        for tracker in list(self._trackers):
            self._guarded(tracker, tracker.close)
        self._file, self._trackers, self._progress = None, [], None

    def _to_trackers(self, tag: str, value: float, step: int, samples: int | None) -> None:
        if tag not in self._untracked:
            for tracker in list(self._trackers):
                self._guarded(tracker, tracker.scalar, tag, value, step, samples)

    def _guarded(self, tracker: Tracker, call: Callable[..., Any], *values: Any) -> None:
        try:
            call(*values)
        except Exception as error:  # third-party code: any error of it is not the run's
            _warn(f"{tracker.name} is switched off: {type(error).__name__}: {error}")
            self._trackers.remove(tracker)

    def _to_file(self, call: Callable[[MetricsFile], None]) -> None:
        if self._file is None:
            return
        try:
            call(self._file)
        except OSError as error:
            _warn(f"{self._file.path} is not written any more: {error}")
            self._file = None


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def append_progress(save: str, event: str, *, job_id: str, world_size: int, state: TrainState) -> None:
    """--log-progress: one line of `progress.txt` in the folder of checkpoints, fields separated by tabs.

    A file that cannot be written is a warning, as with every sink.
    """
    fields = (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}",
        f"Job ID: {job_id}",
        f"# GPUs: {world_size}",
        event,
        f"Iteration: {state.iteration}",
        f"Consumed samples: {state.consumed_train_samples}",
        f"Floating-point operations: {state.num_floating_point_operations_so_far:.2e}",
    )
    path = Path(save) / PROGRESS_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_for_append(path, mode=SHARED_MODE), "a", encoding="utf-8") as file:
            file.write("\t".join(fields) + "\n")
    except OSError as error:
        _warn(f"{path} is not written: {error}")


def untracked_tags(log: LoggingConfig) -> frozenset[str]:
    """Tags that flags keep out of TensorBoard, wandb and MLflow; metrics.jsonl has them all the same."""
    wanted = {
        "learning-rate": log.log_learning_rate_to_tensorboard,
        "decoupled-learning-rate": log.log_learning_rate_to_tensorboard,
        "loss-scale": log.log_loss_scale_to_tensorboard,
        "iteration-time": log.log_timers_to_tensorboard,
    }
    return frozenset(tag for tag, is_wanted in wanted.items() if not is_wanted)


def metrics_path(config: Config, folder: Path) -> Path:
    """--metrics-file, else metrics.jsonl in the run's folder. A link counts where the user has named it."""
    if config.logging.metrics_file is None:
        return folder / "metrics.jsonl"
    path = Path(config.logging.metrics_file)
    return path.resolve() if config.given("metrics_file") and path.is_symlink() else path


def open_writers(config: Config, folder: Path, *, enabled: bool, resumed_iteration: int) -> Writers:
    """The writers of a run. folder: the run's. enabled: on the last rank. resumed_iteration: 0 for a run from scratch.

    Raises MissingPackageError naming the pip line, and OutputPathError, both ValueErrors.
    """
    if not enabled:
        return Writers()
    log, values = config.logging, {**config.flat(), **config.extra}
    trackers: list[Tracker] = []
    try:
        if log.tensorboard_dir is not None:
            trackers.append(_tensorboard(log, log.tensorboard_dir, resumed_iteration))
        if log.wandb_project:
            trackers.append(_wandb(log, folder, values))
        if log.mlflow_experiment:
            trackers.append(_mlflow(log, folder))
        file = MetricsFile(metrics_path(config, folder), resumed_iteration=resumed_iteration)
    except OSError as error:
        raise OutputPathError(
            f"{error.filename}: {error.strerror}: name other places in --save, --metrics-file, --tensorboard-dir"
        ) from error
    print(f" > {file.note}", flush=True)
    progress = None
    if log.progress != "off" and config.total_iterations:
        progress = ProgressLine(config.total_iterations, first_iteration=resumed_iteration + 1)
    writers = Writers(file, tuple(trackers), progress=progress, untracked=untracked_tags(log))
    writers.event("start", resumed_iteration, world_size=config.world_size, config=values)
    if log.log_world_size_to_tensorboard:
        writers.scalar("world-size", config.world_size, resumed_iteration)
    return writers
