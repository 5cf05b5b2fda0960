"""Which parameters decay, and which have a learning rate of their own.

Biases and 1-D parameters never decay (`ParamMeta.decay`). `--decoupled-lr` applies to the word embeddings and the
output layer only (`ParamMeta.embedding_or_output`), as in Megatron: learned positions have the ordinary rate. A
group's parameters are long slices of what this rank holds of the flat main weights, not the model's own tensors: the
update is elementwise, so cutting the buffer elsewhere changes no value (see [Note: whole vectors] in ragged_ends).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypedDict

from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import BucketMemory
from megatron.core.distributed.flat_buffer import FlatBuffer
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
    """A span of a bucket's main weights.

    start, end: its elements in the bucket's part. span: the same in the arena's flat buffer at rest (of moments).
    """

    bucket: BucketMemory
    span: Span
    start: int
    end: int

    @property
    def main_weights(self) -> Tensor:
        assert self.bucket.main_weights is not None
        return self.bucket.main_weights[self.start : self.end]

    def narrowed(self, start: int, end: int) -> FlatSlice:
        """Elements [start, end) of the slice."""
        first = self.span.start
        span = dataclasses.replace(self.span, start=first + start, end=first + end)
        return FlatSlice(self.bucket, span, self.start + start, self.start + end)


def flat_slices(buffer: FlatBuffer, vector: int = 1) -> tuple[list[FlatSlice], list[FlatSlice]]:
    """What this rank updates, without padding, in the buffer's order; nothing where it has no part of any parameter.

    First slices of multiples of `vector` elements, then what is left at their ends.
    """
    cut = buffer.sharding.optimizer
    memory_of = {(memory.arena, memory.bucket.index): memory for memory in buffer.buckets}
    bodies, ends = [], []
    for index, arena in enumerate(buffer.arenas):
        for span in arena.layout.spans_at_rest(buffer.place, cut) if arena.trained else ():
            first = arena.layout.rest_start(span.bucket, buffer.place, cut)
            whole = FlatSlice(memory_of[index, span.bucket], span, span.start - first, span.end - first)
            numel = span.end - span.start
            body = numel // vector * vector
            if body:
                bodies.append(whole.narrowed(0, body))
            if body < numel:
                ends.append(whole.narrowed(body, numel))
    return bodies, ends


def build_param_groups(
    config: OptimizerConfig, buffer: FlatBuffer, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[ParamGroup]:
    """One group for each kind of parameter that the buffer holds, in order of first use in the model. parameters: of
    torch's optimizer, by the layout's group."""
    groups: dict[str, ParamGroup] = {}
    for name in buffer.names:
        meta = buffer.param_meta[name]
        decoupled = meta.embedding_or_output and config.decoupled_lr is not None
        key = meta.group
        if key not in groups:
            groups[key] = _empty_group(config, key, decays=meta.decay, decoupled=decoupled)
    for key, parameter in parameters:
        groups[key]["params"].append(parameter)
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
