"""Post-validated runs end with the bits of synchronous ones, whatever goes wrong and when."""

from __future__ import annotations

import dataclasses
from math import inf, nan

import pytest
import torch

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.clip_grads import StepRules
from megatron.core.optimizer.mixed_precision import RollbackBy
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Kind, parse_op
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.post_validation.state import Go, ValidationState, rollback_ops
from megatron.core.pipeline_parallel.post_validation.validator import Completed, PostValidator
from tests.harness.ranks import rank_outcomes, run_ranks
from tests.harness.toy_optimizer import Run, train
from tests.harness.toy_pipeline import lowered

LARGE = 1e6  # a gradient multiplied with this is clipped


def plan_of(name, num_ranks, num_microbatches):
    return lowered(build_plan(name, Request(num_ranks, num_microbatches)))


def run_of(plan, faults, num_steps, **options):
    """faults: iteration -> (share of the pipeline, 0 = first stage, 1 = last; factor)."""
    last = plan.placement.num_stages - 1
    faults = {number: (round(share * last), factor) for number, (share, factor) in faults.items()}
    return Run(plan, num_steps, faults, clip_grad=options.pop("clip_grad", 5.0), **options)


# The first step, the last one, several in a row, on the first, the middle and the last stage.
EVERYTHING = {
    0: (1.0, LARGE), 1: (0.0, LARGE), 2: (0.5, inf), 3: (0.0, nan), 5: (1.0, nan), 6: (1.0, LARGE), 7: (1.0, inf)
}  # fmt: skip
REPEATED = [True, True, True, True, False, True, True, True]


def compare(outs, pairs):
    for rank, out in enumerate(outs):
        for name, other in pairs:
            assert out[name]["bits"] == out[other]["bits"], f"rank {rank}: {name} is not {other}"


@pytest.mark.grid
def test_two_ranks_every_schedule_and_every_fault():
    runs = {}
    for name, total in (("1f1b", 4), ("zb-2p", 4), ("zbv", 4), ("interleaved", 4)):
        base = run_of(plan_of(name, 2, total), EVERYTHING, 8)
        runs[f"{name} synchronous"] = base
        runs[f"{name} optimistic"] = dataclasses.replace(base, after=0)
    zb = runs["zb-2p synchronous"]
    runs["after"] = dataclasses.replace(zb, after=1)
    runs["saves"] = dataclasses.replace(zb, after=0, saves=(0, 3, 4))
    runs["stops"] = dataclasses.replace(zb, after=0, stops=(0, 4, 5))
    for name, options in {
        "sgd": {"optimizer": "sgd"},
        "bf16": {"dtype": torch.bfloat16},
        "clip off": {"clip_grad": 0.0},
    }.items():
        runs[f"{name} synchronous"] = dataclasses.replace(zb, **options)
        runs[f"{name} optimistic"] = dataclasses.replace(zb, after=0, **options)
    outs = run_ranks(train, 2, runs, pp=2, timeout=120)
    pairs = [(name, name.replace("optimistic", "synchronous")) for name in runs if "optimistic" in name]
    compare(outs, [*pairs, *((name, "zb-2p synchronous") for name in ("after", "saves", "stops"))])
    check_rollbacks(outs)
    for out in outs:
        for name in ("1f1b", "zb-2p", "zbv", "interleaved"):
            assert out[f"{name} optimistic"]["repeated"] == REPEATED
        # One clean step: the next is optimistic, and fails.
        assert out["after"]["rolled_back"] == [False, False, False, False, False, True, False, False]
        assert out["stops"]["retried"] == [1, 5, 6]  # stopped by the decision on the step before
        assert out["clip off optimistic"]["repeated"] == [f in (2, 3, 5, 7) for f in range(8)]
    # Forwards that are done again: the warm-up before VALIDATE, of each rollback but the last step's.
    again = [out["zb-2p optimistic"]["forwards"] - out["zb-2p synchronous"]["forwards"] for out in outs]
    assert again == [6 * 3, 6 * 1]


def check_rollbacks(outs):
    """A step counts as taken back where some rank has done so, on all ranks alike."""
    found = 0
    for name in outs[0]:
        really = [any(ranks) for ranks in zip(*(out[name]["taken_back"] for out in outs), strict=False)]
        for out in outs:
            assert (name, out[name]["rolled_back"][: len(really)]) == (name, really)
        found += sum(really)
    assert found


@pytest.mark.grid
def test_four_ranks():
    faults = {0: (0.5, inf), 1: (1.0, LARGE), 3: (0.0, LARGE)}
    runs, plan = {}, plan_of("zb-2p", 4, 8)
    plan = post_validation(plan, CostModel.of_ranks(plan.placement))
    assert rollback_ops(plan, 1).surplus  # rank 0 is a forward ahead of rank 1 when it validates
    for name, total in (("1f1b", 5), ("zb-2p", 8), ("zbv", 8)):
        runs[f"{name} synchronous"] = run_of(plan_of(name, 4, total), faults, 4)
        runs[f"{name} optimistic"] = dataclasses.replace(runs[f"{name} synchronous"], after=0)
    outs = run_ranks(train, 4, runs, pp=4, timeout=120)
    compare(outs, [(f"{name} optimistic", f"{name} synchronous") for name in ("1f1b", "zb-2p", "zbv")])
    assert outs[2]["zbv optimistic"]["repeated"] == [True, True, False, True]
    check_rollbacks(outs)


def test_data_parallel_ranks_of_a_stage_agree():
    """Whole optimizers and distributed ones, gathers and reductions overlapped."""
    overlapped = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    configs = {
        "whole": DistributedDataParallelConfig(),
        "cut": DistributedDataParallelConfig(use_distributed_optimizer=True),
        "overlapped": DistributedDataParallelConfig(**overlapped),
    }
    runs = {}
    for name, ddp in configs.items():
        base = run_of(plan_of("zbv", 2, 4), {0: (0.3, inf), 1: (1.0, LARGE), 3: (0.0, LARGE)}, 5, ddp=ddp)
        runs |= {f"{name} synchronous": base, f"{name} optimistic": dataclasses.replace(base, after=0)}
    outs = run_ranks(train, 4, runs, dp=2, pp=2)
    compare(outs, [(f"{name} optimistic", f"{name} synchronous") for name in configs])
    for name in configs:
        one, other = outs[0][f"{name} optimistic"], outs[1][f"{name} optimistic"]
        assert one["repeated"] == [True, True, False, True, False]
        # Same weights on both ranks of a stage, from different losses.
        assert one["bits"][0] == other["bits"][0] == outs[0]["whole synchronous"]["bits"][0]
        assert one["bits"][1] != other["bits"][1]


def test_a_pipeline_of_one():
    base = run_of(plan_of("zb-h1", 1, 3), EVERYTHING, 8)
    outs = run_ranks(train, 1, {"a": base, "b": dataclasses.replace(base, after=0)}, pp=1)
    compare(outs, [("b", "a")])
    assert outs[0]["b"]["repeated"] == REPEATED


def test_the_inverse_is_close():
    """Two clipped steps of moderate size in a row, taken back by arithmetic: weights are right to about a rounding."""
    base = run_of(plan_of("zb-2p", 2, 4), {1: (1.0, 3.0), 2: (0.0, 3.0)}, 5, clip_grad=0.25)
    runs = {"a": base, "b": dataclasses.replace(base, after=0, rollback_by=RollbackBy.INVERSE)}
    outs = run_ranks(train, 2, runs, pp=2)
    errors = []
    for out in outs:
        assert sum(out["b"]["repeated"]) >= 2
        for name, expected in out["a"]["bits"][0][-1].items():
            errors.append(
                float((torch.tensor(out["b"]["bits"][0][-1][name]) - torch.tensor(expected)).abs().max())
            )
    assert 0.0 < max(errors) < 1e-6, max(errors)  # measured: about 1e-7; weights are about 1


def test_the_others_hear_of_a_rank_that_dies_while_forwards_are_repeated():
    """Rank 1 is gone in the forwards of iteration 1, which rank 0 has begun and waits for the whole state in."""
    run = run_of(plan_of("zb-2p", 2, 4), {0: (1.0, LARGE)}, 3, after=0, dies=(1, 1))
    first, second = rank_outcomes(train, 2, {"x": run}, pp=2)
    assert second.died is not None
    assert first.error is not None
    assert "PeerLostError" in first.error
    assert "iteration 1" in first.error


# One rank's logic, without a pipeline -----------------------------------------------------------


class _Stepper:
    def __init__(self, state):
        self.state, self.calls = state, []

    def stage_state(self, nonfinite, *, count_zero_grads=False, extras=()):
        return dataclasses.replace(self.state, nonfinite=nonfinite, extras=tuple(extras))

    def norm(self, sums, divisor):
        return sum(sums) ** 0.5 / divisor

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


class _Messages:
    """Of a rank in the middle of three: what its neighbours would send, and what it sent."""

    def __init__(self, **received):
        self.received, self.sent = received, []

    def send(self, peer, numbers):
        self.sent.append((peer, list(numbers)))

    def receive(self, peer):
        values = self.received["before" if peer == 0 else "behind"]
        return type("Arrival", (), {"wait": lambda _, length: values})()

    def drain(self):
        self.sent.append("drain")


class _Owner:
    def __init__(self, go_on=True, nonfinite=False):
        self.heard, self.go_on, self.nonfinite = [], go_on, nonfinite

    def complete(self):
        return Completed(2.0, self.nonfinite)

    def settle_weights(self):
        self.heard.append("settle_weights")

    def weights_changed(self):
        self.heard.append("weights_changed")

    def decided(self, outcome):
        self.heard.append(outcome)
        return self.go_on


def middle(before, behind, *, after=0, go_on=True, nonfinite=False):
    stepper = _Stepper(ValidationState((0.0, 9.0, 0.0), 1.0, False))
    messages, owner = _Messages(before=before, behind=behind), _Owner(go_on, nonfinite)
    validator = PostValidator(
        stepper, messages, owner, StepRules(2.5).decide, rank=1, num_ranks=3, after=after
    )
    return validator, stepper, messages, owner


def last_half(validator):
    for text in ("1RECV_STATE@0#1", "1SEND_STATE@2#2", "1STEP"):
        op = parse_op(text)
        validator.handlers[Kind(op[0])](op)


def first_half(validator):
    for text in ("1RECV_STATE@2#3", "1SEND_STATE@0#4"):
        op = parse_op(text)
        validator.handlers[Kind(op[0])](op)
    return validator.decide()


def test_a_clean_step_is_taken_at_once_and_confirmed():
    validator, stepper, messages, owner = middle(
        [1.0, 0.0, 1.0, 4.0, 0.0, 0.0], [3.0, 0.0, 1.0, 4.0, 9.0, 1.0]
    )
    last_half(validator)
    assert messages.sent == [(2, [2.0, 0.0, 1.0, 4.0, 9.0, 0.0])]
    assert stepper.calls == [("snapshot",), ("step", 2.0, 1.0)]
    assert validator.pending
    assert first_half(validator) is Go.ON
    assert messages.sent[1:] == [(0, [3.0, 0.0, 1.0, 4.0, 9.0, 1.0])]
    assert stepper.calls[2:] == [("commit",)]
    outcome = owner.heard[-1]
    assert (outcome.coefficient, outcome.num_zeros, outcome.rolled_back) == (1.0, 3, False)
    assert outcome.norm == 14.0**0.5 / 2
    assert not validator.pending


def test_a_clipped_step_is_taken_back_and_taken_again():
    validator, stepper, _, owner = middle([0.0, 0.0, 1.0, 4.0, 0.0, 0.0], [0.0, 0.0, 1.0, 4.0, 9.0, 87.0])
    last_half(validator)
    assert first_half(validator) is Go.AGAIN
    coefficient = 2.5 / (5.0 + 1e-6)
    assert stepper.calls[2:] == [("rollback",), ("commit",), ("step", 2.0, coefficient)]
    assert owner.heard[:3] == ["weights_changed", "settle_weights", "weights_changed"]
    assert owner.heard[-1].rolled_back


def test_who_knows_of_an_overflow_waits_and_all_repeat():
    validator, stepper, _, owner = middle([0.0, 0.0, 0.0, inf, 0.0, 0.0], [0.0, 0.0, 0.0, inf, 9.0, 0.0])
    last_half(validator)
    assert first_half(validator) is Go.AGAIN
    settled, outcome, *freed = owner.heard
    assert (stepper.calls, settled) == ([], "settle_weights")
    assert outcome.coefficient is None
    assert outcome.nonfinite
    assert not outcome.rolled_back  # nobody had stepped
    assert freed == ["weights_changed"]  # not here, but what was gathered is of no use


def test_a_loss_that_is_not_finite_is_told_to_all():
    validator, stepper, messages, owner = middle(
        [0.0] * 6, [0.0, 1.0, 0.0, 0.0, 9.0, 0.0], nonfinite=True, go_on=False
    )
    last_half(validator)
    assert messages.sent == [(2, [1.0, 1.0, 0.0, 0.0, 9.0, 0.0])]
    assert first_half(validator) is Go.STOP
    assert stepper.calls == []
    assert owner.heard[-1] == "weights_changed"


def test_before_it_trusts_steps_all_wait_and_nothing_is_kept():
    clean = [0.0, 0.0, 0.0, 0.0, 9.0, 0.0]
    validator, stepper, messages, owner = middle([0.0] * 6, clean, after=2)
    for _ in range(2):
        last_half(validator)
        assert not validator.pending
        assert first_half(validator) is Go.ON  # nothing to do
    assert stepper.calls == [("step", 2.0, 1.0)] * 2
    assert messages.sent == [(2, [1.0, 0.0, 0.0, 0.0, 9.0, 0.0]), (0, clean), "drain"] * 2
    assert len(owner.heard) == 4
    last_half(validator)
    assert validator.pending
    assert stepper.calls[2:] == [("snapshot",), ("step", 2.0, 1.0)]
    outcome = validator.validate_now()
    assert outcome is not None
    assert outcome.coefficient == 1.0
    assert validator.validate_now() is None
