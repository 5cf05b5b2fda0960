"""Whole gradients, summed once a step: which buckets when, what shared parameters wait for, in which order sums are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed import step_reduction
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.reduction_queue import ReductionQueue
from megatron.core.distributed.sharding import ShardPlace, sharding_of
from megatron.core.distributed.step_reduction import StepReduction
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.module import ModelError
from megatron.core.param_meta import LOOKUP, ParamMeta

NAMES = ("embedding", "w1", "w2")
TIED = f"embedding{LOOKUP}"


class Noted(ReductionQueue):
    """Launches are only noted."""

    def __init__(self, buffer: FlatBuffer, log: list[str]) -> None:
        class One:
            size = 1

        super().__init__(buffer, One(), TrafficCounter())
        self._log = log

    def _launch_next(self) -> None:
        names = self._reducers[self.num_launched].bucket.names
        super()._launch_next()
        self._log.append(f"reduce {'+'.join(names)}")

    def wait(self, end: int | None = None) -> None:
        self._log.append(f"wait {end}")


class Step:
    def __init__(self, monkeypatch, *, overlap: bool = True, shared: bool = False) -> None:
        self.log: list[str] = []
        meta = {name: ParamMeta(name, (8,), shared=shared and name == "embedding") for name in NAMES}
        if shared:
            meta["embedding"] = ParamMeta("embedding", (8,), shared=True, uses=("embedding", TIED))
        self.buffer = FlatBuffer(
            {name: nn.Parameter(torch.zeros(8)) for name in NAMES},
            meta,
            DistributedDataParallelConfig(ddp_bucket_size=1),
            sharding=sharding_of("no_shard"),
            place=ShardPlace(),
            device=torch.device("cpu"),
        )
        log, buffer = self.log, self.buffer

        def sums(what: str):
            class Sums:
                def __init__(self, *groups, ledger=None) -> None:
                    pass

                def add(self) -> None:
                    value = buffer.main_grad("embedding")[0].item()
                    log.append(f"{what} sums at {value:g}" if what == "shared" else f"{what} sums")

            return Sums

        monkeypatch.setattr(step_reduction, "PartialSums", sums("partial"))
        monkeypatch.setattr(step_reduction, "SharedSums", sums("shared"))
        queue = Noted(self.buffer, log)
        self.reduction = StepReduction(self.buffer, queue, sums("outer")(), None, None, overlap=overlap)
        self.reduction.bind({key: 1 for name in NAMES for key in meta[name].grad_keys})

    def give(self, key: str, value: float = 1.0) -> bool:
        first = self.reduction.grad_begins(key)
        grad = self.buffer.main_grad(key)
        grad.copy_(value + (0.0 if first else grad))
        self.reduction.grad_ready(key)
        return first

    def since(self) -> list[str]:
        log, self.log[:] = list(self.log), []
        return log


@pytest.fixture
def made(monkeypatch):
    return lambda **how: Step(monkeypatch, **how)


END = ["wait None", "outer sums", "partial sums"]


def begin(step: Step, microbatches: int | None, *, accumulate: bool = False, reduce: bool = True) -> None:
    step.reduction.begin_step(microbatches, reduce_gradients=reduce, accumulate=accumulate)


def test_buckets_start_with_their_last_microbatch_and_in_one_order(made):
    step = made()
    begin(step, 2)
    assert [step.give(name) for name in reversed(NAMES)] == [True] * 3
    assert step.since() == []
    assert not step.give("w1"), "added to the first"
    assert step.since() == [], "w2 is to come first"
    step.give("w2")
    assert step.since() == ["reduce w2", "reduce w1"]
    step.give("embedding")
    assert step.since() == ["reduce embedding"]
    step.reduction.finish()
    assert step.since() == ["shared sums at 2", *END]


def test_without_overlap_all_start_at_the_end(made):
    step = made(overlap=False)
    begin(step, 1)
    for name in reversed(NAMES):
        step.give(name)
    assert step.since() == []
    step.reduction.finish()
    assert step.since() == ["shared sums at 1", "reduce w2", "reduce w1", "reduce embedding", *END]


def test_shared_parameters_are_summed_over_stages_before_their_bucket_is_reduced(made):
    step = made(shared=True)
    begin(step, 1)
    for key in ("w2", "w1", "embedding", TIED):
        step.give(key)
    assert step.since() == ["reduce w2", "reduce w1"], "the shared one's bucket waits for the end"
    step.reduction.finish()
    assert step.since() == ["shared sums at 1", "reduce embedding", *END]


def test_a_shared_parameter_without_contribution_is_zero_when_stages_are_summed(made):
    step = made(shared=True)
    step.buffer.main_grad("embedding").fill_(99.0)
    begin(step, 1)
    step.give("w2")
    step.give("w1")
    step.reduction.finish()
    assert step.since()[2:] == ["shared sums at 0", "reduce embedding", *END]


def test_what_was_never_used_is_completed_by_its_chunk_or_by_the_end(made):
    step = made()
    step.buffer.main_grad("w2").fill_(99.0)
    begin(step, 1)
    step.give("w1")
    step.reduction.microbatch_done(["w2", "frozen"], left=0)
    assert step.since() == ["reduce w2", "reduce w1"]
    assert step.buffer.main_grad("w2").tolist() == [0.0] * 8
    step.reduction.finish()
    assert step.since() == ["shared sums at 0", "reduce embedding", *END]


def test_the_result_of_a_launch_waits_for_what_it_launched(made):
    step = made(overlap=False)
    begin(step, 1)
    for name in reversed(NAMES):
        step.give(name)
    work = step.reduction.launch(["w2", "w1"])
    assert step.since() == ["reduce w2", "reduce w1"]
    work.wait()
    assert step.since() == ["wait 2"]


def test_a_step_without_reduction_leaves_gradients_as_they_are(made):
    step = made()
    step.buffer.main_grad("w1").fill_(99.0)
    begin(step, 1, reduce=False)
    step.give("w2", 5.0)
    step.reduction.microbatch_done((), left=0)
    assert step.since() == []
    assert (step.buffer.main_grad("w2")[0], step.buffer.main_grad("w1")[0]) == (5.0, 0.0)
    assert step.reduction.nonfinite_keys() == (), "they are there to be looked at"


def test_sums_may_be_added_to_those_of_the_step_before(made):
    step = made()
    for accumulate in (False, True):
        begin(step, None, accumulate=accumulate)
        step.reduction.expect(1)
        for name in reversed(NAMES):
            assert step.give(name) is not accumulate
        step.reduction.finish()
    assert step.buffer.main_grad("w1").tolist() == [2.0] * 8


def test_gradients_behind_the_last_one_are_refused_before_they_are_written(made):
    step = made()
    begin(step, 2)
    for _ in range(2):
        step.give("w1")
    with pytest.raises(
        ModelError,
        match=r"parameter 'w1' arrived after its bucket .*use_reentrant=False.*--overlap-grad-reduce",
    ):
        step.give("w1")
    assert step.buffer.main_grad("w1").tolist() == [2.0] * 8
    alone = made(overlap=False)
    begin(alone, 1)
    for _ in range(3):
        alone.give("w1")
    assert alone.buffer.main_grad("w1").tolist() == [3.0] * 8, "nothing is on its way before the end"


def test_too_many_or_too_late_gradients_are_programming_errors(made):
    step = made()
    begin(step, 1)
    step.give("w1")
    with pytest.raises(AssertionError, match="more gradients for w1 than the step has microbatches"):
        step.reduction.grad_ready("w1")
    step = made()
    begin(step, 1)
    step.give("w2")
    with pytest.raises(AssertionError, match="a gradient for w2 arrived after its bucket was reduced"):
        step.reduction.grad_ready("w2")
