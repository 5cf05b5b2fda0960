"""Linear and embedding layers on the sink, under Megatron's names, each holding its rank's part of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.core.param_meta import LOOKUP, InitKind
from megatron.core.protocols import WeightGradSink
from megatron.core.tensor_parallel.linear import Activation, column_linear, row_linear
from megatron.core.tensor_parallel.mappings import (
    ALONE,
    TensorParallel,
    gather_sequence,
    sequence_slice,
    sum_ranks,
)
from megatron.core.tensor_parallel.sink_module import (
    Band,
    LayerFactory,
    SinkModule,
    band_regions,
    even_bands,
    whole_region,
)


class _ParallelLinear(SinkModule):
    """A linear layer, weight [out, in] and maybe bias [out] of the whole; what is held is a part of them.

    bands: of the dim that is cut, what this rank holds, in its own order; an even share by default.
    """

    cut: ClassVar[int]  # the dim of the weight that is cut over tp

    def __init__(
        self,
        in_features: int,
        out_features: int,
        factory: LayerFactory,
        *,
        bias: bool,
        bands: Sequence[Band] | None = None,
        embedding_or_output: bool = False,
    ) -> None:
        super().__init__(factory)
        shape, tp = (out_features, in_features), self.tp
        bands = even_bands(shape[self.cut], tp) if bands is None else bands
        self.weight = self.new_parameter(
            "weight",
            shape,
            InitKind.NORMAL,
            band_regions(shape, bands, self.cut, tp),
            init_std=factory.residual_std if self.cut else factory.init_std,
            embedding_or_output=embedding_or_output,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            whole = whole_region(shape[:1], tp, partial=False)
            regions = whole if self.cut else band_regions(shape[:1], bands, 0, tp)
            self.bias = self.new_parameter("bias", shape[:1], InitKind.ZEROS, regions)
        keys = {"key": self.key("weight"), "bias_key": self.key("bias") if bias else None}
        self._route: dict[str, Any] = {"sink": self.sink, "tp": tp, **keys}


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are sharded: QKV, first MLP matrix, output layer.

    [s, ..., in] (sequence parallel: [s/tp, ..., in]) -> [s, ..., this rank's features]. Communicates over tp.
    """

    cut = 0

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, **self._route)


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are sharded, and that writes into the residual stream: attention projection,
    second MLP matrix.

    [s, ..., in/tp] -> [s, ..., out] (sequence parallel: [s/tp, ..., out]). Every rank holds the bias, which is
    added once, after the sum over ranks. Communicates over tp.
    """

    cut = 1

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """Of activation(x) where one is given."""
        return row_linear(x, self.weight, self.bias, activation=activation, **self._route)


class _Lookup(torch.autograd.Function):
    """Rows that this rank does not hold count as zeros and get no gradient.

    Ids outside are wrapped onto held rows, where zeros are added for them: shapes then do not depend on the
    data, which would cost a host-device sync, and no single row gets all the zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, tp: TensorParallel, sink: WeightGradSink, key: str
    ) -> Tensor:
        ctx.tp, ctx.sink, ctx.key = tp, sink, key
        if tp.size == 1:
            ctx.save_for_backward(ids)
            return F.embedding(ids, weight)
        held, outside = local_ids(ids, weight.shape[0], tp)
        ctx.save_for_backward(held, outside)
        return sum_ranks(F.embedding(held, weight).masked_fill_(outside.unsqueeze(-1), 0.0), tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        ids, *outside = ctx.saved_tensors
        dy = gather_sequence(grads[0], ctx.tp)
        ctx.sink.put(ctx.key, ids, dy.masked_fill(outside[0].unsqueeze(-1), 0.0) if outside else dy)
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
        factory: LayerFactory,
        *,
        two_uses: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(factory)
        shape, key = (rows, hidden_size), self.key("weight")
        self._lookup_key = key + LOOKUP if two_uses else key
        self.weight = self.new_parameter(
            "weight",
            shape,
            InitKind.NORMAL,
            band_regions(shape, even_bands(rows, self.tp), 0, self.tp),
            init_std=factory.init_std,
            embedding_or_output=True,
            uses=(key, self._lookup_key) if two_uses else (),
            shared=shared,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""
        rows: Tensor = _Lookup.apply(ids, self.weight, self.tp, self.sink, self._lookup_key)
        return rows


class PositionEmbedding(SinkModule):
    """Learned positions, weight [rows, h], whole on every rank; each looks up the positions of its own tokens."""

    def __init__(self, rows: int, hidden_size: int, factory: LayerFactory) -> None:
        super().__init__(factory)
        shape, std = (rows, hidden_size), factory.init_std
        regions = whole_region(shape, self.tp, partial=self.tp.sequence_parallel)
        self.weight = self.new_parameter("weight", shape, InitKind.NORMAL, regions, init_std=std)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h] (sequence parallel: [s/tp, b, h])."""
        ids = sequence_slice(ids, self.tp)
        rows: Tensor = _Lookup.apply(ids, self.weight, ALONE, self.sink, self.key("weight"))
        return rows
