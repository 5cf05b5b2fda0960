"""What a step's figures decide."""

from __future__ import annotations

import math

import pytest

from megatron.core.optimizer.clip_grads import StepRules
from megatron.core.pipeline_parallel.post_validation.state import Decision, ValidationState


@pytest.mark.parametrize(
    ("state", "norm", "max_norm", "skips", "expected"),
    [
        (ValidationState((4.0,), 0, False), 2.0, 0.0, True, Decision(1.0, True)),  # clipping is off
        (ValidationState((4.0,), 0, False), 2.0, 5.0, True, Decision(1.0, True)),
        (ValidationState((4.0,), 0, False), 2.0, 1.0, True, Decision(1.0 / (2.0 + 1e-6), False)),
        (ValidationState((4.0,), 0, True), 2.0, 5.0, True, Decision(None, False)),  # a loss was not finite
        (ValidationState((math.nan,), 0, False), math.nan, 0.0, True, Decision(None, False)),
        (ValidationState((math.inf,), 0, False), math.inf, 1.0, True, Decision(None, False)),
        # Unchecked gradients are used as they are, but nobody steps on them before all know.
        (ValidationState((math.inf,), 0, False), math.inf, 1.0, False, Decision(0.0, False)),
        (ValidationState((math.nan,), 0, False), math.nan, 0.0, False, Decision(1.0, False)),
    ],
)
def test_decisions(state, norm, max_norm, skips, expected):
    rules = StepRules(max_norm, skips)
    assert rules.decide(state, norm) == expected
