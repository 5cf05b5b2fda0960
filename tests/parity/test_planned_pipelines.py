"""Plan, engine, hooks and executor together, without the trainer: sharded pipelines have the bits of whole ones."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.unit_events import hook_units
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Kind
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.post_validation.state import Go, Validation
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.transport import host_data
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import tiny_batch, tiny_config, tiny_stage
from tests.harness.toy_pipeline import lowered

LAYERS, MICROBATCHES = 8, 4
STATE_KINDS = (Kind.SEND_STATE, Kind.RECV_STATE, Kind.STEP)


@dataclasses.dataclass(frozen=True)
class Run:
    """PP 2 x DP 2. decisions: of VALIDATE, a step each; () for plans without."""

    schedule: str = "zbv"
    chunks: int | None = 2
    strategy: str = "no_shard"
    policy: str = "memory"
    recompute: bool = False
    decisions: tuple[Go, ...] = ()


def gradients(ctx, run):
    """Of the last step, what this rank's optimizer updates, by name: (start within the parameter, values)."""
    ps = ctx.make_ps(pp=2, dp=2)
    plan = lowered(build_plan(run.schedule, Request(2, MICROBATCHES, run.chunks)))
    costs, place = CostModel.of_ranks(plan.placement), plan.placement
    if run.decisions:
        plan = post_validation(plan, costs)
    mine = [place.stage_of(ps.pp_rank, chunk) for chunk in range(place.num_chunks)]
    last, each = place.num_stages - 1, LAYERS // place.num_stages
    flags: dict[str, Any] = {"untie_embeddings_and_output_weights": True, "num_layers": LAYERS}
    if run.recompute:
        flags |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    config = tiny_config(**flags)
    models = [
        tiny_stage(
            config,
            params_dtype=torch.float32,
            pre_process=stage == 0,
            post_process=stage == last,
            layers=range(each * stage, each * stage + each),
        )
        for stage in mine
    ]
    ddp = DistributedDataParallelConfig(use_custom_fsdp=True, data_parallel_sharding_strategy=run.strategy)
    engine = DistributedDataParallel(models, ps, ddp, stages=mine)
    boundaries = UnitBoundaries()
    hook_units([enumerate(units) for units in engine.unit_modules()], boundaries)
    for chunk, (model, unit_of) in enumerate(zip(models, engine.unit_of_key(), strict=True)):
        model.context.grads.report_units(
            unit_of, lambda unit, chunk=chunk: boundaries.unit_begins(chunk, unit)
        )
    own = pickle.dumps(dict(zip(mine, engine.stage_units(), strict=True)))
    told = [pickle.loads(part) for part in host_data.all_gather_bytes(own, ps.pp_group)]
    units = {stage: one for part in told for stage, one in part.items()}
    residency = Residency(run.strategy, policy=run.policy)
    planned = add_residency(plan, [units[stage] for stage in sorted(units)], residency, costs)

    def stage_of(model, stage):
        def forward(microbatch, hidden):
            number = microbatch * ps.dp_size + ps.dp_rank
            tokens, labels, positions = tiny_batch(seed=number, batch=1)
            model.context.begin_microbatch(0, microbatch, number)
            if stage:
                model.set_input_tensor(hidden)
            if stage < last:
                return model(tokens, positions, None)
            return model(tokens, positions, None, labels=labels).sum()

        return ModelStage(forward, model.context.grads, begins=stage == 0, ends=stage == last)

    stages = {stage: stage_of(model, stage) for model, stage in zip(models, mine, strict=True)}
    decisions = list(run.decisions)

    def decide():
        go = decisions.pop(0)
        if go is not Go.ON:
            engine.settle_weights()
            engine.weights_changed()
        return go

    executor = Executor(
        planned,
        ps.pp_rank,
        stages,
        P2P(ps),
        engine,
        units=units,
        boundaries=boundaries,
        validation=Validation(decide, lambda stage, microbatch: stages[stage].forget(microbatch))
        if run.decisions
        else None,
        handlers=dict.fromkeys(STATE_KINDS, lambda op: None) if run.decisions else None,
    )
    found = {}
    for _ in run.decisions or range(2):
        engine.begin_step(MICROBATCHES)
        if executor.run():
            engine.finish()
            buffer = engine.buffer
            found = {
                name: (buffer.part(name, buffer.sharding.optimizer)[0], buffer.main_grad_part(name).tolist())
                for name in buffer.names
            }
            engine.weights_changed()
    return found


def whole(run):
    """Whole gradients, flat, by name."""
    parts: dict[str, dict[int, list[float]]] = {}
    for found in run_ranks(gradients, 4, run):
        for name, (start, values) in found.items():
            if values:
                known = parts.setdefault(name, {}).setdefault(start, values)
                assert known == values, f"{name}: ranks disagree"
    return {name: np.concatenate([own[start] for start in sorted(own)]) for name, own in parts.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.grid
@pytest.mark.parametrize(("schedule", "chunks"), [("zbv", 2), ("1f1b", None), ("interleaved", 2)])
def test_every_strategy_has_the_bits_of_whole_states_where_microbatches_are_grouped_alike(schedule, chunks):
    run = Run(schedule, chunks)
    expected = whole(run)
    for strategy, policy in (("optim", "memory"), ("optim_grads", "step"), ("optim_grads_params", "step")):
        assert_same(whole(dataclasses.replace(run, strategy=strategy, policy=policy)), expected)
    naive = whole(dataclasses.replace(run, strategy="optim_grads"))
    assert_same(whole(dataclasses.replace(run, strategy="optim_grads_params")), naive)
    for name, values in expected.items():
        np.testing.assert_allclose(naive[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.grid
def test_recomputed_layers_are_gathered_for_their_recomputation():
    run = Run(strategy="optim_grads_params", policy="step")
    assert_same(whole(dataclasses.replace(run, recompute=True)), whole(run))


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["step", "memory"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_forwards_that_are_done_again_or_dropped_gather_anew(strategy, policy):
    run = Run(strategy=strategy, policy=policy)
    decisions = (Go.ON, Go.STOP, Go.AGAIN, Go.STOP, Go.ON, Go.AGAIN)
    assert_same(whole(dataclasses.replace(run, decisions=decisions)), whole(run))
