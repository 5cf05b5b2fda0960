"""Loss scaling (arXiv 1710.03740): fp16 gradients are too small for their exponent, so the loss is multiplied first."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.core.config_base import FLOAT
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.schema import MAX_INT, Schema, integer, number, optional

# `GradScaler.state` of either kind. The budget goes below zero while steps overflow.
SCALER_SCHEMA: Schema = {
    "scale": number(low=math.ulp(0.0), high=FLOAT.most),  # any above 0 that a flag can give
    "clean_steps": optional(integer()),
    "budget": optional(integer(low=-MAX_INT)),
}


class GradScalerStateError(ValueError):
    """A checkpoint's loss scale does not belong to this run's kind of scaler."""


@dataclasses.dataclass
class GradScaler:
    """A constant scale, 1.0 where nothing is scaled; or with `dynamic` one as large as the gradients allow.

    dynamic: a non-finite step is an ordinary event that lowers the scale (and is skipped), not an accident. Every such
    step spends one of `hysteresis`; once they are spent, each further one halves the scale (not below min_scale).
    `window` clean steps in a row double it and give the budget back.
    """

    scale: float = 1.0
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    dynamic: bool = False
    clean_steps: int = 0
    budget: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.budget = self.hysteresis

    @property
    def at_minimum(self) -> bool:
        """A non-finite step would leave the scale as it is."""
        return not self.dynamic or self.scale <= self.min_scale

    def update(self, nonfinite: bool) -> None:
        """After every step, skipped ones included."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if nonfinite else self.clean_steps + 1
        if nonfinite:
            self.budget -= 1
            if self.budget <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        elif self.clean_steps >= self.window:  # more in a checkpoint of a run with a longer window
            self.clean_steps, self.budget = 0, self.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, Any]:
        names = ("scale", "clean_steps", "budget") if self.dynamic else ("scale",)
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped. A constant scale is what the flags say, whatever an earlier run used, and
        one written with a constant scale starts a dynamic one afresh."""
        if not self.dynamic or set(state) == {"scale"}:
            return
        if missing := self.state().keys() - state.keys():
            raise GradScalerStateError(f"the checkpoint's loss scaler state lacks {sorted(missing)}: {state}")
        self.scale = float(state["scale"])
        self.clean_steps, self.budget = int(state["clean_steps"]), int(state["budget"])


def build_grad_scaler(config: OptimizerConfig) -> GradScaler:
    """--loss-scale: constant; --fp16 without it: dynamic; else none."""
    if config.loss_scale is not None or not config.fp16:
        return GradScaler(1.0 if config.loss_scale is None else config.loss_scale)
    window = int(config.loss_scale_window)
    return GradScaler(
        config.initial_loss_scale, config.min_loss_scale, window, config.hysteresis, dynamic=True
    )
