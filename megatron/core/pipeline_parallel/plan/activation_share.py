"""How much of a limit a searched schedule's activations take: the same few orders for every candidate.

[Note: shares] What a searched schedule may hold of activations and what is left to gathered weights and whole gradients
add up to the limit. With more activations the bubble falls, and what is gathered anew rises: the step's time has one
minimum, or nearly so. A golden section finds it in a few orders, between the least that a proven bound allows and the
most that fits. An order that is made for all the room holds too much beside its gradients: each rank then gets as much
less as it is over the limit by, so that one or two orders come to what fits, which often is the best.

[Note: alone or beside others] The section goes the same way for a candidate that stands alone: an order is left out
because another candidate is faster by its proven bound, or by far, and that asks for a larger share; one that does not
fit asks for a smaller one. (A time and a bound of two shares are not comparable: where they were compared, the V of S1
under 60 GB took 9.01 s alone, and beside others nothing was found for it.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.candidate import (
    Judged,
    NoFasterError,
    bound_of,
    judged,
    least_bytes,
    refuse_full,
    room_of,
    search_of,
)
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec

# Orders of a searched schedule, of them so many at most to come to what fits; steps that bisect a share by its bound.
_ORDERS, _TO_FIT, _STEPS = 5, 3, 6
_GOLDEN = 0.5 * (5**0.5 - 1)
# An order that takes so much longer than the best plan known, gathers apart, is not looked at.
_FAR = 1.03


def looks(spec: ScheduleSpec, num_microbatches: int, tries: int | None, below: float) -> list[Judged]:
    """A candidate's plan, for each share of activations that is tried. below: what takes longer need not be found.
    Raises PlanError where nothing keeps to the limit, or is below."""
    if not spec.row.searched:
        refuse_full(spec, num_microbatches)
        order = plan_for(spec.bare, num_microbatches, PlanPurpose.TRAIN)
        return [judged(spec, order, search_of(spec, order), tries)]
    section = _Section(spec, num_microbatches, tries, below)
    section.come_to_fit()
    section.narrow()
    if not section.looked:
        assert section.refused is not None, "nothing was tried"
        raise section.refused
    return list(section.looked.values())


class _Section:
    """looked: plans by their orders, which are alike for several shares. room: by rank, for activations; a share is one
    of it. times: by share; infinite: it does not fit, None: it is too slow. to_fit: by rank, what the last order's
    activations may be for it to fit, () where it does. below: the least time known, of this candidate too. refused: why
    an order was not taken; that it fits and is too slow says more than that it does not fit."""

    def __init__(self, spec: ScheduleSpec, num_microbatches: int, tries: int | None, below: float) -> None:
        self.spec, self.num_microbatches, self.tries, self.below = spec, num_microbatches, tries, below
        self.room, self.orders = room_of(spec), 0
        self.least = [one.activation for one in least_bytes(spec)]
        self.looked: dict[Plan, Judged] = {}
        self.times: dict[float, float | None] = {}
        self.to_fit: Sequence[float] = ()
        self.refused: PlanError | None = None

    def come_to_fit(self) -> None:
        """From each rank's room take what its order is over the limit by."""
        while self._cost(1.0) is not None and self.to_fit and self.orders < _TO_FIT:
            self.room = tuple(map(max, self.least, self.to_fit))
            self.times.clear()

    def narrow(self) -> None:
        """The golden section."""
        low, high = max(one / room for one, room in zip(self.least, self.room, strict=True)), 1.0
        if self._cost(high) is None:
            return
        low = self._least_worth_it(low)
        while self.orders < _ORDERS and high - low > 1e-3:
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            one, other = self._cost(left), self._cost(right)
            if one is None:
                low = left
                high = right if other == math.inf else high
            elif other is None or one <= other:  # where both do not fit, with less room
                high = right
            else:
                low = left

    def _least_worth_it(self, low: float) -> float:
        """The least share whose proven bound is below what is known, nearly."""
        high = 1.0
        for _ in range(_STEPS if self._bound(low) >= self.below else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self._bound(middle) >= self.below else (low, middle)
        return low

    def _cost(self, share: float) -> float | None:
        share = round(share, 6)  # the same one comes again by another sum
        if share not in self.times:
            try:
                self.times[share] = self._look(share).simulation.cost
            except PlanError as error:
                slow = isinstance(error, NoFasterError)
                self.times[share] = None if slow else math.inf
                if self.refused is None or (slow and not isinstance(self.refused, NoFasterError)):
                    self.refused = error
        return self.times[share]

    def _look(self, share: float) -> Judged:
        if (bound := self._bound(share)) >= self.below:
            raise NoFasterError(bound)
        spec = self._within(share)
        order = plan_for(spec.bare, self.num_microbatches, PlanPurpose.TRAIN)
        bare = simulate(order, spec.costs)
        self.orders += 1
        if bare.cost >= _FAR * self.below:
            raise NoFasterError(bound)
        if order not in self.looked:
            search = search_of(spec, order)
            over = [] if search is None else search.over
            peaks = bare.peak_activation
            self.to_fit = [one - more for one, more in zip(peaks, over, strict=True)] if any(over) else ()
            self.looked[order] = judged(spec, order, search, self.tries)
            self.below = min(self.below, self.looked[order].simulation.cost * (1 - TOLERANCE))
        return self.looked[order]

    def _bound(self, share: float) -> float:
        return bound_of(self._within(share), self.num_microbatches)

    def _within(self, share: float) -> ScheduleSpec:
        return dataclasses.replace(self.spec, limits=tuple(share * room for room in self.room))
