from megatron.training.run.data import StepBatches


def test_a_step_starts_where_the_last_one_ended():
    batches = StepBatches(iter(range(10)))
    batches.begin_step()
    assert [batches.microbatch(i) for i in range(3)] == [0, 1, 2]
    batches.begin_step()
    assert [batches.microbatch(i) for i in range(3)] == [3, 4, 5]


def test_a_microbatch_is_drawn_once_and_stays_for_the_step():
    drawn = []

    def fetch(source):
        drawn.append(next(source))
        return drawn[-1]

    batches = StepBatches(iter("abcd"), fetch=fetch)
    batches.begin_step()
    assert batches.microbatch(1) == "b"
    assert [batches.microbatch(i) for i in (0, 1, 2, 1, 0)] == ["a", "b", "c", "b", "a"]
    assert drawn == ["a", "b", "c"]


def test_a_rank_that_needs_no_data_draws_none():
    source = iter(range(3))
    batches = StepBatches(source, reads=False)
    batches.begin_step()
    assert [batches.microbatch(i) for i in range(5)] == [{}] * 5
    assert next(source) == 0


def test_a_step_that_comes_again_and_the_one_after_it():
    batches = StepBatches(iter(range(10)))
    batches.begin_step()
    assert batches.microbatch(1) == 1
    batches.begin_step(keep_last=True)
    assert batches.microbatch(0) == 2  # the second of this step is not drawn
    batches.step_back()
    assert [batches.microbatch(i) for i in range(2)] == [0, 1]
    batches.begin_step()
    assert [batches.microbatch(i) for i in range(2)] == [2, 3]
    batches.begin_step()
    assert batches.microbatch(0) == 4
