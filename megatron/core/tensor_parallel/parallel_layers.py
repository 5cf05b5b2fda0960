"""Linear and embedding layers on the sink, under Megatron's names, each holding its rank's part of the parameters
(arXiv 1909.08053, section 3).

[Note: B and W] The backward of a linear layer is two independent products. dx = dy W is what the layer
before waits for; dW = dy^T x is what nobody waits for. The linear layers below return the first and hand (x,
dy) to the sink, which computes the second at once or keeps it for later. The weight itself gets no gradient
from autograd: `.grad` stays None.

[Note: B's communication behind W] A column layer's dx is a sum over tensor parallel ranks. Its reduction begins
before the sink is called and is waited for afterwards, so that it runs beside the weight GEMM. Under sequence
parallel x was kept in parts: it is gathered beside the GEMM of dx, unless the sink defers the weight gradient; then
the sink keeps the part and gathers in W. Where the plan has memory for it, F keeps x as it was gathered for the
product, and nothing is gathered a second time (`WeightGradSink.keeps_gathered`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.core.device import linear, product
from megatron.core.param_meta import LOOKUP, InitKind
from megatron.core.protocols import Operand, WeightGradSink
from megatron.core.tensor_parallel import mappings, sink_module
from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.tensor_parallel.mappings import ALONE, TensorParallel
from megatron.core.tensor_parallel.sink_module import Band, LayerFactory, SinkModule
from megatron.core.weight_grad import put_linear


class Activation(Protocol):
    """An elementwise function whose input is kept for the backward pass, and its output where `keeps_output`."""

    @property
    def keeps_output(self) -> bool: ...

    def forward(self, x: Tensor) -> Tensor: ...

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """Gradient at x of dy at the output, of the shape of x; may overwrite dy."""
        ...


class Route(NamedTuple):
    """Where a linear layer's weight gradients go, and the ranks that it is shared with."""

    sink: WeightGradSink
    key: str
    bias_key: str | None = None
    tp: TensorParallel = ALONE


# --- what a layer computes, without autograd: `GradFunction`s, here and of a layer's halves, are lists of these


def column_forward(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
    """(x W^T + b [s, ..., out/tp], what is kept of x for the backward). As `column_linear`."""
    if not route.tp.sequence_parallel:
        return linear(x, weight, bias), x
    whole = mappings.gather_sequence(x, route.tp)
    return linear(whole, weight, bias), whole if route.sink.keeps_gathered else x


def column_dgrad(
    dy: Tensor, kept: Tensor, weight: Tensor, route: Route
) -> tuple[Tensor, mappings.Pending | None, Tensor | Operand]:
    """dy [s, ..., out/tp] -> (dx, of the shape of x, once what is pending has been waited for; x for the weight
    gradient, which is computed in between). See [Note: B's communication behind W]."""
    if route.tp.size == 1:
        return product(dy, weight), None, kept
    operand: Tensor | mappings.SequenceShard = kept
    if route.tp.sequence_parallel and kept.shape[0] < dy.shape[0]:
        operand = mappings.SequenceShard(kept, route.tp)
        if weight.requires_grad and not route.sink.deferring:
            operand.start()
    return *mappings.start_sum(product(dy, weight), route.tp), operand


def row_forward(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    """x W^T + b, [s, ..., in/tp] -> [s, ..., out]. As `row_linear`."""
    if route.tp.size == 1:
        return linear(x, weight, bias)
    total = mappings.sum_ranks(linear(x, weight), route.tp)
    return total if bias is None else total.add_(bias)


class _ColumnLinear(NamedTuple):
    """A `GradFunction` of x."""

    weight: Tensor
    bias: Tensor | None
    route: Route

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        y, kept = column_forward(x, *self)
        return y, (kept, self.weight)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        of_x, weight = kept
        dx, pending, x = column_dgrad(dy, of_x, weight, self.route)
        put_linear(self.route, x, dy, *self[:2])
        if pending is not None:
            pending.wait()
        return (dx,)


class _RowLinear(NamedTuple):
    """A `GradFunction` of x."""

    weight: Tensor
    bias: Tensor | None
    route: Route
    activation: Activation | None

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        activation, inner = self.activation, x
        if activation is not None:
            inner = activation.forward(x)
        kept = (inner,) if activation is not None and activation.keeps_output else ()
        return row_forward(inner, *self[:3]), (x, self.weight, *kept)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        (x, weight, *inner), activation = kept, self.activation
        dy = mappings.gather_sequence(dy, self.route.tp)
        dx = product(dy, weight)
        if not inner:
            inner = [x if activation is None else activation.forward(x)]
        put_linear(self.route, inner[0], dy, *self[:2])
        return (dx if activation is None else activation.backward(x, dx),)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **route: Any) -> Tensor:
    """x W^T + b over this rank's output features: x [s, ..., in], weight [out/tp, in] -> [s, ..., out/tp].

    route: sink and key of the weight, bias_key where there is a bias, tp. Under sequence parallel x is [s/tp, ..., in].
    Communicates over tp: gathers x (sequence parallel only), and in the backward pass adds the input's gradient.
    """
    return apply(_ColumnLinear(weight, bias, Route(**route)), x, parameters=(weight, bias))


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    **route: Any,
) -> Tensor:
    """activation(x) W^T + b over this rank's input features: x [s, ..., in/tp], weight [out, in/tp] -> [s, ..., out].

    route: as in `column_linear`. Under sequence parallel the result is [s/tp, ..., out].
    Communicates over tp: adds the products of all ranks before the bias, and in the backward pass gathers dy (sequence
    parallel only), so that every rank has the whole gradient of the bias. With an activation only its input is kept,
    unless it says otherwise; the output is computed again for the weight gradient.
    """
    return apply(_RowLinear(weight, bias, Route(**route), activation), x, parameters=(weight, bias))


class _ParallelLinear(SinkModule):
    """A linear layer, weight [out, in] and maybe bias [out] of the whole; what is held is a part of them.

    bands: of the dim that is cut, what this rank holds, in its own order; an even share by default. vocabulary: output
    features are ids (`vocabulary_part`).
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
        vocabulary: bool = False,
    ) -> None:
        super().__init__(factory)
        shape, tp = (out_features, in_features), self.tp
        if vocabulary:
            part = sink_module.vocabulary_part(shape, tp)
        else:
            bands = sink_module.even_bands(shape[self.cut], tp) if bands is None else bands
            part = {"regions": sink_module.band_regions(shape, bands, self.cut, tp)}
        std = factory.residual_std if self.cut else factory.init_std
        self.weight = self.new_parameter("weight", shape, InitKind.NORMAL, init_std=std, **part)
        self.bias: nn.Parameter | None = None
        if bias:
            assert bands is not None, "ids have no bias"
            whole = sink_module.whole_region(shape[:1], tp, partial=False)
            regions = whole if self.cut else sink_module.band_regions(shape[:1], bands, 0, tp)
            self.bias = self.new_parameter("bias", shape[:1], InitKind.ZEROS, regions)
        self.route = Route(self.sink, self.key("weight"), self.key("bias") if bias else None, tp)


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are sharded: QKV, first MLP matrix, output layer.

    [s, ..., in] (sequence parallel: [s/tp, ..., in]) -> [s, ..., this rank's features]. Communicates over tp.
    """

    cut = 0

    def forward(self, x: Tensor) -> Tensor:
        held = self.weight, self.bias
        return apply(_ColumnLinear(*held, self.route), x, parameters=held)


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are sharded, and that writes into the residual stream: attention projection,
    second MLP matrix.

    [s, ..., in/tp] -> [s, ..., out] (sequence parallel: [s/tp, ..., out]). Every rank holds the bias, which is
    added once, after the sum over ranks. Communicates over tp.
    """

    cut = 1

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """Of activation(x) where one is given."""
        held = self.weight, self.bias
        return apply(_RowLinear(*held, self.route, activation), x, parameters=held)


class Lookup(NamedTuple):
    """A `GradFunction` of ids. Rows that this rank does not hold count as zeros and get no gradient.

    Ids outside are wrapped onto held rows, where zeros are added for them: shapes then do not depend on the
    data, which would cost a host-device sync, and no single row gets all the zeros.
    """

    weight: Tensor
    route: Route
    vocab_size: int

    def forward(self, ids: Tensor) -> tuple[Tensor, Kept]:
        weight, tp = self.weight, self.route.tp
        if tp.size == 1:
            return torch.embedding(weight, ids), (ids,)
        held, outside = local_ids(ids, self.vocab_size, tp)
        rows = torch.embedding(weight, held).masked_fill_(outside.unsqueeze(-1), 0.0)
        return mappings.sum_ranks(rows, tp), (held, outside)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[None]:
        ids, *outside = kept
        dy = mappings.gather_sequence(dy, self.route.tp)
        dy = dy.masked_fill(outside[0].unsqueeze(-1), 0.0) if outside else dy
        if self.weight.requires_grad:
            self.route.sink.put(self.route.key, ids, dy)
        return (None,)


def local_ids(ids: Tensor, vocab_size: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """(ids [...] as rows of this rank's `vocabulary_band`, those of other ranks wrapped; bool [...]: it does not hold
    this id).

    An id that no rank holds stays outside, for the lookup to refuse.
    """
    band = sink_module.vocabulary_band(vocab_size, tp)
    relative = ids - band.offset
    unknown = (ids < 0) | (ids >= vocab_size)
    held = torch.where(unknown, relative, relative.remainder(band.size))
    return held, (relative < 0) | (relative >= band.size)


class VocabParallelEmbedding(SinkModule):
    """A table of rows looked up by id, weight [rows, h], its rows sharded: words. Communicates over tp.

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
        lookup_key = key + LOOKUP if two_uses else key
        self._rows, self._route = rows, Route(self.sink, lookup_key, tp=self.tp)
        self.weight = self.new_parameter(
            "weight",
            shape,
            InitKind.NORMAL,
            init_std=factory.init_std,
            uses=(key, lookup_key) if two_uses else (),
            shared=shared,
            **sink_module.vocabulary_part(shape, self.tp),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""
        return apply(self.lookup(), ids, parameters=(self.weight,))

    def lookup(self) -> Lookup:
        return Lookup(self.weight, self._route, self._rows)


class PositionEmbedding(SinkModule):
    """Learned positions, weight [rows, h], whole on every rank; each looks up the positions of its own tokens."""

    def __init__(self, rows: int, hidden_size: int, factory: LayerFactory) -> None:
        super().__init__(factory)
        shape, std = (rows, hidden_size), factory.init_std
        regions = sink_module.whole_region(shape, self.tp, partial=self.tp.sequence_parallel)
        self.weight = self.new_parameter("weight", shape, InitKind.NORMAL, regions, init_std=std)
        self._route = Route(self.sink, self.key("weight"))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] integer -> [s, b, h] (sequence parallel: [s/tp, b, h])."""
        return apply(self.lookup(), mappings.sequence_slice(ids, self.tp), parameters=(self.weight,))

    def lookup(self) -> Lookup:
        """Of the ids of this rank's own tokens."""
        return Lookup(self.weight, self._route, len(self.weight))
