"""`pretrain`: the whole of a run, from its first collective to its exit status. The loop itself is in `loop.py`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from megatron.core.datasets.errors import DataError
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.enums import ModelType
from megatron.core.module import ModelError
from megatron.core.optimizer.grad_scaler import GradScalerStateError
from megatron.core.optimizer.mixed_precision import OptimizerStateError
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleError
from megatron.core.optional import MissingPackageError
from megatron.core.tokenizers.tokenizer import TokenizerError
from megatron.core.transport import waiting
from megatron.core.transport.peer_loss import PeerLostError
from megatron.training import global_vars
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError
from megatron.training.config.limits import SystemLimitError, limit_behind
from megatron.training.config.problems import ConfigurationError
from megatron.training.guard.console import guard_console
from megatron.training.guard.exit_status import (
    ExitStatus,
    TrainingExit,
    hard_exit,
    leave_exit_json,
    report_failure,
    second_signal,
    status_of,
    stopped_status,
)
from megatron.training.guard.run_folder import OutputPathError, RunFolder
from megatron.training.guard.signals import SignalHandler, StopRequested
from megatron.training.guard.startup_check import StartupMismatchError
from megatron.training.guard.watchdog import OrphanedError, OrphanGuard
from megatron.training.guard.weight_check import NonFiniteWeightsError, ReplicaMismatchError
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import ForwardStep
from megatron.training.run.arguments import launch_config
from megatron.training.run.build import ModelProvider, UnsplittableError, build_engine
from megatron.training.run.data import DatasetsProvider
from megatron.training.run.loop import Ending, TrainingLoop
from megatron.training.run.pipeline import build_runner
from megatron.training.run.rehearse.own_model import Provided, described_own
from megatron.training.run.rehearse.rehearsal import rehearse, tell_of_peers
from megatron.training.run.session import initialize

_ERRORS = {
    ExitStatus.CONFIGURATION: (
        ConfigurationError,
        LaunchEnvError,
        StartupMismatchError,
        MissingPackageError,
        OutputPathError,
        SystemLimitError,
        ScheduleError,
        ModelError,
    ),
    ExitStatus.CHECKPOINT: (CheckpointError, OptimizerStateError, GradScalerStateError),
    ExitStatus.NON_FINITE: (NonFiniteWeightsError,),
    ExitStatus.RERUN_INVALID: (ReplicaMismatchError,),
    ExitStatus.DATA: (DataError, TokenizerError),
    ExitStatus.PEER_LOST: (PeerLostError, OrphanedError),
}
STATUS_TABLE: Mapping[type[BaseException], ExitStatus] = {
    error: status for status, errors in _ERRORS.items() for error in errors
}
# Raised on every rank alike, with the same message: one rank of a machine says it.
RAISED_ALIKE = (
    TrainingExit,
    StartupMismatchError,
    CheckpointError,
    ConfigurationError,
    NonFiniteWeightsError,
    ReplicaMismatchError,
    UnsplittableError,
)


def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Callable[..., None] | None = None,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    config: Config | None = None,
) -> None:
    """Train a model, with Megatron's signature.

    train_valid_test_datasets_provider(sizes): data sets of at least these numbers of samples (train, valid, test).
    model_provider(pre_process, post_process, vp_stage): an nn.Module, the chunk of the model that this rank holds;
    vp_stage may be left out where nothing is interleaved, and a chunk that does not embed has
    set_input_tensor(tensor). forward_step_func(data_iterator, model): the chunk's output, and a function of the output
    that returns (loss, report) or (loss sum, tokens, report), called where the loss is. extra_args_provider(parser):
    adds flags, found in `get_args()`. args_defaults: other defaults by name. config: an already parsed command line
    (`launch_config`), of a provider that reads what the flags name: without it they need name no data.

    Returns when the run is done. Otherwise the process ends with a status of docs/exit_statuses.md.
    """
    assert model_type is ModelType.encoder_or_decoder, f"model type {model_type}"
    guard_console()
    if process_non_loss_data_func is not None:
        raise ValueError("process_non_loss_data_func is not supported: report numbers from the loss function")
    # Whatever makes the data sets is the caller's: flags need not name any.
    config = config or launch_config(
        extra_args_provider=extra_args_provider, args_defaults=args_defaults, needs_data=False
    )
    if config.training.rehearse:
        raise SystemExit(rehearse(config, model_provider, forward_step_func))
    run = _Run(config)
    # Signals are ours to the very end: a launcher that stops the others because one rank has failed must not silence
    # the rank that says why.
    with run.signals:
        try:
            ending = run.run(train_valid_test_datasets_provider, model_provider, forward_step_func)
        except BaseException as error:
            run.fail(error)
        run.end(ending)


class _Run:
    """One run from its first collective to its exit status."""

    def __init__(self, config: Config) -> None:
        env = LaunchEnv.read()
        self.env = env.alone() if config.training.fake_process_group else env
        self.folder = RunFolder(config.checkpoint.save, on_lost=self._end_aside)
        self.config = config
        self.session: Session | None = None
        self.loop: TrainingLoop | None = None
        self.signals = SignalHandler(on_second=self._second_signal)
        self.guard = OrphanGuard(
            self.env.launcher_pid,
            store_trouble=lambda s: None if self.session is None else self.session.watchdog.store_trouble(s),
            where=lambda: "starting" if self.session is None else self.session.watchdog.place,
            end=self._end_aside,
            ask=self._asked_to_save,
            still_s=lambda: 0.0 if self.session is None else self.session.watchdog.still_s,
        )

    def run(
        self, datasets_provider: DatasetsProvider, model_provider: ModelProvider, forward_step: ForwardStep
    ) -> Ending:
        """Everything up to the last iteration. Raises what STATUS_TABLE lists, and TrainingExit."""
        with waiting.ended_by(self.signals.end_waiting):
            session = self.session = initialize(
                self.config,
                self.env,
                self.folder,
                lambda config, tokenizer: described_own(
                    config, Provided(model_provider, forward_step, tokenizer)
                ),
            )
            config, ps = session.config, session.ps
            args = {**session.settings(), **config.extra}
            global_vars.publish(args, rank=ps.rank, world_size=ps.world_size)
            parts = {"device": session.device, "tokenizer": session.tokenizer, "timers": session.timers}
            global_vars.provide(config=config, parallel_state=ps, **parts)
            with session.watchdog.phase("build model"):
                if self.env.faked is not None:
                    tell_of_peers(config, ps, model_provider, forward_step)
                engine = build_engine(config, ps, model_provider, session.planner)
                runner = build_runner(session, engine, forward_step)
        self.loop = TrainingLoop(session, self.signals, engine, runner)
        try:
            return self.loop.run(datasets_provider)
        finally:
            runner.close()

    def fail(self, error: BaseException) -> NoReturn:
        """Say why, leave exit.json, and end without waiting for anybody."""
        # torch's loader says in this signal, wherever the main thread is, that a process of its own has died: an error
        # out of here would leave this rank waiting for its other processes, and all others for this rank.
        with contextlib.suppress(ValueError):  # another thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.guard.close()
        watchdog = None if self.session is None else self.session.watchdog
        memory = None if self.loop is None else self.loop.memory
        if status_of(error, STATUS_TABLE) is ExitStatus.BUG and (limit := limit_behind(error)) is not None:
            more = [] if memory is None or not limit.of_memory else memory.when_full()
            error = SystemLimitError("\n".join([str(limit), *getattr(error, "__notes__", ()), *more]))
        is_stopped = isinstance(error, StopRequested)
        if is_stopped:
            error = TrainingExit(stopped_status(self.config.checkpoint.save), str(error))
        status = status_of(error, STATUS_TABLE)
        if not isinstance(error, RAISED_ALIKE) or self.env.local_rank == 0:
            lost = [] if memory is None else memory.when_lost(error)
            self._report(error, None if watchdog is None else lambda: "\n".join([watchdog.diagnose(), *lost]))
        elif is_stopped:  # perhaps no other rank was
            leave_exit_json(status, str(error), **self._record_of(status))
        if watchdog is not None and status is not ExitStatus.PEER_LOST:
            watchdog.close(reason=str(error))
        self.folder.release()
        hard_exit(status)

    def _end_aside(self, error: Exception) -> NoReturn:
        """The same from a side thread, while the main one may be in a collective: this rank must not go on."""
        status = status_of(error, STATUS_TABLE)
        try:
            self._report(error)
            if self.session is not None:
                self.session.watchdog.close(reason=str(error))
            self.folder.release()
        finally:
            hard_exit(status)

    def _report(self, error: BaseException, diagnose: Callable[[], str] | None = None) -> None:
        record = self._record_of(status_of(error, STATUS_TABLE))
        report_failure(error, STATUS_TABLE, diagnose=diagnose, error_file=self.env.error_file, **record)

    def _record_of(self, status: ExitStatus) -> dict[str, Any]:
        """Where an exit record goes, and what it says of the run: this rank, its last completed iteration, the newest
        checkpoint."""
        loop = self.loop
        return {
            "directory": self.folder.for_exit_record(status),
            "rank": self.env.place[0],
            "iteration": None if loop is None else loop.state.iteration,
            "checkpoint": None if loop is None else loop.checkpoints.last,
            "launcher": self.env.record_of_attempt,
        }

    def _asked_to_save(self, why: str) -> bool:
        """False where there is nothing to save, or nowhere to."""
        if self.loop is None or self.config.checkpoint.save is None:
            return False
        self.signals.ask(why)
        return True

    def _second_signal(self, signum: int) -> int:
        """Last words in the signals' thread."""
        status = second_signal(signum, **self._record_of(ExitStatus.STOPPED))
        self.folder.release()
        return status

    def end(self, ending: Ending) -> None:
        """All ranks leave together; status 0 returns to the caller."""
        assert self.session is not None, "a run ended before it began"
        self.guard.close()
        if self.env.local_rank == 0:
            record = self._record_of(ending.status)
            if self.env.rank:
                record["directory"] = None
            leave_exit_json(ending.status, ending.reason, **record)
        self.session.close()
        global_vars.unset_global_variables()
        if ending.status is not ExitStatus.DONE:
            raise SystemExit(int(ending.status))
