import json

import pytest

from megatron.training.run.arguments import parse_config
from megatron.training.state import TrainState
from tests.harness.launch import TINY


def start(*flags):
    return TrainState.start(parse_config([*TINY, *flags]))


def test_length_from_iterations_and_from_samples():
    by_iterations = start("--train-iters", "6")
    assert (by_iterations.train_iters, by_iterations.train_samples) == (6, 48)
    ramped = start("--train-samples", "70", "--rampup-batch-size", "4", "4", "24")
    # 6 steps of 4 samples until 24 are consumed, then 5 of 8: the last 6 samples are no whole step.
    assert (ramped.train_iters, ramped.train_samples) == (11, 70)


def test_an_evaluation_of_its_own_has_no_length():
    state = start("--skip-train")
    assert (state.train_iters, state.train_samples, state.finished) == (0, 0, True)


def test_state_survives_json_and_leaves_the_length_to_the_flags():
    state = start("--train-iters", "6")
    state.iteration, state.consumed_train_samples, state.num_floating_point_operations_so_far = 3, 24, 1e20
    kept = json.loads(json.dumps(state.state()))
    longer = start("--train-iters", "9")
    longer.load_state(kept)
    assert (longer.iteration, longer.consumed_train_samples, longer.train_iters) == (3, 24, 9)
    assert longer.num_floating_point_operations_so_far == 1e20
    assert not longer.finished
    longer.iteration = 9
    assert longer.finished


def test_unknown_counter_is_refused():
    with pytest.raises(AssertionError, match="unknown counter 'epochs'"):
        start("--train-iters", "6").load_state({"epochs": 1})
