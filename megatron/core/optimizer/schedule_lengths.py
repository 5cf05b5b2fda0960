"""How long the schedules are, in samples, and which lengths make none (floor 0).

The rules on the command line and the schedule itself both ask here, so what the rules let pass can be built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from megatron.core.optimizer.optimization_config import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class ScheduleLengths:
    """Lengths in samples: the warm-up (as Megatron, a share of the schedule is not cut to whole samples), the whole
    learning rate schedule, the tail of WSD (0: none), the run; and what one iteration of the flags was counted as,
    None where the flags count samples."""

    warmup_samples: float
    decay_samples: int
    wsd_samples: int
    total_samples: int
    samples_per_step: int | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleFault:
    """Why lengths make no schedule: the length at fault, what is wrong, what to do."""

    which: Literal["decay", "warmup", "tail"]
    message: str
    fix: str


def schedule_lengths(
    config: OptimizerConfig, *, train_iters: int | None, train_samples: int | None, global_batch_size: int
) -> ScheduleLengths:
    """The lengths that the flags ask for; iterations count as full batches of global_batch_size samples.

    Exactly one of train_iters and train_samples is set.
    """
    assert (train_iters is None) != (train_samples is None), (
        f"{train_iters} iterations, {train_samples} samples"
    )
    counted, unit = ("samples", 1) if train_iters is None else ("iters", global_batch_size)
    decay, warmup, tail = (
        getattr(config, f"lr_{name}_{counted}") for name in ("decay", "warmup", "wsd_decay")
    )
    fraction = config.lr_warmup_fraction
    total = (train_samples or train_iters or 0) * unit
    decay = total if decay is None else decay * unit
    return ScheduleLengths(
        warmup_samples=warmup * unit if fraction is None else fraction * decay,
        decay_samples=decay,
        wsd_samples=(tail or 0) * unit,
        total_samples=total,
        samples_per_step=None if train_iters is None else unit,
    )


def schedule_faults(
    style: str, *, warmup_samples: float, decay_samples: int, wsd_samples: int
) -> Iterator[ScheduleFault]:
    """Everything that keeps these lengths from being a schedule of this --lr-decay-style."""
    if decay_samples < 1:
        yield ScheduleFault(
            "decay",
            f"the learning rate schedule is {decay_samples} samples long",
            "set --lr-decay-iters or --train-iters (or their -samples) to at least 1",
        )
        return  # the others are measured by it
    if not 0 <= warmup_samples < decay_samples:
        yield ScheduleFault(
            "warmup",
            f"--lr-warmup-* is {warmup_samples} samples, the whole schedule {decay_samples}",
            "shorten the warm-up or lengthen --lr-decay-iters / --lr-decay-samples",
        )
    if style == "WSD" and not 0 < wsd_samples <= decay_samples:
        yield ScheduleFault(
            "tail",
            f"--lr-wsd-decay-* is {wsd_samples} samples of a schedule of {decay_samples}",
            "set it to at least 1, and at most the schedule",
        )
