"""Linear and embedding layers on the sink, under Megatron's names, each holding its rank's part of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.core.param_meta import LOOKUP, InitKind, Region
from megatron.core.protocols import WeightGradSink
from megatron.core.tensor_parallel.linear import Activation, column_linear, row_linear
from megatron.core.tensor_parallel.mappings import (
    TensorParallel,
    gather_sequence,
    sequence_slice,
    sum_ranks,
)
from megatron.core.tensor_parallel.shards import Band, band_regions, even_bands, whole_region
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule


class _ParallelLinear(SinkModule):
    """A linear layer, weight [out, in] and maybe bias [out] of the whole; what is held is a part of them."""

    bias: nn.Parameter | None

    def _make_parameters(
        self,
        shape: tuple[int, int],
        *,
        regions: tuple[Region, ...],
        bias_regions: tuple[Region, ...],
        init_std: float,
        bias: bool,
        embedding_or_output: bool = False,
    ) -> None:
        self.weight = self.new_parameter(
            "weight",
            shape,
            regions=regions,
            init=InitKind.NORMAL,
            init_std=init_std,
            embedding_or_output=embedding_or_output,
        )
        self.bias = None
        if bias:
            self.bias = self.new_parameter(
                "bias",
                shape[:1],
                regions=bias_regions,
                init=InitKind.ZEROS,
            )
        self._bias_key = self.key("bias") if bias else None


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are sharded: QKV, first MLP matrix, output layer.

    [s, ..., in] (sequence parallel: [s/tp, ..., in]) -> [s, ..., this rank's features]. bands: the rows of the
    weight that this rank holds, in its own order; an even share by default. Communicates over tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        factory: LayerFactory,
        init_std: float,
        bias: bool,
        embedding_or_output: bool = False,
        bands: Sequence[Band] | None = None,
    ) -> None:
        super().__init__(name, factory)
        if bands is None:
            bands = even_bands(out_features, self.tp)
        shape = (out_features, in_features)
        self._make_parameters(
            shape,
            regions=band_regions(shape, bands, 0, self.tp),
            bias_regions=band_regions(shape[:1], bands, 0, self.tp),
            init_std=init_std,
            bias=bias,
            embedding_or_output=embedding_or_output,
        )

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(
            x,
            self.weight,
            self.bias,
            sink=self.sink,
            key=self.key("weight"),
            bias_key=self._bias_key,
            tp=self.tp,
        )


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are sharded: attention projection, second MLP matrix.

    [s, ..., in/tp] -> [s, ..., out] (sequence parallel: [s/tp, ..., out]). Every rank holds the bias, which is
    added once, after the sum over ranks. Communicates over tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        factory: LayerFactory,
        init_std: float,
        bias: bool,
    ) -> None:
        super().__init__(name, factory)
        shape = (out_features, in_features)
        self._make_parameters(
            shape,
            regions=band_regions(shape, even_bands(in_features, self.tp), 1, self.tp),
            bias_regions=whole_region(shape[:1], self.tp, partial=False),
            init_std=init_std,
            bias=bias,
        )

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """Of activation(x) where one is given."""
        return row_linear(
            x,
            self.weight,
            self.bias,
            sink=self.sink,
            key=self.key("weight"),
            bias_key=self._bias_key,
            activation=activation,
            tp=self.tp,
        )


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


class _ShardedLookup(torch.autograd.Function):
    """Rows that this rank does not hold count as zeros and get no gradient.

    Ids outside are wrapped onto held rows, where zeros are added for them: shapes then do not depend on the
    data, which would cost a host-device sync, and no single row gets all the zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, tp: TensorParallel, sink: WeightGradSink, key: str
    ) -> Tensor:
        held, outside = local_ids(ids, weight.shape[0], tp)
        ctx.save_for_backward(held, outside)
        ctx.tp, ctx.sink, ctx.key = tp, sink, key
        rows = F.embedding(held, weight).masked_fill_(outside.unsqueeze(-1), 0.0)
        return sum_ranks(rows, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        held, outside = ctx.saved_tensors
        dy = gather_sequence(grads[0], ctx.tp)
        ctx.sink.put(ctx.key, held, dy.masked_fill(outside.unsqueeze(-1), 0.0))
        return None, None, None, None, None


def local_ids(ids: Tensor, rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """(ids as rows of this rank's `rows`, those of other ranks wrapped; bool: it does not hold this id).

    An id that no rank holds stays outside, for the lookup to refuse.
    """
    relative = ids - tp.rank * rows
    unknown = (ids < 0) | (ids >= tp.size * rows)
    held = torch.where(unknown, relative, relative.remainder(rows))
    return held, (relative < 0) | (relative >= rows)


class VocabParallelEmbedding(SinkModule):
    """A table of rows looked up by id, weight [rows, h], its rows sharded: words.

    two_uses: the matrix is also this model's output layer; the lookup's gradient then arrives under its own key.
    shared: another pipeline stage has its own copy of the matrix, for its own use.
    """

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        *,
        name: str,
        factory: LayerFactory,
        init_std: float,
        two_uses: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(name, factory)
        key = self.key("weight")
        self._lookup_key = key + LOOKUP if two_uses else key
        shape = (rows, hidden_size)
        self.weight = self.new_parameter(
            "weight",
            shape,
            regions=band_regions(shape, even_bands(rows, self.tp), 0, self.tp),
            init=InitKind.NORMAL,
            init_std=init_std,
            embedding_or_output=True,
            uses=(key, self._lookup_key) if two_uses else (),
            shared=shared,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""
        rows: Tensor
        if self.tp.size == 1:
            rows = _Lookup.apply(ids, self.weight, self.sink, self._lookup_key)
        else:
            rows = _ShardedLookup.apply(ids, self.weight, self.tp, self.sink, self._lookup_key)
        return rows


class PositionEmbedding(SinkModule):
    """Learned positions, weight [rows, h], whole on every rank; each looks up the positions of its own tokens."""

    def __init__(
        self, rows: int, hidden_size: int, *, name: str, factory: LayerFactory, init_std: float
    ) -> None:
        super().__init__(name, factory)
        shape = (rows, hidden_size)
        self.weight = self.new_parameter(
            "weight",
            shape,
            regions=whole_region(shape, self.tp, partial=self.tp.sequence_parallel),
            init=InitKind.NORMAL,
            init_std=init_std,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h] (sequence parallel: [s/tp, b, h])."""
        ids = sequence_slice(ids, self.tp)
        rows: Tensor = _Lookup.apply(ids, self.weight, self.sink, self.key("weight"))
        return rows
