"""A small model cut into pipeline stages, the bits that one process computes for it, and random plans for it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import Channel
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.tensor_parallel.parallel_layers import column_linear
from megatron.core.weight_grad import WeightGradAccumulator

HIDDEN, TOKENS = 6, (5, 2)


class _Scale(torch.autograd.Function):
    """As a norm does: its gradient is put finished."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: WeightGradAccumulator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.sink.put("scale", None, (grads[0] * x).flatten(0, -2).sum(0))
        return grads[0] * weight, None, None


class ToyChunk:
    """One stage: a scale and a linear layer with a bias, then tanh; the loss at the end. A stage that is `empty`
    hands on what it gets."""

    def __init__(self, stage: int, num_stages: int, *, empty: bool = False) -> None:
        self.begins, self.ends, self.empty = stage == 0, stage == num_stages - 1, empty
        generator = torch.Generator().manual_seed(stage)
        self.weight, self.bias, self.scale = (
            torch.randn(*shape, generator=generator).requires_grad_()
            for shape in ((HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,))
        )
        self.sink = WeightGradAccumulator()
        shapes = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,), "scale": (HIDDEN,)}
        self.sink.bind_new(shapes, torch.float32, torch.device("cpu"))
        self.losses: dict[int, float] = {}

    def run(self, microbatch: int, hidden: Tensor | None) -> Tensor:
        if self.begins:
            hidden = torch.randn(*TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 + microbatch))
        assert hidden is not None
        self.sink.microbatch = 1000 + microbatch  # what a context does; the stage says better in its backward
        if self.empty:
            return hidden
        x = _Scale.apply(hidden, self.scale, self.sink)
        out = torch.tanh(
            column_linear(x, self.weight, self.bias, sink=self.sink, key="weight", bias_key="bias")
        )
        if not self.ends:
            return out
        loss = out.square().mean()
        self.losses[microbatch] = loss.item()
        return loss

    def stage(self) -> ModelStage:
        return ModelStage(self.run, self.sink, begins=self.begins, ends=self.ends)

    def grads(self) -> dict[str, list[Any]]:
        return {key: grad.tolist() for key, grad in self.sink.main_grads.items()}


def run_alone(num_stages: int, num_microbatches: int, empty: tuple[int, ...] = ()) -> list[Any]:
    """(gradients, losses) of every stage, by plain autograd over the whole model, microbatch by microbatch."""
    chunks = [ToyChunk(stage, num_stages, empty=stage in empty) for stage in range(num_stages)]
    for microbatch in range(num_microbatches):
        hidden = None
        for chunk in chunks:
            hidden = chunk.run(microbatch, hidden)
        assert hidden is not None
        hidden.backward()
    return [(chunk.grads(), chunk.losses) for chunk in chunks]


def run_rank(
    plan: Plan, rank: int, channel: Channel, empty: tuple[int, ...] = (), **executor: Any
) -> dict[int, Any]:
    """(gradients, losses) of this rank's stages, by global stage."""
    place = plan.placement
    mine = [place.stage_of(rank, chunk) for chunk in range(place.num_chunks)]
    chunks = {stage: ToyChunk(stage, place.num_stages, empty=stage in empty) for stage in mine}
    stages = {stage: chunk.stage() for stage, chunk in chunks.items()}
    Executor(plan, rank, stages, channel, **executor).run()
    return {stage: (chunk.grads(), chunk.losses) for stage, chunk in chunks.items()}


def by_stage(by_rank: list[dict[int, Any]]) -> list[Any]:
    """What `run_alone` returns, from what each rank did."""
    merged = {stage: value for values in by_rank for stage, value in values.items()}
    return [merged[stage] for stage in sorted(merged)]


def lowered(plan: Plan, comm: float = 0.0) -> Plan:
    return lower(plan, CostModel.of_ranks(plan.placement, comm=comm))


def random_plan(placement: Placement, num_microbatches: int, seed: int) -> Plan:
    """Any order that respects dependencies and the order of microbatches: fused and split backwards in one plan."""
    rng = random.Random(seed)
    ranks, total = placement.ranks(), num_microbatches
    last = len(ranks) - 1
    forwards, inputs, weights = [0] * len(ranks), [0] * len(ranks), [0] * len(ranks)
    rows: list[list[RawOp]] = [[] for _ in range(placement.num_ranks)]
    while min(weights) < total:
        able: list[tuple[int, int]] = []
        for stage in range(len(ranks)):
            if forwards[stage] < (total if stage == 0 else forwards[stage - 1]):
                able.append((F, stage))
            if inputs[stage] < (forwards[stage] if stage == last else inputs[stage + 1]):
                able += [(B, stage), (BW, stage)] if weights[stage] == inputs[stage] else [(B, stage)]
            if weights[stage] < inputs[stage]:
                able.append((W, stage))
        kind, stage = rng.choice(able)
        counter = weights if kind == W else forwards if kind == F else inputs
        rows[ranks[stage]].append(compute(kind, stage, counter[stage]))
        counter[stage] += 1
        weights[stage] += kind == BW
    return Plan(f"random {seed}", placement, total, tuple(map(tuple, rows)))
