"""Which parameters decay, and which have a learning rate of their own.

Biases and 1-D parameters never decay (`ParamMeta.decay`); `--decoupled-lr` applies to the embedding and the
output layer only (`ParamMeta.embedding_or_output`). A group's parameters are long slices of the flat main
weights, not the model's own tensors: the update is elementwise, so cutting the buffer elsewhere changes no
value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from torch import nn

from megatron.core.distributed.flat_buffer import Arena, FlatBuffer, group_of
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
    """What torch's optimizer takes for one parameter: a span of an arena's main weights."""

    arena: Arena
    span: Span
    parameter: nn.Parameter


def flat_slices(buffer: FlatBuffer) -> list[FlatSlice]:
    """The whole buffer without its padding, in its own order."""
    return [
        FlatSlice(arena, span, nn.Parameter(arena.main_weights[span.start : span.end]))
        for arena in buffer.arenas
        for span in arena.layout.spans
    ]


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
