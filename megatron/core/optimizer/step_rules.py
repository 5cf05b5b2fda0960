"""Whether a step is taken, and clipped by how much, from what is known of its gradients."""

from __future__ import annotations

import dataclasses

from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.pipeline_parallel.post_validation.state import Decision, ValidationState


@dataclasses.dataclass(frozen=True)
class StepRules:
    """max_norm: `--clip-grad`, 0 = off. skips_nonfinite: gradients that are not finite make no step (else they are
    used, as without `--check-for-nan-in-loss-and-grad`)."""

    max_norm: float
    skips_nonfinite: bool = True

    def decide(self, state: ValidationState, norm: float) -> Decision:
        """norm: of the state's sums, divided."""
        finite = state.finite
        if not finite and self.skips_nonfinite:
            return Decision(None, clean=False)
        coefficient = clip_coefficient(norm, self.max_norm)
        return Decision(coefficient, clean=finite and coefficient == 1.0)
