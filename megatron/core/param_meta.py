"""Typed facts about a parameter, kept beside the model and never tagged onto a tensor.

A model built from our layers carries `param_meta: dict[name, ParamMeta]`, keyed by the parameter's global name
(`decoder.layers.3.mlp.linear_fc1.weight`, whatever stage or shard holds it). For any other `nn.Module`,
`infer_param_meta` derives the same record.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from torch import nn


class InitKind(Enum):
    """How a parameter starts."""

    NORMAL = "normal"
    ZEROS = "zeros"
    ONES = "ones"


class GradRoute(Enum):
    """Who computes a parameter's gradient, and when (facts that pipelines with split backward need)."""

    WEIGHT = "weight"  # through a WeightGradSink; may be deferred from B to W
    INPUT = "input"  # through a WeightGradSink, inside B (norms and other 1-D parameters)
    AUTOGRAD = "autograd"  # autograd's own accumulation, seen by a post-accumulate hook (plain modules)


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """One parameter.

    global_shape: shape of the whole tensor over all ranks.
    uses: the sink keys under which gradient contributions arrive. One key for most; tied embeddings have
        (name, name + LOOKUP): each use has its own accumulator, added once after the last microbatch.
    decay: weight decay applies. embedding_or_output: `--decoupled-lr` applies.
    layer: global layer number, or None outside the layers.
    """

    name: str
    global_shape: tuple[int, ...]
    init: InitKind = InitKind.NORMAL
    init_std: float = 0.02
    route: GradRoute = GradRoute.AUTOGRAD
    uses: tuple[str, ...] = ()
    decay: bool = True
    embedding_or_output: bool = False
    layer: int | None = None

    @property
    def grad_keys(self) -> tuple[str, ...]:
        return self.uses or (self.name,)


LOOKUP = "@lookup"  # suffix of the key under which the embedding lookup's gradient of a tied weight arrives


def infer_param_meta(module: nn.Module) -> dict[str, ParamMeta]:
    """ParamMeta for a module that is not ours: 1-D parameters and biases do not decay."""
    return {
        name: ParamMeta(
            name=name,
            global_shape=tuple(p.shape),
            decay=p.dim() > 1 and not name.endswith(".bias"),
        )
        for name, p in module.named_parameters()
    }
