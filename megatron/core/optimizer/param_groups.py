"""Which parameters decay, and which have a learning rate of their own.

Biases and 1-D parameters never decay (`ParamMeta.decay`). `--decoupled-lr` applies to the word embeddings and the
output layer only (`ParamMeta.embedding_or_output`), as in Megatron: learned positions have the ordinary rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from torch import nn

from megatron.core.distributed.flat_buffer import FlatBuffer
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


def build_param_groups(
    config: OptimizerConfig, buffer: FlatBuffer, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[ParamGroup]:
    """One group for each kind of parameter that the buffer holds, in order of first use in the model. parameters: of
    torch's optimizer, by the layout's group."""
    groups: dict[str, ParamGroup] = {}
    floor = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    for meta in (buffer.param_meta[name] for name in buffer.names):
        max_lr, min_lr, wd_mult = config.lr, config.min_lr, 1.0 if meta.decay else 0.0
        if decoupled := meta.embedding_or_output and config.decoupled_lr is not None:
            max_lr, min_lr = config.decoupled_lr or 0.0, floor
        groups[meta.group] = ParamGroup(
            params=[],
            name=meta.group,
            lr=max_lr,
            weight_decay=config.weight_decay * wd_mult,
            wd_mult=wd_mult,
            max_lr=max_lr,
            min_lr=min_lr,
            decoupled=decoupled,
        )
    for key, parameter in parameters:
        groups[key]["params"].append(parameter)
    return list(groups.values())
