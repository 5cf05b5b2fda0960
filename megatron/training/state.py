"""Counters of a run that a checkpoint keeps beside tensors (`TrainState`); a step's task and its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.schema import Schema, integer, number
from megatron.training.config.config import Config

TRAIN_STATE_SCHEMA: Mapping[str, Schema] = {  # `TrainState.state`
    "iteration": integer(),
    "consumed_train_samples": integer(),
    "consumed_valid_samples": integer(),
    "skipped_train_samples": integer(),
    "num_floating_point_operations_so_far": number(low=0.0),
}


@dataclasses.dataclass
class TrainState:
    """Counters of the loop. train_iters, train_samples: the length of the run (one of them is derived).

    skipped_train_samples: drawn by --iterations-to-skip and not trained on; they count as consumed.
    """

    train_iters: int
    train_samples: int
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0

    @classmethod
    def start(cls, config: Config) -> TrainState:
        """At iteration 0."""
        iterations, samples = config.total_iterations, config.training.train_samples
        return cls(iterations, iterations * config.training.global_batch_size if samples is None else samples)

    @property
    def finished(self) -> bool:
        return self.iteration >= self.train_iters

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the counters without the run's length, which is the flags'."""
        return {name: getattr(self, name) for name in TRAIN_STATE_SCHEMA}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            assert name in TRAIN_STATE_SCHEMA, f"unknown counter {name!r} in the checkpoint"
            setattr(self, name, value)


@dataclasses.dataclass(frozen=True)
class StepTask:
    """iteration: the one that the step completes. flags: of this rank, summed over all with the step's numbers."""

    iteration: int
    num_microbatches: int
    flags: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step, once all ranks have decided to take or to skip it.

    losses: name -> (sum, count) over the global batch. layers: (layer, name) -> what it counted over it. flags: summed.
    ended_at: of the run's clock. learning_rate: after the step. rolled_back: it was taken back, and taken again or not.
    """

    task: StepTask
    losses: Mapping[str, tuple[float, float]]
    layers: Mapping[tuple[int, str], tuple[float, ...]]
    flags: tuple[float, ...]
    loss_scale: float
    learning_rate: float
    decoupled_learning_rate: float | None
    grad_norm: float | None
    num_zeros: int | None
    skipped: bool
    note: str
    ended_at: float
    rolled_back: bool = False
