"""One record of a run's parts, which whatever works on them takes whole: steps, evaluations, checkpoints, measuring."""

from __future__ import annotations

import dataclasses

from megatron.training.engine import Engine
from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.report.reporter import Reporter
from megatron.training.report.session import Session
from megatron.training.report.timers import RunClock
from megatron.training.run.data import DataIterators
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.state import TrainState


@dataclasses.dataclass
class RunParts:
    """One on every rank. reporter and data are there once the run's checkpoint is loaded, data until the
    loop ends."""

    session: Session
    engine: Engine
    pipeline: PipelineRunner
    policy: NanPolicy
    state: TrainState
    clock: RunClock = dataclasses.field(default_factory=RunClock)
    reporter: Reporter = dataclasses.field(init=False)
    data: DataIterators = dataclasses.field(init=False)
