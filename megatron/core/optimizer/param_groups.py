"""Which parameters decay, and which have a learning rate of their own.

Biases and 1-D parameters never decay (`ParamMeta.decay`); `--decoupled-lr` applies to the embedding and the
output layer only (`ParamMeta.embedding_or_output`). A group's parameters are long slices of what this rank holds of
the flat main weights, not the model's own tensors: the update is elementwise, so cutting the buffer elsewhere
changes no value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from torch import nn

from megatron.core.distributed.bucket_memory import BucketMemory
from megatron.core.distributed.flat_buffer import FlatBuffer, group_of
from megatron.core.distributed.shard_layout import Span
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class ParamGroup(TypedDict):
    """One of torch's parameter groups, with what the scheduler needs to set its `lr` and `weight_decay`.

    wd_mult: 1.0, or 0.0 where nothing decays. decoupled: max_lr and min_lr are --decoupled-lr's.
    """

    params: list[nn.Parameter]
    name: str
    lr: float
    weight_decay: float
    wd_mult: float
    max_lr: float
    min_lr: float
    decoupled: bool


@dataclasses.dataclass(frozen=True)
class FlatSlice:
    """What torch's optimizer takes for one parameter: a span of a bucket's main weights.

    start, end: its elements in the bucket's part. span: the same in the arena's flat buffer at rest (of moments).
    """

    bucket: BucketMemory
    span: Span
    start: int
    end: int
    parameter: nn.Parameter


def flat_slices(buffer: FlatBuffer) -> list[FlatSlice]:
    """What this rank updates, without padding, in the buffer's order; nothing where it has no part of any parameter."""
    cut = buffer.sharding.optimizer
    memory_of = {(memory.arena, memory.bucket.index): memory for memory in buffer.buckets}
    slices = []
    for index, arena in enumerate(buffer.arenas):
        for span in arena.layout.spans_at_rest(buffer.place, cut) if arena.trained else ():
            memory = memory_of[index, span.bucket]
            assert memory.main_weights is not None
            first = arena.layout.rest_start(span.bucket, buffer.place, cut)
            start, end = span.start - first, span.end - first
            slices.append(FlatSlice(memory, span, start, end, nn.Parameter(memory.main_weights[start:end])))
    return slices


def build_param_groups(
    config: OptimizerConfig, buffer: FlatBuffer, slices: Sequence[FlatSlice]
) -> list[ParamGroup]:
    """One group for each kind of parameter that the buffer holds, in order of first use in the model."""
    groups: dict[str, ParamGroup] = {}
    for name in buffer.names:
        meta = buffer.param_meta[name]
        decoupled = meta.embedding_or_output and config.decoupled_lr is not None
        key = group_of(meta)
        if key not in groups:
            groups[key] = _empty_group(config, key, decays=meta.decay, decoupled=decoupled)
    for piece in slices:
        groups[piece.span.group]["params"].append(piece.parameter)
    return list(groups.values())


def _empty_group(config: OptimizerConfig, name: str, *, decays: bool, decoupled: bool) -> ParamGroup:
    max_lr, min_lr = config.lr, config.min_lr
    if decoupled:
        assert config.decoupled_lr is not None
        max_lr = config.decoupled_lr
        min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    wd_mult = 1.0 if decays else 0.0
    return ParamGroup(
        params=[],
        name=name,
        lr=max_lr,
        weight_decay=config.weight_decay * wd_mult,
        wd_mult=wd_mult,
        max_lr=max_lr,
        min_lr=min_lr,
        decoupled=decoupled,
    )
