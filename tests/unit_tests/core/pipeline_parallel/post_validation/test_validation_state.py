"""States add up to the norm of all."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer.clip_grads import StepRules, norm_of
from megatron.core.pipeline_parallel.post_validation.state import ValidationState

sums = st.floats(0, 1e12, allow_subnormal=False)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(sums, min_size=1, max_size=4), min_size=1, max_size=5))
def test_partial_states_have_the_bits_of_the_whole(stages):
    """Each stage owns some regions. Any bracketing of the sum gives the norm's bits, and no part's norm is larger."""
    size = sum(map(len, stages))
    parts, start = [], 0
    for own in stages:
        parts.append(ValidationState((*[0.0] * start, *own, *[0.0] * (size - start - len(own))), 1.0, False))
        start += len(own)
    partial = list(itertools.accumulate(parts))
    whole = partial[-1]
    assert whole.sums == tuple(itertools.chain(*stages))
    assert whole.num_zeros == len(stages)
    backwards = parts[-1]
    for part in reversed(parts[:-1]):
        backwards = backwards + part
    assert backwards == whole
    norms = [norm_of(state.sums) for state in partial]
    assert norms == sorted(norms)
    rules = StepRules(max_norm=norm_of(whole.sums) or 1.0)
    if rules.decide(whole, norms[-1]).clean:
        assert all(rules.decide(one, norm).clean for one, norm in zip(partial, norms, strict=True))


def test_numbers_survive_a_message():
    for state in (
        ValidationState((0.1, 0.0, math.inf), 7.0, False),
        ValidationState((1e-300,), 2.0**52, True),
        ValidationState((), 0.0, True),
        ValidationState((1.0, 2.0), 3.0, False, (4.0, 5.0, 6.0)),
    ):
        assert state.like(state.numbers) == state
    nan = ValidationState((math.nan,), 0.0, False)
    nan = nan.like(nan.numbers)
    assert math.isnan(nan.sums[0])
    assert not nan.finite


def test_extras_are_added_too():
    total = ValidationState((1.0,), 0, False, (1.0, 2.0)) + ValidationState((0.0,), 0, False, (0.5, 0.0))
    assert total.extras == (1.5, 2.0)


def test_states_of_different_models_do_not_add():
    with pytest.raises(AssertionError, match="5 numbers, not 4"):
        ValidationState((1.0,), 0, False).like([0.0] * 5)
    with pytest.raises(AssertionError, match="0 and 1 extras"):
        ValidationState((1.0,), 0, False) + ValidationState((1.0,), 0, False, (1.0,))
    with pytest.raises(AssertionError, match="1 and 2 regions"):
        ValidationState((1.0,), 0, False) + ValidationState((1.0, 2.0), 0, False)


def test_a_rank_that_steps_is_told_of_to_all():
    known = ValidationState((1.0,), 0.0, False, stepped=True)
    assert known.like(known.numbers) == known
    assert (known + ValidationState((0.0,), 0.0, False)).stepped
    assert not (ValidationState((0.0,), 0.0, False) + ValidationState((0.0,), 0.0, False)).stepped
