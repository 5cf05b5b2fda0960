import pytest

from megatron.training.step_batches import StepBatches


def test_a_step_can_be_drawn_again_and_again():
    batches = StepBatches(iter(range(10)))
    batches.begin_step()
    assert [next(batches), next(batches)] == [0, 1]
    for _ in range(2):
        batches.rewind()
        assert [next(batches), next(batches)] == [0, 1]
    batches.begin_step()
    assert next(batches) == 2


def test_a_step_left_half_drawn_again_is_a_bug():
    batches = StepBatches(iter(range(10)))
    batches.begin_step()
    next(batches)
    batches.rewind()
    with pytest.raises(AssertionError, match="0 of 1"):
        batches.begin_step()


def test_only_new_batches_are_fetched():
    fetched = []

    def fetch(source):
        fetched.append(next(source))
        return fetched[-1]

    batches = StepBatches(iter("abc"), fetch=fetch)
    batches.begin_step()
    next(batches)
    batches.rewind()
    next(batches)
    assert fetched == ["a"]
