"""A model of a user's own: its stages as pieces, as its provider and its forward step make them on tensors without
memory."""

from __future__ import annotations

import contextvars
import dataclasses
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.core.device import imagining
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport.parallel_state import ParallelState
from megatron.estimate.description import ModelPiece
from megatron.estimate.observe import ObservedPart, observe
from megatron.training import global_vars
from megatron.training.config.config import Config
from megatron.training.engine import Chunk
from megatron.training.report.step_metrics import ForwardStep, evaluate_loss, loss_to_differentiate
from megatron.training.run.build import ModelProvider, build_chunk, imagined_world
from megatron.training.run.describe import host_batch, summed_in
from megatron.training.run.session import new_timers

_T = TypeVar("_T")


def own_stages(
    config: Config,
    spec: ScheduleSpec,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    tokenizer: Tokenizer | None = None,
    rank: int = 0,
) -> dict[int, ModelPiece]:
    """All stages of the pipeline that a rank is in, by number, as the spec has them. tokenizer: that user code may ask
    for. Generators of random numbers are left as they were.

    Raises whatever user code does.
    """
    config = dataclasses.replace(config, decided=spec)
    asked = config, spec, model_provider, forward_step, tokenizer, rank
    return with_generators_kept(_observed, *asked)


def with_generators_kept(run: Callable[..., _T], *args: Any) -> _T:
    """What it returns, in a context of its own, of which generators of random numbers show nothing."""
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        return contextvars.copy_context().run(run, *args)
    finally:
        torch.set_rng_state(drawn[0])
        np.random.set_state(drawn[1])
        random.setstate(drawn[2])


def _observed(
    config: Config,
    spec: ScheduleSpec,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    tokenizer: Tokenizer | None,
    rank: int,
) -> dict[int, ModelPiece]:
    world, found, hidden = imagined_world(config, rank), dict[int, ModelPiece](), None
    grid = config.world_part().grid
    for stage, pp_rank in enumerate(spec.placement.ranks()):
        ps = world.state(grid.rank({**grid.coordinates(rank), "pp": pp_rank}))
        where = ps.device.torch_device
        with imagining(ps.device), torch.device(where):
            publish_here(config, ps, config.flat(), speaks=False, tokenizer=tokenizer)
            number = spec.local_stages(pp_rank).index(stage)
            chunk = build_chunk(config, ps, model_provider, number, spec)
            forward = _forward_of(config, chunk, forward_step, host_batch(config, where))
            sums, groups = summed_in(config), ps.groups.values()
            part = ObservedPart(chunk.module, forward, hidden, chunk.spec.loss, sums, groups)
            found[stage] = observe(part)
            with torch.no_grad():
                states = None if hidden is None else torch.empty(hidden[0], dtype=hidden[1])
                out = forward(states)
            hidden = out.shape, out.dtype
    return found


def _forward_of(
    config: Config, chunk: Chunk, forward_step: ForwardStep, batch: Mapping[str, Tensor]
) -> Callable[[Tensor | None], Tensor]:
    """As a run calls it, of one microbatch."""

    def forward(hidden: Tensor | None) -> Tensor:
        chunk.context.begin_microbatch(1, 0, 0)
        chunk.set_input(hidden)
        output, loss_func = forward_step(iter([dict(batch)]), chunk.module)
        chunk.set_input(None)
        if not chunk.spec.loss:
            return output
        return loss_to_differentiate(evaluate_loss(output, loss_func), config.model.calculate_per_token_loss)

    return forward


def publish_here(
    config: Config,
    ps: ParallelState,
    settings: Mapping[str, Any],
    *,
    speaks: bool = True,
    tokenizer: Tokenizer | None = None,
) -> None:
    """What user code asks for, in this thread, of one of several ranks. speaks: it prints as that rank would."""
    batch, place = config.batch_schedule(), {"rank": ps.rank, "world_size": ps.world_size}
    args = {**settings, **config.extra, **place, "iteration": 0, "curr_iteration": 0}
    global_vars.provide_here(
        rank=ps.rank if speaks else -1,
        world_size=ps.world_size,
        args=SimpleNamespace(**args, consumed_train_samples=0, consumed_valid_samples=0),
        config=config,
        device=ps.device,
        parallel_state=ps,
        timers=new_timers(config, ps),
        batch_schedule=batch,
        num_microbatches=lambda: batch.num_microbatches(0),
        global_batch_size=lambda: batch.global_batch_size(0),
        **({} if tokenizer is None else {"tokenizer": tokenizer}),
    )
