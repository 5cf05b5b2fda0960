"""Plans run on forked ranks have the bits of one process; what a plan may ask of an executor."""

from __future__ import annotations

import os
import time
import weakref

import pytest
import torch

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, PlanError, op_text, parse_row
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only
from megatron.core.pipeline_parallel.plan.placement import LINEAR, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from tests.harness.ranks import rank_outcomes, run_ranks
from tests.harness.schedules import verified_peaks
from tests.harness.toy_pipeline import ToyChunk, by_stage, lowered, random_plan, run_alone, run_rank


def run_all(ctx, plans, **executor):
    channel = P2P(ctx.make_ps(pp=ctx.world_size))
    return [run_rank(plan, ctx.rank, channel, **executor) for plan in plans]


def assert_bits_of_one_process(plans, world_size, empty=()):
    by_rank = run_ranks(run_all, world_size, plans, empty=empty)
    for number, plan in enumerate(plans):
        alone = run_alone(plan.placement.num_stages, plan.num_microbatches, empty)
        assert by_stage([values[number] for values in by_rank]) == alone, plan.schedule


def schedules(num_ranks, chunks, microbatches):
    """gpipe, 1f1b, interleaved with and without a remainder group."""
    plans = [build_plan(name, Request(num_ranks, m)) for name in ("gpipe", "1f1b") for m in microbatches]
    for m in microbatches:
        if m >= num_ranks:
            plans.append(build_plan("interleaved", Request(num_ranks, m, chunks)))
    return [lowered(plan) for plan in plans]


@pytest.mark.parametrize(
    ("num_ranks", "chunks", "microbatches"),
    [(1, 3, (1, 4)), (2, 2, (1, 2, 5)), (3, 2, (2, 4, 6)), (4, 2, (3, 4, 10))],
)
def test_schedules_have_the_bits_of_one_process(num_ranks, chunks, microbatches):
    assert_bits_of_one_process(schedules(num_ranks, chunks, microbatches), num_ranks)


def test_groups_larger_than_the_pipeline():
    assert_bits_of_one_process([lowered(build_plan("interleaved", Request(2, 7, 3, group_size=3)))], 2)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "chunks"), [("linear", 3, 1), ("v", 2, 2), ("v", 3, 3), ("looped", 2, 3)]
)
def test_any_order_of_f_b_w_and_bw_has_the_bits_of_one_process(kind, num_ranks, chunks):
    """Split backwards, the local hand-over at a V's turns, whatever comes first."""
    place = Placement(kind, num_ranks, chunks)
    plans = [lowered(random_plan(place, 4, seed), comm=seed % 3) for seed in range(8)]
    kinds = {op[0] for plan in plans for row in plan.rows for op in row}
    assert {Kind.F, Kind.B, Kind.W, Kind.BW} <= kinds
    assert_bits_of_one_process(plans, num_ranks)


def test_overlapped_pairs_run_one_after_the_other():
    row = parse_row("0F0 1F0 1BW0 (0F1;0BW0) 1F1 1BW1 0BW1".split())
    plan = Plan("pairs", Placement(V_SHAPED, 1, 2), 2, (row,))
    assert_bits_of_one_process([lowered(plan)], 1)


def test_stages_without_layers_pass_on():
    plans = [lowered(build_plan(name, Request(3, 4))) for name in ("gpipe", "1f1b")]
    assert_bits_of_one_process(plans, 3, empty=(0, 1))
    split = [lowered(random_plan(Placement(LINEAR, 3), 3, seed)) for seed in range(2)]
    assert_bits_of_one_process(split, 3, empty=(1,))


def test_an_evaluation_runs_forwards_only_and_keeps_nothing():
    plans = [
        lowered(forward_only(build_plan(name, Request(2, 5, chunks))))
        for name, chunks in (("1f1b", None), ("interleaved", 2))
    ]

    def evaluate(ctx):
        with torch.no_grad():
            return run_all(ctx, plans)

    by_rank = run_ranks(evaluate, 2)
    for number, plan in enumerate(plans):
        stages = by_stage([values[number] for values in by_rank])
        assert stages[-1][1] == run_alone(plan.placement.num_stages, 5)[-1][1]  # losses
        assert not any(any(grads["bias"]) for grads, _ in stages)


class NoChannel:
    def post(self, messages):
        raise AssertionError(f"no other rank, and messages {messages}")

    def drain(self):
        pass


def one_rank(text, chunks=1, microbatches=1, **executor):
    place = Placement("looped", 1, chunks)
    stages = {stage: ToyChunk(stage, chunks).stage() for stage in range(chunks)}
    plan = Plan("by hand", place, microbatches, (parse_row(text.split()),))
    return Executor(plan, 0, stages, NoChannel(), **executor)


def test_a_data_parallel_engine_is_called_for_what_the_plan_has_and_nothing_else():
    """What it is called for: test_data_parallel_lane.py."""
    one_rank("0F0 1F0 1B0 1W0 0BW0", chunks=2, grad_sync=object()).run()


def test_kinds_without_a_handler_are_refused_at_the_start_and_others_can_bring_one():
    with pytest.raises(
        PlanError, match=r"rank 0: 0VALIDATE: nothing here does VALIDATE; it needs a validation"
    ):
        one_rank("0VALIDATE 0F0 0BW0 0STEP")
    with pytest.raises(PlanError, match=r"rank 0: 0STEP: nothing here does STEP; it needs a handler"):
        one_rank("0F0 0BW0 0STEP")
    with pytest.raises(
        PlanError, match=r"0REDUCE: nothing here does REDUCE; it needs a data parallel engine"
    ):
        one_rank("0F0 0BW0 0REDUCE")
    told = []
    executor = one_rank(
        "0F0 0VALIDATE 0BW0 0STEP", handlers={Kind.VALIDATE: told.append, Kind.STEP: told.append}
    )
    executor.run()
    assert [op_text(op) for op in told] == ["0VALIDATE", "0STEP"]
    with pytest.raises(
        AssertionError, match=r"handlers for what the executor does itself: \['F', 'SEND_F'\]"
    ):
        one_rank("0F0 0BW0", handlers={Kind.F: told.append, Kind.SEND_F: told.append})


def test_what_stages_cannot_do_is_refused_at_the_start():
    module = torch.nn.Linear(4, 4)
    stage = ModelStage(lambda m, h: module(torch.ones(2, 4)).sum(), None, begins=True, ends=True)

    def executor(text):
        return Executor(
            Plan("x", Placement(LINEAR, 1), 1, (parse_row(text.split()),)), 0, {0: stage}, NoChannel()
        )

    with pytest.raises(PlanError, match="0B0: stage 0 cannot split B from W, because autograd accumulates"):
        executor("0F0 0B0 0W0")
    executor("0F0 0BW0").run()
    assert module.weight.grad is not None
    with pytest.raises(PlanError, match=r"0F0\.1: stages compute whole microbatches"):
        executor("0F0.1 0BW0")
    plan = build_plan("1f1b", Request(2, 1))
    with pytest.raises(PlanError, match=r"1F0: the plan has no transfers; `lower` adds them"):
        Executor(plan, 1, {1: stage}, NoChannel())


@pytest.mark.parametrize("training", [True, False])
def test_a_stage_that_hands_nothing_on_is_the_models_mistake(training):
    plan = build_plan("1f1b", Request(2, 1))
    plan = lowered(plan if training else forward_only(plan))
    stage = ModelStage(lambda _microbatch, _hidden: None, None, begins=True, ends=False)
    with (
        torch.set_grad_enabled(training),
        pytest.raises(
            ModelError, match="microbatch 0 returned NoneType; a stage returns one tensor"
        ) as caught,
    ):
        Executor(plan, 0, {0: stage}, NoChannel()).run(3)
    assert caught.value.__notes__ == ["pipeline rank 0, stage 0, iteration 3, 0F0"]
    stage.forward = lambda _microbatch, _hidden: None  # a stage of another class
    with pytest.raises(ModelError, match="stage 0 handed nothing on to stage 1 for microbatch 0"):
        Executor(plan, 0, {0: stage}, NoChannel()).run()


def test_an_error_says_where_it_hit():
    def run(microbatch, hidden):
        if microbatch == 1:
            raise FloatingPointError("no number")
        return torch.ones((), requires_grad=True)

    stage = ModelStage(run, None, begins=True, ends=True)
    plan = build_plan("1f1b", Request(1, 2))
    with pytest.raises(FloatingPointError) as caught:
        Executor(plan, 0, {0: stage}, NoChannel()).run(7)
    assert caught.value.__notes__ == ["pipeline rank 0, stage 0, iteration 7, 0F1"]


class _OwnBuffer(torch.autograd.Function):
    """An output whose memory is numpy's, so that it can be seen to be freed."""

    @staticmethod
    def forward(ctx, x, buffers):
        array = x.detach().numpy().copy()
        buffers.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_outputs_are_freed_while_their_backward_is_still_to_come():
    """GPipe: all forwards come first. Only outputs whose send is under way are alive, none after the forwards."""
    plan = lowered(build_plan("gpipe", Request(2, 12)))

    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2), max_sends=2)
        buffers, alive = [], []
        chunk = ToyChunk(ctx.rank, 2)

        def run(microbatch, hidden):
            out = chunk.run(microbatch, hidden)
            return out if chunk.ends else _OwnBuffer.apply(out, buffers)

        stage = ModelStage(run, chunk.sink, begins=chunk.begins, ends=chunk.ends)

        def count():
            alive.append(sum(one() is not None for one in buffers))

        class Watched:
            splits = True
            backward = staticmethod(lambda m, g: (count(), stage.backward(m, g))[1])
            check_empty = staticmethod(stage.check_empty)

            @staticmethod
            def forward(m, h):
                count()
                return stage.forward(m, h)

        Executor(plan, ctx.rank, {ctx.rank: Watched()}, channel).run()
        count()
        return alive

    first, _ = run_ranks(check, 2)
    assert max(first) <= 4, first  # 2 under way, a batch posted, of 12
    assert max(first[13:]) <= 3, first  # in the backwards
    assert first[-1] == 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
def test_the_plan_says_which_sends_are_through(name):
    """No send is waited for to make room where the bound is far, and 1F1B holds few however many microbatches."""
    chunks = 2 if name == "interleaved" else None
    plan = lowered(build_plan(name, Request(3, 9, chunks)))

    def check(ctx):
        channel = P2P(ctx.make_ps(pp=3), max_sends=10**6)
        held, post = [], channel.post

        def counting(messages):
            arrivals = post(messages)
            held.append(len(channel._sends))
            return arrivals

        channel.post = counting
        values = run_rank(plan, ctx.rank, channel)
        assert not channel._sends
        return values, max(held)

    by_rank = run_ranks(check, 3)
    assert by_stage([values for values, _ in by_rank]) == run_alone(plan.placement.num_stages, 9)
    held = [most for _, most in by_rank]
    if name == "1f1b":
        assert held == [3, 3, 2]
    elif name == "interleaved":
        assert max(held) <= 9, held
    else:
        assert held == [9, 9, 9]  # nothing comes back before the last forward


def test_a_lost_peer_is_told_with_rank_stage_iteration_and_operation():
    plan = lowered(build_plan("1f1b", Request(2, 4)))

    def check(ctx):
        channel = P2P(ctx.make_ps(pp=2))
        chunk = ToyChunk(ctx.rank, 2)

        def run(microbatch, hidden):
            if ctx.rank == 1 and microbatch == 2:
                time.sleep(0.2)
                os._exit(9)
            return chunk.run(microbatch, hidden)

        stage = ModelStage(run, chunk.sink, begins=chunk.begins, ends=chunk.ends)
        Executor(plan, ctx.rank, {ctx.rank: stage}, channel).run(5)

    survivor, dead = rank_outcomes(check, 2, timeout=20)
    assert dead.died == "exited with status 9 without returning"
    last = survivor.error.strip().splitlines()[-1]
    assert last.startswith(
        "megatron.core.transport.peer_loss.PeerLostError: rank 0: stage 0, iteration 5, 0BW"
    ), last
    assert ": 0RECV_B" in last
    assert "lost rank 1 in receive over group 'pp_backward'" in last


def test_forward_only_plans_are_checked_as_such():
    plan = forward_only(build_plan("interleaved", Request(2, 4, 2)))
    assert {op[0] for row in plan.rows for op in row} == {Kind.F}
    whole = lowered(plan)
    assert {op[0] for row in whole.rows for op in row} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert verified_peaks(whole) == (0.5, 0.5)  # one chunk's, while it runs
    with pytest.raises(AssertionError, match="take the plan before its transfers are added"):
        forward_only(whole)
    rows = (parse_row(["0F0", "0BW0"]),)
    with pytest.raises(PlanError, match="0BW0: is no forward, and the plan is forward_only"):
        verify(Plan("x", Placement(LINEAR, 1), 1, rows, forward_only=True))
    with pytest.raises(PlanError, match="rank 0: 0F1 is missing"):
        verify(Plan("x", Placement(LINEAR, 1), 2, (parse_row(["0F0"]),), forward_only=True))
