"""Linear and embedding layers on the sink, under Megatron's names.

One process holds whole matrices: nothing here communicates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.core.param_meta import LOOKUP, GradRoute, InitKind
from megatron.core.protocols import WeightGradSink
from megatron.core.sink_module import LayerFactory, SinkModule
from megatron.core.tensor_parallel.linear import Activation, linear


class _ParallelLinear(SinkModule):
    """A linear layer, weight [out, in] and maybe bias [out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        factory: LayerFactory,
        init_std: float,
        bias: bool,
        layer: int | None = None,
        embedding_or_output: bool = False,
    ) -> None:
        super().__init__(name, factory)
        self.weight = self.new_parameter(
            "weight",
            (out_features, in_features),
            init=InitKind.NORMAL,
            init_std=init_std,
            route=GradRoute.WEIGHT,
            layer=layer,
            embedding_or_output=embedding_or_output,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = self.new_parameter(
                "bias", (out_features,), init=InitKind.ZEROS, route=GradRoute.WEIGHT, layer=layer
            )
        self._bias_key = self.key("bias") if bias else None

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """[..., in] -> [..., out], of activation(x) where one is given."""
        return linear(
            x,
            self.weight,
            self.bias,
            sink=self.sink,
            key=self.key("weight"),
            bias_key=self._bias_key,
            activation=activation,
        )


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are the ones to shard: QKV, first MLP matrix, output layer."""


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are the ones to shard: attention projection, second MLP matrix."""


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, sink: WeightGradSink, key: str) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.sink, ctx.key = sink, key
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.sink.put(ctx.key, ids, grads[0])
        return None, None, None, None


class VocabParallelEmbedding(SinkModule):
    """A table of rows looked up by id, weight [rows, h]: words, and learned positions.

    tied: the matrix is also the output layer's; the lookup's gradient then arrives under its own key.
    """

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        *,
        name: str,
        factory: LayerFactory,
        init_std: float,
        tied: bool = False,
    ) -> None:
        super().__init__(name, factory)
        key = self.key("weight")
        self._lookup_key = key + LOOKUP if tied else key
        self.weight = self.new_parameter(
            "weight",
            (rows, hidden_size),
            init=InitKind.NORMAL,
            init_std=init_std,
            route=GradRoute.WEIGHT,
            embedding_or_output=True,
            uses=(key, self._lookup_key) if tied else (),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h]."""
        rows: Tensor = _Lookup.apply(ids, self.weight, self.sink, self._lookup_key)
        return rows
