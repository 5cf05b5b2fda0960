"""Batch schedules against step-by-step counting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.config.microbatches import BatchSchedule, BatchScheduleError
from megatron.training.run.arguments import parse_config
from tests.harness.launch_lines import SMALL


def test_constant_batch():
    schedule = BatchSchedule(micro_batch_size=2, data_parallel_size=3, target=24)
    assert schedule.global_batch_size(10**9) == 24
    assert schedule.num_microbatches(0) == 4
    assert schedule.iterations_for(100) == 4


def test_rampup_grows_by_increments_and_ends_after_its_samples():
    # (64 - 16) / 16 = 3 increments over 3000 samples: one every 1000.
    schedule = BatchSchedule(1, 8, 64, rampup=(16, 16, 3000))
    sizes = [
        schedule.global_batch_size(consumed) for consumed in (0, 999, 1000, 1999, 2000, 2999, 3000, 3001)
    ]
    assert sizes == [16, 16, 32, 32, 48, 48, 64, 64]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 500),
    st.integers(0, 3000),
)
def test_iterations_equal_counting_step_by_step(micro, replicas, start, increments, ramp, samples):
    unit = micro * replicas
    schedule = BatchSchedule(micro, replicas, unit * (start + increments), rampup=(unit * start, unit, ramp))
    consumed = iterations = 0
    while consumed + schedule.global_batch_size(consumed) <= samples:
        assert schedule.num_microbatches(consumed) * unit == schedule.global_batch_size(consumed)
        consumed += schedule.global_batch_size(consumed)
        iterations += 1
    assert schedule.iterations_for(samples) == iterations
    assert schedule.samples_of(iterations) == consumed


def test_decrease_if_needed_rounds_down():
    schedule = BatchSchedule(2, 3, 25, decrease_if_needed=True)
    assert (schedule.global_batch_size(0), schedule.num_microbatches(0)) == (24, 4)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((2, 3, 25), "25 samples does not divide"),
        ((2, 3, 4, None, True), "4 samples does not divide"),
        ((1, 1, 10, (3, 2, 100)), "10 - 3 is not divisible"),
        ((1, 1, 10, (20, 2, 100)), "no ramp to 10"),
        ((1, 2, 8, (3, 5, 100)), "3 samples does not divide"),
    ],
)
def test_batches_that_do_not_divide_are_refused(args, words):
    with pytest.raises(BatchScheduleError, match=words):
        BatchSchedule(*args)


@pytest.mark.parametrize("name", ["micro_batch_size", "global_batch_size"])
@pytest.mark.parametrize("size", [None, 0, -2])
def test_a_configuration_without_sizes_has_no_schedule(name, size):
    config = parse_config(SMALL)
    assert config.batch_schedule_or_none() == config.batch_schedule()
    config = config.replace(**{name: size})
    with pytest.raises(BatchScheduleError, match=f"--{name.replace('_', '-')} {size}: must be at least 1"):
        config.batch_schedule()
    assert config.batch_schedule_or_none() is None


@pytest.mark.parametrize("size", [0, -1, 3])
def test_a_configuration_whose_ranks_make_no_grid_has_no_schedule(size):
    assert parse_config(SMALL).replace(tensor_model_parallel_size=size).batch_schedule_or_none() is None
