"""How many files a step goes through, counted by a profile hook on real steps of ZeRO-3: PP 1, and ZBV on PP 2.

A chain of calls is what the stack holds when a function is called. Of it the distinct files under megatron/ count:
every one that hands the call on, not those that were called on the way and have returned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megatron
from megatron.core.transformer.decoder import TransformerLayer
from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.run.data import StepBatches
from megatron.training.run.step import StepRunner
from megatron.training.state import StepTask
from tests.harness.layouts import Layout, Run
from tests.harness.ranks import run_ranks
from tests.harness.validated_steps import parts_of

ROOT = Path(next(iter(megatron.__path__)))
ZERO3 = ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
LAYOUTS = {
    "PP 1": Layout(dp=4, more=ZERO3),
    "ZBV": Layout(pp=2, dp=2, schedule="zbv", more=ZERO3),
}
STEP = "training/run/step.py"
EXECUTOR, STAGE = "core/pipeline_parallel/runtime/executor.py", "core/pipeline_parallel/runtime/stage.py"
LAYER, HALVES = "core/transformer/decoder.py", "core/transformer/layer_halves.py"
SINK = "core/weight_grad.py"
REDUCER, COLLECTIVES = "core/distributed/custom_fsdp/grad_reduce_pipeline.py", "core/transport/collectives.py"


class Chains:
    """What leads, in one step, to the first layer's forward, and from a weight's dgrad to the REDUCE of its unit: files
    under megatron/ of each chain, from the outside in, the last one that of the function that is called."""

    def __init__(self, run: Run) -> None:
        reductions = run.engine.model.reductions
        self.key = next(name for name in run.engine.model.buffer.names if name.endswith("linear_qkv.weight"))
        (self.unit,) = [at for at, unit in enumerate(reductions.units) if self.key in unit.keys]
        self.layer: list[str] = []
        self.dgrad: list[str] = []  # to the gradient's sink
        self.arrival: list[str] = []  # from there to the reducer
        self.reduce: list[str] = []  # to the collective

    def called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        name = frame.f_code.co_name
        if name not in ("forward", "put", "grad_begins", "reduce_scatter_units"):
            return
        file, found = file_of(frame), frame.f_locals
        if isinstance(found.get("self"), TransformerLayer) and name == "forward" and not self.layer:
            self.layer = chain_of(frame)
        elif file == SINK and name == "put" and found["key"] == self.key and not self.dgrad:
            self.dgrad = chain_of(frame)
        elif file == REDUCER and name == "grad_begins" and found["key"] == self.key and not self.arrival:
            self.arrival = chain_of(frame)
        elif file == COLLECTIVES and name == "reduce_scatter_units" and not self.reduce:
            starts = [
                one for one in outward(frame) if file_of(one) == REDUCER and one.f_code.co_name == "start"
            ]
            if [one.f_locals["unit"] for one in starts] == [self.unit]:
                self.reduce = chain_of(frame)


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def file_of(frame: FrameType) -> str:
    """Relative to megatron/; nothing for other files."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def chain_of(frame: FrameType) -> list[str]:
    return [file for one in outward(frame) if (file := file_of(one))][::-1]


def inside(chain: list[str]) -> list[str]:
    """Of a chain what comes inside the computation that is under way; outside of computations what the executor does,
    with it."""
    if STAGE in chain:
        return chain[len(chain) - chain[::-1].index(STAGE) :]
    return chain[len(chain) - chain[::-1].index(EXECUTOR) - 1 :]


def chains_of_steps(ctx):
    torch.set_num_threads(1)
    found = {}
    for name, layout in LAYOUTS.items():
        run = Run(ctx, layout, ["--num-layers", "4"])
        steps = StepRunner(parts_of(run.config, run.ps, run.engine, run.runner, NanPolicy("abort", 3)))
        batches = StepBatches(run.microbatches(1), reads=run.spec.reads_data(run.ps.pp_rank))
        chains = Chains(run)
        sys.setprofile(chains.called)
        try:
            steps.step(batches, StepTask(1, run.num_microbatches))
        finally:
            sys.setprofile(None)
        found[name] = vars(chains)
    return found


def test_files_of_a_step():
    """From the step's entry, `StepRunner.step`, to the first layer's forward: at most 6, the entry's file among them,
    the layer's own not. The user's function that calls the model lies outside of megatron/.

    From the backward node of a weight to the reduce-scatter of its unit: at most 5 in all three chains together, the
    node's file among them, that of the collectives not: from the node to the sink that takes the gradient, from the
    sink (in its B or, filed, in its W) to the reducer that has memory for it, and to the REDUCE, from whoever comes
    to the next unit inside a computation, or from the executor in between."""
    for found in run_ranks(chains_of_steps, 4):
        for name, chains in found.items():
            to_layer = chains["layer"][chains["layer"].index(STEP) :]
            assert to_layer.pop() == LAYER
            assert len(set(to_layer)) <= 6, f"{name}: {to_layer}"

            dgrad, arrival, reduce = (inside(chains[one]) for one in ("dgrad", "arrival", "reduce"))
            assert dgrad[0] == HALVES
            assert reduce.pop() == COLLECTIVES
            passed = {*dgrad, *arrival, *reduce}
            assert {HALVES, SINK, REDUCER} < passed
            assert len(passed) <= 5, f"{name}: {dgrad}, {arrival}, {reduce}"
