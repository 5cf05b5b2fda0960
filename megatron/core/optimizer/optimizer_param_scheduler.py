"""Learning rate and weight decay as functions of the samples seen (WSD: arXiv 2404.06395).

The clock counts samples of successful steps, so schedules do not notice batch ramp-up or a changed batch
size. The first update uses the rates at 0 samples; after it, `step(batch)` sets the rates of the next.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config_base import BATCH, COUNT, FINITE
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.optimizer.flat_update import ParamGroup
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.optimizer.schedule_lengths import schedule_faults, schedule_lengths
from megatron.core.schema import Schema, fields_of, integer, number, one_of, or_null


class ScheduleError(ValueError):
    """Flags that make no schedule, or that disagree with a checkpoint's."""


@dataclasses.dataclass(frozen=True)
class RateSchedule:
    """All that the rates depend on, but for the clock. Lengths in samples; wsd_samples is the tail of WSD.

    warmup_samples: a share of the schedule (--lr-warmup-fraction) need not be whole samples.
    """

    max_lr: float
    min_lr: float
    init_lr: float
    decoupled_max_lr: float | None
    decoupled_min_lr: float | None
    warmup_samples: float
    decay_samples: int
    decay_style: str
    wsd_samples: int
    wsd_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_samples: int
    weight_decay_style: str

    def __post_init__(self) -> None:
        for fault in schedule_faults(
            self.decay_style,
            warmup_samples=self.warmup_samples,
            decay_samples=self.decay_samples,
            wsd_samples=self.wsd_samples,
        ):
            raise ScheduleError(f"{fault.message}: {fault.fix}")
        if self.weight_decay_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise ScheduleError(
                f"--start-weight-decay {self.start_weight_decay} and --end-weight-decay "
                f"{self.end_weight_decay} differ: set --weight-decay-incr-style linear or cosine"
            )

    def peak_and_floor(self, decoupled: bool) -> tuple[float, float]:
        """The learning rates of a group of parameters; decoupled: of one that --decoupled-lr is for."""
        if decoupled and self.decoupled_max_lr is not None and self.decoupled_min_lr is not None:
            return self.decoupled_max_lr, self.decoupled_min_lr
        return self.max_lr, self.min_lr


def _style(flag: str) -> Schema:
    return one_of(*typing.get_args(OptimizerConfig.__annotations__[flag]))


# As flags bound them: iterations x samples, and rates.
_LENGTH, _RATE = integer(high=int(COUNT.most * BATCH.most)), number(high=FINITE.most)
# `OptimizerParamScheduler.state`.
SCHEDULER_SCHEMA: Schema = {
    "samples": integer(),
    "schedule": fields_of(
        RateSchedule,
        decay_style=_style("lr_decay_style"),
        wsd_style=_style("lr_wsd_decay_style"),
        weight_decay_style=_style("weight_decay_incr_style"),
        max_lr=_RATE,
        min_lr=_RATE,
        decoupled_max_lr=or_null(_RATE),
        decoupled_min_lr=or_null(_RATE),
        decay_samples=_LENGTH,
        wsd_samples=_LENGTH,
        weight_decay_samples=_LENGTH,
    ),
}


def learning_rate(schedule: RateSchedule, samples: int, max_lr: float, min_lr: float) -> float:
    """The rate after `samples` samples for a group with this peak and floor."""
    warmup, decay, tail = schedule.warmup_samples, schedule.decay_samples, schedule.wsd_samples
    if warmup > 0 and samples <= warmup:
        return schedule.init_lr + (max_lr - schedule.init_lr) * samples / warmup
    if schedule.decay_style == "constant":
        return max_lr
    if samples > decay:
        return min_lr
    if schedule.decay_style == "inverse-square-root":
        return max(min_lr, max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
    if schedule.decay_style != "WSD":
        height = _HEIGHTS[schedule.decay_style]((samples - warmup) / (decay - warmup))
    elif samples <= decay - tail:  # stable until the tail begins, then down to 0 at its end
        height = 1.0
    else:
        height = _HEIGHTS[schedule.wsd_style]((samples - (decay - tail)) / tail)
    return min_lr + height * (max_lr - min_lr)


# From 1 to 0 as `done` goes from 0 to 1.
_HEIGHTS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


def weight_decay(schedule: RateSchedule, samples: int) -> float:
    """The weight decay after `samples` samples."""
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if schedule.weight_decay_style == "constant" or samples >= schedule.weight_decay_samples:
        return end
    height = _HEIGHTS[schedule.weight_decay_style](samples / schedule.weight_decay_samples)
    return end + height * (start - end)


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of an optimizer's groups.

    override: at loading, this run's schedule wins over the checkpoint's. use_checkpoint: the checkpoint's
    wins. With neither they must agree.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        schedule: RateSchedule,
        *,
        override: bool = False,
        use_checkpoint: bool = False,
    ) -> None:
        if override and use_checkpoint:
            raise ScheduleError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict "
                "each other"
            )
        self.param_groups, self.schedule, self.samples = param_groups, schedule, 0
        self.override, self.use_checkpoint = override, use_checkpoint
        self.step(0)

    @property
    def lr(self) -> float:
        """The rate of ordinary parameters, for the next step."""
        return learning_rate(self.schedule, self.samples, *self.schedule.peak_and_floor(False))

    @property
    def decoupled_lr(self) -> float | None:
        """The rate of word embeddings and output layer under --decoupled-lr."""
        if self.schedule.decoupled_max_lr is None:
            return None
        return learning_rate(self.schedule, self.samples, *self.schedule.peak_and_floor(True))

    def step(self, samples: int) -> None:
        """Move the clock on, by the batch of a successful step, and set the rates of the next."""
        self.samples += samples
        decay = weight_decay(self.schedule, self.samples)
        for group in self.param_groups:
            group["lr"] = learning_rate(self.schedule, self.samples, group["max_lr"], group["min_lr"])
            group["weight_decay"] = decay * group["wd_mult"]

    def state(self) -> dict[str, Any]:
        return {"samples": self.samples, "schedule": dataclasses.asdict(self.schedule)}

    def load_state(self, state: dict[str, Any]) -> str | None:
        """What has to be told of it, if anything. Raises ScheduleError if schedules differ and no flag says which to
        take; it names all that do. CheckpointError for one that no flags make."""
        try:
            saved, told = RateSchedule(**state["schedule"]), None
        except ScheduleError as error:
            raise CheckpointError(f"no schedule: {error}") from None
        mine = self.schedule
        if not (self.use_checkpoint or self.override) and saved != mine:
            # As earlier versions had it, which cut --lr-warmup-fraction to samples.
            cut = dataclasses.replace(mine, warmup_samples=int(mine.warmup_samples))
            if saved != cut or not isinstance(saved.warmup_samples, int):
                ours, theirs = dataclasses.asdict(mine), dataclasses.asdict(saved)
                differences = [
                    f"{k}: checkpoint {theirs[k]}, flags {v}" for k, v in ours.items() if theirs[k] != v
                ]
                raise ScheduleError(
                    f"the checkpoint's schedule is not this run's ({'; '.join(differences)}): take the flags' with "
                    "--override-opt_param-scheduler or the checkpoint's with --use-checkpoint-opt_param-scheduler"
                )
            told = (
                f"the checkpoint's warm-up is {saved.warmup_samples} samples, the flags' share of the schedule cut to "
                f"whole ones, as it once was: the run keeps to it, not to {mine.warmup_samples} "
                "(--override-opt_param-scheduler)"
            )
        if self.use_checkpoint or told is not None:
            self.schedule = saved
            for group in self.param_groups:
                group["max_lr"], group["min_lr"] = saved.peak_and_floor(group["decoupled"])
        self.samples = int(state["samples"])
        self.step(0)
        return told


def build_schedule(
    config: OptimizerConfig, *, train_iters: int | None, train_samples: int | None, global_batch_size: int
) -> RateSchedule:
    """The schedule of the flags; lengths in iterations become samples at the full batch size.

    Exactly one of train_iters and train_samples is set. Raises ScheduleError.
    """
    lengths = schedule_lengths(
        config, train_iters=train_iters, train_samples=train_samples, global_batch_size=global_batch_size
    )
    floor, start, end = config.decoupled_min_lr, config.start_weight_decay, config.end_weight_decay
    return RateSchedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        init_lr=config.lr_warmup_init,
        decoupled_max_lr=config.decoupled_lr,
        decoupled_min_lr=None if config.decoupled_lr is None else config.min_lr if floor is None else floor,
        warmup_samples=lengths.warmup_samples,
        decay_samples=lengths.decay_samples,
        decay_style=config.lr_decay_style,
        wsd_samples=lengths.wsd_samples,
        wsd_style=config.lr_wsd_decay_style,
        start_weight_decay=config.weight_decay if start is None else start,
        end_weight_decay=config.weight_decay if end is None else end,
        weight_decay_samples=lengths.total_samples,
        weight_decay_style=config.weight_decay_incr_style,
    )


def idle_scheduler(param_groups: Sequence[ParamGroup]) -> OptimizerParamScheduler:
    """A scheduler for groups that are never stepped (--skip-train): no flag need make a schedule."""
    config = OptimizerConfig(lr=0.0, weight_decay=0.0, lr_decay_style="constant", lr_wsd_decay_style="linear")
    schedule = build_schedule(config, train_iters=1, train_samples=None, global_batch_size=1)
    return OptimizerParamScheduler(param_groups, schedule)


def build_scheduler(
    config: OptimizerConfig,
    param_groups: Sequence[ParamGroup],
    *,
    train_iters: int | None,
    train_samples: int | None,
    global_batch_size: int,
) -> OptimizerParamScheduler:
    """The scheduler of the flags over an optimizer's groups."""
    schedule = build_schedule(
        config, train_iters=train_iters, train_samples=train_samples, global_batch_size=global_batch_size
    )
    return OptimizerParamScheduler(
        param_groups,
        schedule,
        override=config.override_opt_param_scheduler,
        use_checkpoint=config.use_checkpoint_opt_param_scheduler,
    )
