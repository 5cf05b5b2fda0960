"""Post-validation of optimizer steps on one rank of a pipeline (arXiv 2401.10241, section 4).

At a step's end a rank knows of itself and of the ranks before it (a partial state). If that is clean it steps, and
begins the next step; while its first forwards run, the whole state comes back, and the step is confirmed, or taken back
and taken rightly. Every rank decides by the same numbers, so all come to the same; nobody waits for all.

[Note: exactness] Steps end with the bits of synchronous ones: the whole state is what `prepare` adds up, a confirmed
step is the very call that a synchronous one makes, and one that is taken back is taken again from the bits that the
snapshot kept, with gradients that no step has written to. Gradients, `param_groups` and what `StepOwner.complete` told
must stay as they are until the step is decided: an owner moves its clocks (learning rate, loss scale) in `decided`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron.core.pipeline_parallel.plan.ir import Kind, RawOp
from megatron.core.pipeline_parallel.post_validation.channel import StateArrival, StateChannel
from megatron.core.pipeline_parallel.post_validation.state import Decision, Go, ValidationState
from megatron.core.protocols import Stepper


class ValidatedStepper(Stepper, Protocol):
    """An optimizer that can say what its pipeline stage knows of a step."""

    def stage_state(
        self, nonfinite: bool, *, count_zero_grads: bool = False, extras: Sequence[float] = ()
    ) -> ValidationState:
        """Of all ranks of this stage, the same on each; nonfinite and extras are this rank's. Communicates over tp and
        dp."""

    def norm(self, sums: Sequence[float], divisor: float) -> float:
        """Of gradients with these squared sums, divided."""


class Completed(NamedTuple):
    """divisor: of the step's gradients, as for `Stepper.step`. nonfinite: this rank has seen a loss that is not finite.
    extras: numbers of this rank that are wanted summed over all, as many on every rank: losses, flags. They travel
    with the state, so that no step needs a collective over the world."""

    divisor: float
    nonfinite: bool
    extras: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """How a step ended, the same on all ranks. coefficient: None where it was skipped. num_zeros: where zeros are
    counted. rolled_back: some rank had stepped, which proved wrong. extras: summed."""

    norm: float
    coefficient: float | None
    nonfinite: bool
    num_zeros: int
    rolled_back: bool
    clean: bool
    extras: tuple[float, ...] = ()


class StepOwner(Protocol):
    """Whose steps these are: the trainer, or a test."""

    def complete(self) -> Completed:
        """After the step's last backward and reduction: finish its gradients, and say what they are divided by.
        Communicates over dp."""

    def settle_weights(self) -> None:
        """This rank's weights are about to be written although forwards have begun: return once no gather sends or
        reads them any more."""

    def weights_changed(self) -> None:
        """This rank's weights were written, or the forwards that have begun are dropped: what was gathered is of no
        use. Communicates over dp."""

    def decided(self, outcome: StepOutcome) -> bool:
        """The step is as it will stay, on all ranks. Whether to go on: False (the same on all ranks) stops the step
        that is under way, see `Go.STOP`."""


@dataclasses.dataclass
class _Known:
    """What a rank knows of a step. divisor: of its gradients. state: of this rank and those before. steps: whether this
    rank steps on that. optimistic: ranks step before they know all. arrival, whole: the whole state, on its way and
    once it is there."""

    divisor: float
    state: ValidationState
    steps: bool
    optimistic: bool
    arrival: StateArrival | None = None
    whole: ValidationState | None = None


class PostValidator:
    """One rank's steps. decides: what a step has to be, of a state and the norm of its sums, divided
    (`core.optimizer.clip_grads`); a rank that knows no more than a partial state steps where that would be clean.
    rank, num_ranks: in the pipeline. after: so many clean steps in a row are decided on at once,
    with everybody waiting, before ranks step on what they know; 0: they always do.

    `handlers` and `decide` are for the executor of a plan with post-validation. Not thread-safe.
    """

    def __init__(
        self,
        stepper: ValidatedStepper,
        messages: StateChannel,
        owner: StepOwner,
        decides: Callable[[ValidationState, float], Decision],
        *,
        rank: int,
        num_ranks: int,
        after: int = 10,
        count_zero_grads: bool = False,
    ) -> None:
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        assert after >= 0, after
        self._stepper, self._messages, self._owner, self._decides = stepper, messages, owner, decides
        self._rank, self._last = rank, num_ranks - 1
        self._after, self._count_zero_grads = after, count_zero_grads
        self._clean_steps = 0
        self._from_before: StateArrival | None = None
        self._known_now: _Known | None = None
        self._pending: _Known | None = None  # a step that is not decided on

    @property
    def pending(self) -> bool:
        """Whether a step is not decided on."""
        return self._pending is not None

    @property
    def handlers(self) -> Mapping[Kind, Callable[[RawOp], None]]:
        """For `Executor(handlers=...)`."""
        return {Kind.RECV_STATE: self._receive, Kind.SEND_STATE: self._send, Kind.STEP: self._step}

    def decide(self) -> Go:
        """VALIDATE: for `Executor(validation=...)`. Communicates over the pipeline."""
        if self._pending is None:  # the first step, or one after validate_now()
            return Go.ON
        pending = self._pending
        outcome, go_on, changed = self._settle(pending, self._whole(pending))
        # Ranks that had not stepped do so now: their forwards were of other weights, too.
        again = pending.optimistic and not outcome.clean
        if (again or not go_on) and not changed:
            self._owner.weights_changed()  # frees what was gathered for the forwards that are dropped
        return Go.STOP if not go_on else Go.AGAIN if again else Go.ON

    def validate_now(self) -> StepOutcome | None:
        """Decide on the step that is pending, outside of any plan; None where there is none. To be called on all ranks,
        before weights are saved or evaluated, and at the end. Communicates over the pipeline."""
        pending = self._pending
        if pending is None:
            return None
        if self._rank < self._last and pending.arrival is None:
            pending.arrival = self._messages.receive(self._rank + 1)
        whole = self._whole(pending)
        if self._rank > 0:
            self._messages.send(self._rank - 1, whole.numbers)
        outcome, *_ = self._settle(pending, whole)
        self._messages.drain()
        return outcome

    # Operations of a plan; partial states go to later ranks, whole ones to earlier --------------------

    def _receive(self, op: RawOp) -> None:
        peer = op[6]
        if peer < self._rank:
            self._from_before = self._messages.receive(peer)
        elif self._pending is not None:
            self._pending.arrival = self._messages.receive(peer)

    def _send(self, op: RawOp) -> None:
        peer = op[6]
        if peer > self._rank:
            self._messages.send(peer, self._known().state.numbers)
        elif self._pending is not None:
            self._messages.send(peer, self._whole(self._pending).numbers)

    def _step(self, op: RawOp) -> None:
        """Step on what is known, where that is enough; else, with all others, once it is."""
        assert self._pending is None, "a step before the last one was decided on"
        known, self._known_now = self._known(), None
        if known.steps:
            self._stepper.snapshot()
            self._take_step(known.divisor, 1.0)
        self._pending = known
        known.whole = known.state if self._rank == self._last else None
        if not known.optimistic:
            self.validate_now()

    # What they share ---------------------------------------------------------------------------------

    def _known(self) -> _Known:
        """Of the step under way; completes it when it is first asked for."""
        if self._known_now is None:
            divisor, nonfinite, extras = self._owner.complete()
            counts = self._count_zero_grads
            state = self._stepper.stage_state(nonfinite, count_zero_grads=counts, extras=extras)
            if self._from_before is not None:
                state = state.like(self._from_before.wait(len(state.numbers))) + state
                self._from_before = None
            norm, optimistic = self._stepper.norm(state.sums, divisor), self._clean_steps >= self._after
            steps = optimistic and self._decides(state, norm).clean
            state = dataclasses.replace(state, stepped=state.stepped or steps)
            self._known_now = _Known(divisor, state, steps, optimistic)
        return self._known_now

    def _whole(self, known: _Known) -> ValidationState:
        if known.whole is None:
            assert known.arrival is not None, "the whole state was not asked for"
            known.whole = known.state.like(known.arrival.wait(len(known.state.numbers)))
        return known.whole

    def _settle(self, pending: _Known, whole: ValidationState) -> tuple[StepOutcome, bool, bool]:
        """Make the step what it has to be, and tell the owner; whether that goes on, and was told of new weights."""
        divisor, stepped = pending.divisor, pending.steps
        norm = self._stepper.norm(whole.sums, divisor)
        decision = self._decides(whole, norm)
        self._pending = None
        if pending.optimistic and not decision.clean:
            self._owner.settle_weights()
        if stepped:
            if not decision.clean:
                self._stepper.rollback()
            self._stepper.commit()
        confirmed = stepped and decision.clean
        changed = not confirmed and (stepped or decision.coefficient is not None)
        if changed and decision.coefficient is not None:
            self._take_step(divisor, decision.coefficient)
        elif changed:
            self._owner.weights_changed()
        self._clean_steps = self._clean_steps + 1 if decision.clean else 0
        outcome = StepOutcome(
            norm,
            decision.coefficient,
            nonfinite=not whole.finite,
            num_zeros=int(whole.num_zeros),
            rolled_back=whole.stepped and not decision.clean,
            clean=decision.clean,
            extras=whole.extras,
        )
        return outcome, self._owner.decided(outcome), changed

    def _take_step(self, divisor: float, coefficient: float) -> None:
        self._stepper.step(divisor, coefficient)
        self._owner.weights_changed()
