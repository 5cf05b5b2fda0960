import itertools

import pytest

from megatron.training.guard.exit_status import ExitStatus
from megatron.training.guard.nan_policy import (
    NanPolicy,
    NonFiniteError,
    NonFiniteSite,
    RerunResult,
    StepAction,
    Verdict,
    compare_rerun,
    first_site,
)


@pytest.mark.parametrize(
    ("policy", "dynamic"), list(itertools.product(("abort", "skip", "rerun-once"), (False, True)))
)
def test_finite_steps_are_applied(policy, dynamic):
    assert NanPolicy(policy, 2, dynamic).decide(nonfinite=False) == Verdict(StepAction.APPLY)


def test_abort():
    verdict = NanPolicy("abort", 5).decide(nonfinite=True)
    assert (verdict.decision, verdict.status, verdict.save_first) == (
        StepAction.ABORT,
        ExitStatus.NON_FINITE,
        False,
    )


def test_skip_is_bounded_in_a_row():
    policy = NanPolicy("skip", 2)
    steps = [True, True, False, True, True, True]
    decisions = [policy.decide(nonfinite=bad) for bad in steps]
    s, a = StepAction.SKIP, StepAction.APPLY
    assert [d.decision for d in decisions] == [s, s, a, s, s, StepAction.ABORT]
    assert decisions[-1].status == ExitStatus.NON_FINITE
    assert "--nan-max-skips is 2" in decisions[-1].reason
    assert NanPolicy("skip", 0).decide(nonfinite=True).decision is StepAction.ABORT


@pytest.mark.parametrize("policy", ["abort", "skip", "rerun-once"])
def test_dynamic_loss_scale_always_skips_until_its_minimum(policy):
    nan = NanPolicy(policy, 1, dynamic_loss_scale=True)
    # 2^32 comes down to 1 in 32 overflows: far more than --nan-max-skips, and no sign of trouble
    assert {nan.decide(nonfinite=True).decision for _ in range(32)} == {StepAction.SKIP}
    assert nan.decide(nonfinite=True, scale_at_minimum=True).decision is StepAction.SKIP
    verdict = nan.decide(nonfinite=True, scale_at_minimum=True)
    assert (verdict.decision, verdict.status) == (StepAction.ABORT, ExitStatus.NON_FINITE)


@pytest.mark.parametrize(
    ("rerun", "decision", "status", "save_first"),
    [
        (RerunResult.NOT_RUN, StepAction.RERUN, None, False),
        (RerunResult.FINITE, StepAction.APPLY, None, False),
        (RerunResult.SAME, StepAction.ABORT, ExitStatus.RERUN_PERSISTENT, True),
        (RerunResult.DIFFERENT, StepAction.ABORT, ExitStatus.RERUN_INVALID, False),
    ],
)
def test_rerun_once(rerun, decision, status, save_first):
    verdict = NanPolicy("rerun-once", 3).decide(nonfinite=True, rerun=rerun)
    assert (verdict.decision, verdict.status, verdict.save_first) == (decision, status, save_first)
    assert verdict.reason


def test_compare_rerun():
    assert compare_rerun(b"a", b"b", second_nonfinite=False) is RerunResult.FINITE
    assert compare_rerun(b"a", b"a", second_nonfinite=True) is RerunResult.SAME
    assert compare_rerun(b"a", b"b", second_nonfinite=True) is RerunResult.DIFFERENT


def test_state_survives_a_resume():
    first = NanPolicy("skip", 2)
    first.decide(nonfinite=True)
    second = NanPolicy("skip", 2)
    second.load_state(first.state())
    assert second.decide(nonfinite=True).decision is StepAction.SKIP
    assert second.decide(nonfinite=True).decision is StepAction.ABORT


def test_misuse():
    with pytest.raises(AssertionError, match="--nan-policy ignore"):
        NanPolicy("ignore", 1)
    with pytest.raises(AssertionError, match="--nan-max-skips -1"):
        NanPolicy("skip", -1)
    with pytest.raises(AssertionError, match="rerun under"):
        NanPolicy("skip", 1).decide(nonfinite=True, rerun=RerunResult.SAME)


def test_all_ranks_name_the_same_site():
    loss = NonFiniteSite(3, microbatch=1, parameter="a")
    gradient = NonFiniteSite(1, parameter="decoder.layers.0.mlp.linear_fc1.weight")
    assert first_site([None, gradient, None, loss]) == loss, "the loss is the cause, the gradients its effect"
    assert first_site([None, NonFiniteSite(2), NonFiniteSite(1)]) == NonFiniteSite(1)
    assert first_site([None, None]) is None


def test_error_names_rank_parameter_iteration_and_what_to_do():
    verdict = NanPolicy("abort", 0).decide(nonfinite=True)
    error = NonFiniteError(NonFiniteSite(1, parameter="output_layer.weight", value="infinite"), 17, verdict)
    assert str(error).startswith(
        "iteration 17: the gradient of output_layer.weight is infinite on rank 1. --nan-policy abort. "
    )
    assert "--nan-policy skip" in str(error)
    assert error.status == ExitStatus.NON_FINITE
    before = NonFiniteError(NonFiniteSite(0, parameter="a", bad_weight=True), 1, verdict)
    assert str(before).endswith(
        "The weights were so before it: look at --init-method-std and at what --load names."
    )
    both = NonFiniteSite(0, microbatch=2, parameter="a.weight")
    assert str(both) == "the loss of microbatch 2 and the gradient of a.weight are not finite on rank 0"
    assert str(NonFiniteSite(0, 2, "a", bad_weight=True)).startswith(
        "the loss of microbatch 2 and the weight of a are"
    )


def test_the_site_named_is_where_it_began():
    """Over stages: a bad weight before the loss it spoils, a loss before its gradients, the last stage's gradient."""
    weight = NonFiniteSite(0, None, "embedding", bad_weight=True, pp_rank=0)
    loss = NonFiniteSite(5, 1, "output", pp_rank=1)
    late, early = NonFiniteSite(4, None, "output", pp_rank=1), NonFiniteSite(1, None, "embedding", pp_rank=0)
    assert first_site([weight, early, late, loss]) == weight
    assert first_site([early, late, loss]) == loss
    assert first_site([None, early, late]) == late
    assert first_site([early, NonFiniteSite(0, None, "embedding", pp_rank=0)]).rank == 0
