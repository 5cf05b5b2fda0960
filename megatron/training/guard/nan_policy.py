"""What to do with a step whose loss or gradients are not finite: `--nan-policy abort|skip|rerun-once`, and a dynamic
loss scale. docs/reliability.md has the table.

Pure. The caller makes sure that every rank calls `decide` with the same facts (they come out of reductions), so that
all ranks decide alike before any weight changes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from megatron.core.schema import Schema, integer
from megatron.training.guard.exit_status import ExitStatus

NAN_POLICY_SCHEMA: Schema = {"consecutive_skips": integer()}  # `NanPolicy.state`


# What the step does now, and what came out when it was run a second time.
StepAction = enum.Enum("StepAction", ["APPLY", "SKIP", "RERUN", "ABORT"])
RerunResult = enum.Enum("RerunResult", ["NOT_RUN", "FINITE", "SAME", "DIFFERENT"])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A decision with its reason. status: set for ABORT. save_first: keep the state before the step first."""

    decision: StepAction
    reason: str = ""
    status: ExitStatus | None = None
    save_first: bool = False


_TRANSIENT = "transient fault: the second run of the step is finite and is used"
_TWICE = "the same bits came out twice: the model, its data, or a device that always fails alike"
_UNLIKE = "two runs of the step gave two different non-finite results: a faulty device or memory"
_RERUN_VERDICTS = {
    RerunResult.NOT_RUN: Verdict(StepAction.RERUN, "running the step a second time"),
    RerunResult.FINITE: Verdict(StepAction.APPLY, _TRANSIENT),
    RerunResult.SAME: Verdict(StepAction.ABORT, _TWICE, ExitStatus.RERUN_PERSISTENT, save_first=True),
    RerunResult.DIFFERENT: Verdict(StepAction.ABORT, _UNLIKE, ExitStatus.RERUN_INVALID),
}


@dataclasses.dataclass(frozen=True)
class NonFiniteSite:
    """Where non-finite values were met first.

    rank: global. microbatch: the first with a non-finite loss, None when all losses are finite. parameter: the first
    with a non-finite weight (`bad_weight`) or else gradient. value: what is wrong, if it is no single place. pp_rank:
    the rank's place in the pipeline.
    """

    rank: int
    microbatch: int | None = None
    parameter: str | None = None
    bad_weight: bool = False
    value: str = "not finite"
    pp_rank: int = 0

    def __str__(self) -> str:
        things = [] if self.microbatch is None else [f"loss of microbatch {self.microbatch}"]
        if self.parameter is not None:
            things.append(f"{'weight' if self.bad_weight else 'gradient'} of {self.parameter}")
        if not things:
            return f"the gradient is {self.value}"
        verb = "is" if len(things) == 1 else "are"
        return f"the {' and the '.join(things)} {verb} {self.value} on rank {self.rank}"


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite and the policy says to stop."""

    def __init__(self, where: NonFiniteSite, iteration: int, verdict: Verdict) -> None:
        self.iteration, self.verdict = iteration, verdict
        self.status = verdict.status or ExitStatus.NON_FINITE
        advice = (
            "Lower --lr, look at the batch (tools/inspect_data.py), or go on past it with --nan-policy skip."
        )
        if where.bad_weight:
            advice = "The weights were so before it: look at --init-method-std and at what --load names."
        super().__init__(
            f"iteration {iteration}: {where}. {verdict.reason}. No weight was changed by this iteration. {advice}"
        )


def first_site(sites: Iterable[NonFiniteSite | None]) -> NonFiniteSite | None:
    """The site every rank names, from all ranks' sites: where it began.

    A bad weight makes every loss after it bad, a bad loss every gradient; gradients go from the last stage to the
    first, so the last bad one is the origin. Then the lowest rank.
    """
    found = [site for site in sites if site is not None]
    return min(
        found, key=lambda s: (not s.bad_weight, s.microbatch is None, -s.pp_rank, s.rank), default=None
    )


def compare_rerun(first: bytes, second: bytes, *, second_nonfinite: bool) -> RerunResult:
    """Result of a second run. first, second: digests of the bits of loss and gradients."""
    if not second_nonfinite:
        return RerunResult.FINITE
    return RerunResult.SAME if first == second else RerunResult.DIFFERENT


@dataclasses.dataclass
class NanPolicy:
    """The policy of a run and the one number it remembers: how many steps in a row were skipped."""

    policy: str
    max_skips: int
    dynamic_loss_scale: bool = False
    consecutive_skips: int = 0

    def __post_init__(self) -> None:
        assert self.policy in ("abort", "skip", "rerun-once"), f"--nan-policy {self.policy}"
        assert self.max_skips >= 0, f"--nan-max-skips {self.max_skips}"

    def decide(
        self, *, nonfinite: bool, rerun: RerunResult = RerunResult.NOT_RUN, scale_at_minimum: bool = False
    ) -> Verdict:
        """The decision for one step; skipped steps in a row are counted here.

        nonfinite: of the first run, agreed by all ranks. rerun: set when `decide` has answered RERUN before.
        scale_at_minimum: the dynamic loss scale cannot go lower.
        """
        can_rerun = self.policy == "rerun-once"
        assert rerun is RerunResult.NOT_RUN or can_rerun, f"rerun under --nan-policy {self.policy}"
        if not nonfinite:
            verdict = Verdict(StepAction.APPLY)
        elif self.dynamic_loss_scale and not scale_at_minimum:
            return Verdict(StepAction.SKIP, "overflow at this loss scale: step skipped, scale lowered")
        elif self.dynamic_loss_scale:
            verdict = self._bounded_skip("the loss scale is at its minimum")
        elif self.policy == "skip":
            verdict = self._bounded_skip("--nan-policy skip")
        elif can_rerun:
            verdict = _RERUN_VERDICTS[rerun]
        else:
            verdict = Verdict(StepAction.ABORT, "--nan-policy abort", ExitStatus.NON_FINITE)
        if verdict.decision is StepAction.APPLY:
            self.consecutive_skips = 0
        elif verdict.decision is StepAction.SKIP:
            self.consecutive_skips += 1
        return verdict

    def _bounded_skip(self, why: str) -> Verdict:
        count = self.consecutive_skips + 1
        if count <= self.max_skips:
            reason = f"{why}: step skipped ({count} in a row, at most {self.max_skips})"
            return Verdict(StepAction.SKIP, reason)
        reason = f"{why}: {count} non-finite steps in a row, --nan-max-skips is {self.max_skips}"
        return Verdict(StepAction.ABORT, reason, ExitStatus.NON_FINITE)

    def state(self) -> dict[str, int]:
        """For the checkpoint: a resumed run must stop where the undisturbed one would."""
        return {"consecutive_skips": self.consecutive_skips}

    def load_state(self, state: dict[str, int]) -> None:
        """The inverse of `state`."""
        self.consecutive_skips = int(state["consecutive_skips"])
