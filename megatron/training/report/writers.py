"""Where a run's numbers go: metrics.jsonl always; TensorBoard, wandb and MLflow when a flag asks for them.

Only the last rank has sinks, as it knows the loss; elsewhere every call does nothing. Tags are Megatron's
(docs/logging.md). A resumed run drops what metrics.jsonl and TensorBoard's files have after the iteration it resumes
from (that is trained again), so they never tell two stories; wandb and MLflow get a run of their own at each start.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.core import optional
from megatron.core.safe_files import open_for_append, opened
from megatron.core.words import time_text
from megatron.training.config.config import Config
from megatron.training.config.training_config import LoggingConfig
from megatron.training.guard.run_folder import OutputPathError
from megatron.training.report.metrics_file import MetricsFile

VS_SAMPLES = " vs samples"
_LENGTH = struct.Struct("<Q4x")  # of a record of TensorBoard's event files, with its checksum
_TRAILER_BYTES = 4  # the content's checksum
# How long a tracker's library may take. MLflow makes the tables of a new database in 10 s, wandb asks its server for
# 90; what is still being closed, the library goes on with while the process ends.
OPEN_S, WRITE_S, CLOSE_S = 120.0, 60.0, 20.0
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Tracker:
    """One optional sink. handle: what user code gets of it. write(scalars, step, samples): samples is None for what has
    no place on that axis. Each call comes from a thread of its own."""

    name: str
    handle: Any
    write: Callable[[Mapping[str, float], int, int | None], Any]
    close: Callable[[], Any]


def _tensorboard(log: LoggingConfig, directory: str, resumed_iteration: int) -> Tracker:
    """Every tag twice: over iterations, and as `<tag> vs samples` over consumed samples."""
    optional.require("tensorboard", "tb")
    summary_writer = optional.require("torch.utils.tensorboard", "tb").SummaryWriter
    note = drop_after(directory, resumed_iteration) if resumed_iteration else ""
    print(f" > TensorBoard: {directory}{note}", flush=True)
    writer = summary_writer(log_dir=directory, max_queue=log.tensorboard_queue_size)

    def write(scalars: Mapping[str, float], step: int, samples: int | None) -> None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
            if samples is not None:
                writer.add_scalar(tag + VS_SAMPLES, value, samples)

    return Tracker("TensorBoard", writer, write, writer.close)


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

    def write(scalars: Mapping[str, float], step: int, samples: int | None) -> None:
        run.log(dict(scalars) if samples is None else {**scalars, "samples": samples}, step=step)

    return Tracker("wandb", run, write, run.finish)


def _mlflow(log: LoggingConfig, folder: Path) -> Tracker:
    """One MLflow run, recorded in a database in the run's folder where neither flag nor environment says where: MLflow
    takes no folder of files any more (3.17). Its "active run" is of a thread, so points name the run."""
    mlflow, entities = optional.require("mlflow", "mlflow"), optional.require("mlflow.entities", "mlflow")
    if log.mlflow_tracking_uri is not None:
        mlflow.set_tracking_uri(log.mlflow_tracking_uri)
    elif not mlflow.is_tracking_uri_set():
        folder.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    mlflow.set_experiment(log.mlflow_experiment)
    run, client = mlflow.start_run(run_name=log.mlflow_run_name), mlflow.MlflowClient()
    run_id = run.info.run_id

    def write(scalars: Mapping[str, float], step: int, samples: int | None) -> None:
        now_ms = int(time.time() * 1000)
        client.log_batch(
            run_id, [entities.Metric(tag, value, now_ms, step) for tag, value in scalars.items()]
        )

    return Tracker("mlflow", run, write, lambda: client.set_terminated(run_id))


def _answer(name: str, within_s: float, call: Callable[[], _T]) -> list[_T]:
    """What a tracker's library returns; nothing, after a line that says why, where it raises, asks the process to end,
    or takes longer: it is not the run's. In a thread of its own, which is left where it hangs."""
    answers: list[_T] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # SystemExit too
            failures.append(error)

    thread = threading.Thread(target=ask, name=name, daemon=True)
    thread.start()
    thread.join(within_s)
    if not answers:
        told = [f"{type(one).__name__}: {' '.join(str(one).split())}" for one in failures]
        warn(
            f"{name} is switched off: {told[0] if told else f'no answer within {time_text(within_s)}'}; the run goes on"
        )
    return answers


class Writers:
    """All sinks of this rank behind one interface.

    A sink that fails (a full disk, a lost connection) or hangs is switched off with one warning: it must not take the
    run with it. A package that is not there is refused before the run. untracked: tags that no tracker gets.
    """

    def __init__(
        self,
        metrics_file: MetricsFile | None = None,
        trackers: Iterable[Tracker] = (),
        untracked: frozenset[str] = frozenset(),
    ) -> None:
        self._file, self._trackers, self._untracked = metrics_file, list(trackers), untracked

    def record(self, scalars: Mapping[str, float], *, step: int, samples: int | None = None) -> None:
        """Write the scalars of one iteration: one line of metrics.jsonl, one point per tag elsewhere."""
        self._to_file(MetricsFile.record, scalars, step, samples)
        tracked = {tag: value for tag, value in scalars.items() if tag not in self._untracked}
        for tracker in list(self._trackers) if tracked else ():
            if not _answer(tracker.name, WRITE_S, functools.partial(tracker.write, tracked, step, samples)):
                self._trackers.remove(tracker)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Something that happened ("start", "checkpoint", "exit"): metrics.jsonl only."""
        self._to_file(MetricsFile.event, name, step, **fields)

    def handle(self, name: str) -> Any:
        """What user code adds its own to: torch's SummaryWriter of "TensorBoard", the run of "wandb"; None without."""
        return next((tracker.handle for tracker in self._trackers if tracker.name == name), None)

    def close(self) -> None:
        """Close all; a second call does nothing."""
        self._to_file(MetricsFile.close)
        for tracker in self._trackers:
            _answer(tracker.name, CLOSE_S, tracker.close)
        self._file, self._trackers = None, []

    def _to_file(self, call: Callable[..., None], *values: Any, **fields: Any) -> None:
        if self._file is not None:
            try:
                call(self._file, *values, **fields)
            except OSError as error:
                warn(f"{self._file.path} is not written any more: {error}")
                self._file = None


def warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


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


def open_writers(
    config: Config,
    folder: Path,
    *,
    enabled: bool,
    resumed_iteration: int,
    about: Mapping[str, Any] | None = None,
) -> Writers:
    """The writers of a run. folder: the run's. enabled: on the last rank. resumed_iteration: 0 for a run from scratch.
    about: the run, for the record.

    Raises OutputPathError, a ValueError, where metrics.jsonl cannot be written.
    """
    if not enabled:
        return Writers()
    log, values = config.logging, {**config.flat(), **config.extra}
    asked: dict[str, Callable[[], Tracker]] = {}
    if log.tensorboard_dir is not None:
        asked["TensorBoard"] = functools.partial(_tensorboard, log, log.tensorboard_dir, resumed_iteration)
    if log.wandb_project:
        asked["wandb"] = functools.partial(_wandb, log, folder, values)
    if log.mlflow_experiment:
        asked["mlflow"] = functools.partial(_mlflow, log, folder)
    trackers = [tracker for name, make in asked.items() for tracker in _answer(name, OPEN_S, make)]
    try:
        file = MetricsFile(metrics_path(config, folder), resumed_iteration=resumed_iteration)
    except OSError as error:
        raise OutputPathError(
            f"{error.filename}: {error.strerror}: name another place in --save or --metrics-file"
        ) from error
    print(f" > {file.note}", flush=True)
    writers = Writers(file, trackers, untracked_tags(log))
    writers.event("start", resumed_iteration, world_size=config.world_size, **(about or {}), config=values)
    if log.log_world_size_to_tensorboard:
        writers.record({"world-size": config.world_size}, step=resumed_iteration)
    return writers


# --- TensorBoard's event files of a run that goes on


def drop_after(directory: str, iteration: int) -> str:
    """Cut what TensorBoard's event files of earlier attempts have after `iteration`; a word about it. Newest first, and
    no further back than to the file that begins before it: it was begun when the older ones were cut. Raises OSError.

    [Note: no purge step] TensorBoard's `purge_step` hides all points at and after one step, whatever their tag counts:
    with iterations it would hide nearly all of `TAG vs samples`, with samples nothing of the rest. Points are written
    in the order of time, so one place in a file divides what is trained again from what stays, on every axis, and what
    user code has written with it.
    """
    if "://" in directory:
        return " (not a local folder: points of earlier attempts after the iteration resumed from stay in it)"
    cut = 0
    for path in sorted(Path(directory).glob("*tfevents*"), reverse=True):
        first, place = _first_and_place(path, iteration)
        if place is not None:
            fd = open_for_append(path)
            try:
                os.ftruncate(fd, place)
            finally:
                os.close(fd)
            cut += 1
        if first is not None and first <= iteration:
            break
    return f" (what {cut} files had after iteration {iteration} is dropped)" if cut else ""


def _first_and_place(path: Path, iteration: int) -> tuple[int | None, int | None]:
    """The first iteration that a file has a record of, and where those after `iteration` begin; None: nowhere.

    A point of an iteration is known by the one behind it, of the same tag over samples; timers have no such.
    """
    first, before = None, (0, "", 0)
    for place, tag, step in _points(path):
        begin, last_tag, last_step = before
        if tag == last_tag + VS_SAMPLES:
            first = last_step if first is None else first
            if last_step > iteration:
                return first, begin
        elif tag.endswith("-time") and step > iteration:
            return first, place
        before = place, tag, step
    return first, None


def _points(path: Path) -> Iterator[tuple[int, str, int]]:
    """(offset of the record, tag, step) of each event; ends at a record that a kill cut short."""
    event: Any = optional.require("tensorboard.compat.proto.event_pb2", "tb").Event
    broken = optional.require("google.protobuf.message", "tb").DecodeError
    with opened(path) as file:
        size, place = os.fstat(file.fileno()).st_size, 0
        while len(header := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(header)
            end = place + _LENGTH.size + length + _TRAILER_BYTES
            if end > size:
                return
            try:
                found = event.FromString(file.read(length + _TRAILER_BYTES)[:-_TRAILER_BYTES])
            except broken:
                return
            for value in found.summary.value[:1]:
                yield place, value.tag, found.step
            place = end
