"""The experts of a layer: MLPs of which each row of the input meets one.

All experts' matrices of a projection are one parameter, [experts, out, in]. Each tensor parallel rank has f/tp of the
width of every expert, as in a dense MLP; on a grid of experts, f/etp of those of its place in `ep`. How tokens come to
them, and what comes out back, is `dispatch`'s.

[Note: weighed inside] What an expert's output counts is multiplied before its second matrix, as upstream does it: what
is added up for a token then needs no more than a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron.core.device import elements_at_a_time
from megatron.core.param_meta import InitKind
from megatron.core.protocols import Operand
from megatron.core.rectangles import Dims
from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.tensor_parallel.sink_module import (
    Band,
    LayerFactory,
    SinkModule,
    band_regions,
    even_bands,
    expert_regions,
    whole_region,
)
from megatron.core.transformer.activations import mlp_activation
from megatron.core.transformer.experts.dispatch import Begun, Dispatch, Exchanged, dispatched
from megatron.core.transformer.experts.products import products_by_expert
from megatron.core.transformer.experts.routing import Choices
from megatron.core.transformer.layer_table import ExpertSizes
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.norm import in_dtype

_T = TypeVar("_T")
_WIDENED_ELEMENTS = 1 << 16  # of a temporary in fp32 on CPU: a third of the time that all rows at once take


class ExpertLinear(SinkModule):
    """A projection of every expert: weight [experts, out, in] and maybe bias [experts, out] of the whole. cut: the dim
    of an expert's matrix that is cut over tp, of which this rank has `bands`."""

    def __init__(
        self, shape: Dims, cut: int, bands: tuple[Band, ...], factory: LayerFactory, bias: bool
    ) -> None:
        super().__init__(factory)
        ranks, count = factory.experts, shape[0]
        parts, own = (self.tp, range(count)) if ranks is None else (ranks.etp, ranks.own(count))
        self.weight = self.new_parameter(
            "weight",
            shape,
            InitKind.NORMAL,
            expert_regions(shape, band_regions(shape, bands, 1 + cut, parts), own),
            init_std=factory.residual_std if cut else factory.init_std,
            expert=True,
        )
        self.bias: nn.Parameter | None = None
        self.keys = self.key("weight"), self.key("bias")
        if bias:
            of_bias = shape[:2]
            whole = whole_region(of_bias, parts, partial=False)
            regions = whole if cut else band_regions(of_bias, bands, 1, parts)
            regions = expert_regions(of_bias, regions, own)
            self.bias = self.new_parameter("bias", of_bias, InitKind.ZEROS, regions, expert=True, decay=False)

    def put_weight(self, x: Tensor | Operand, dy: Tensor, ends: tuple[int, ...]) -> None:
        """Hand what the gradient is made of to the sink: x [rows, in], dy [rows, out]."""
        if self.weight.requires_grad:
            self.sink.put(self.keys[0], x, dy, ends)

    def put_bias(self, dy: Tensor, ends: tuple[int, ...]) -> None:
        """Where there is one: dy [rows, out]."""
        if self.bias is not None and self.bias.requires_grad:
            self.sink.put(self.keys[1], None, dy, ends)


class SentTokens(NamedTuple):
    """The tokens of a microbatch, or what they arrive in, and the same of their rows' weights: with autograd."""

    way: Dispatch
    rows: Tensor
    weights: Tensor


class Experts(nn.Module):
    """[s/tp, b, h] (without sequence parallel [s, b, h]) -> the same, each token through the experts that it has
    chosen. Communicates over tp, or where experts lie on a grid of their own over all of this rank's peers there."""

    def __init__(self, config: TransformerConfig, experts: ExpertSizes, factory: LayerFactory) -> None:
        super().__init__()
        self.name, self.tp, self.ranks = factory.name, factory.tp, factory.experts
        self.grouped = config.moe_grouped_gemm
        self.parts = factory.tp if self.ranks is None else self.ranks.etp  # who has which part of each expert
        self.again = config.recomputes("moe")  # the activation's input is not kept
        self.activation = mlp_activation(config)
        hidden, bias, count = config.hidden_size, config.add_bias_linear, experts.num_experts
        parts = 2 if config.gated_linear_unit else 1
        width = parts * experts.width
        bands = even_bands(width, self.parts, parts)
        into, out_of = factory.at("linear_fc1"), factory.at("linear_fc2")
        self.linear_fc1 = ExpertLinear((count, width, hidden), 0, bands, into, bias)
        bands = even_bands(experts.width, self.parts)
        self.linear_fc2 = ExpertLinear((count, hidden, experts.width), 1, bands, out_of, bias)

    def forward(self, x: Tensor, choices: Choices, under_way: SentTokens | None = None) -> Tensor:
        """under_way: the same tokens, as `send` has returned them."""
        if under_way is None:
            way = dispatched(choices, self.tp, self.ranks)
            under_way = SentTokens(way, x, way.weights)
        way, rows, weights = under_way
        function = _Experts(self, way, choices.even_rows, x.shape)
        return apply(function, rows, weights, parameters=self.parameters())

    def send(self, x: Tensor, choices: Choices) -> SentTokens | None:
        """Tokens on their way to experts of other ranks; None where they are gathered. Reads no weights."""
        way = dispatched(choices, self.tp, self.ranks)
        if not isinstance(way, Exchanged):
            return None
        function = _Sent(way, x.shape)
        arrived, weights = apply(function, x, way.weights)
        (begun,) = function.begun
        begun.differentiated = arrived.requires_grad
        return SentTokens(begun, arrived, weights)

    def load(self, rows: int, even_rows: int) -> str:
        """What is said of this many rows, of a microbatch of the layer's tensor parallel ranks that has even_rows."""
        if self.ranks is None:
            return f"in {self.name}, of {rows} rows"
        peers, parts = self.ranks.peers, self.tp.size if self.tp.sequence_parallel else 1
        even = even_rows * peers.size // (parts * self.ranks.ep_size)
        return f"in {self.name} of rank {peers.ranks[peers.rank]}, of {rows} rows; {even} at even load"


def _says_load(compute: Callable[..., _T]) -> Callable[..., _T]:
    """What cannot be computed, mostly for want of memory, is told with the rows that it had."""

    @functools.wraps(compute)
    def computed(self: _Experts, *inputs: Any) -> _T:
        try:
            return compute(self, *inputs)
        except (MemoryError, RuntimeError) as error:
            error.add_note(self.experts.load(self.way.ends[-1], self.even_rows))
            raise

    return computed


class _Sent:
    """A `GradFunction` of x and the weights of the rows that are sent -> what both arrive in. begun: their way, by
    which the experts' backward has begun to send gradients back."""

    def __init__(self, way: Exchanged, shape: torch.Size) -> None:
        self._way, self._shape, self.begun = way, shape, list[Begun]()

    def forward(self, x: Tensor, weights: Tensor) -> tuple[tuple[Tensor, ...], Kept]:
        begun, *arrived = self._way.start(x.flatten(0, 1), weights)
        self.begun.append(begun)
        return tuple(arrived), ()

    def backward(self, kept: Kept, _: Tensor, of_weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.begun[0].grads(of_weights, self._shape)


class _Experts(NamedTuple):
    """A `GradFunction` of x, or of what stands for it in its way, and the weights of rows. n: this rank's tokens. What
    it keeps: moe_layer, [Note: experts again]. even_rows: of the microbatch. shape: of x."""

    experts: Experts
    way: Dispatch
    even_rows: int
    shape: torch.Size

    @_says_load
    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Kept]:
        experts, way, ends = self.experts, self.way, self.way.ends
        fc1, fc2 = experts.linear_fc1, experts.linear_fc2
        rows, of_x = way.rows_and_kept(x.flatten(0, -2), fc1.sink.keeps_gathered)  # [rows, h], of [n, h]
        weights = way.row_weights(weights)  # [rows]
        wide = self._widened(rows, fc1.weight, fc1.bias)
        each = weights.unsqueeze(1)
        inner = _weigh(experts.activation.forward(wide), each)  # [rows, f/tp]
        out = self._product(inner, fc2.weight.transpose(1, 2))  # {+tp}[rows, h]
        if fc2.bias is not None and experts.parts.rank == 0:  # the sum over tp has it once
            out += in_dtype(_by_row(fc2.bias, ends) * each, out.dtype)
        sums = way.start_sums(out)()  # [n, h]
        kept = of_x, None if experts.again else wide, weights, fc1.weight, fc1.bias, fc2.weight, fc2.bias
        return sums.view(self.shape), kept

    @_says_load
    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor, Tensor]:
        of_x, wide, weights, weight1, bias1, weight2, bias2 = kept
        experts, way, ends = self.experts, self.way, self.way.ends
        fc1, fc2, activation = experts.linear_fc1, experts.linear_fc2, experts.activation
        each, made = weights.unsqueeze(1), None
        if wide is None:
            again = way.rows_again(of_x)
            made = again if isinstance(again, Tensor) else again.whole()
            wide = self._widened(made, weight1, bias1)
        d = way.rows(in_dtype(dy, weight2.dtype).flatten(0, 1))  # [rows, h]
        dinner, inner = self._product(d, weight2), activation.forward(wide)  # [rows, f/tp]
        dweights = (dinner * inner).sum(-1, dtype=weights.dtype)  # {+tp}[rows]
        if bias2 is not None:
            if experts.parts.rank == 0:
                dweights += (d * _by_row(bias2, ends)).sum(-1, dtype=weights.dtype)
            fc2.put_bias(in_dtype(d * each, d.dtype), ends)
        fc2.put_weight(_weigh(inner, each), d, ends)
        d = activation.backward(wide, _weigh(dinner, each))  # gated [rows, 2 f/tp]
        del dinner, inner
        rows = way.rows_again(of_x) if made is None or fc1.sink.deferring else made
        if weight1.requires_grad and not (isinstance(rows, Tensor) or fc1.sink.deferring):
            rows.start()
        grads = way.start_grads(self._product(d, weight1))
        fc1.put_weight(rows, d, ends)
        fc1.put_bias(d, ends)
        return grads(dweights, dy.shape)

    def _widened(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Through the first matrix: [rows, h] -> [rows, f/tp], gated [rows, 2 f/tp]."""
        wide = self._product(rows, weight.transpose(1, 2))
        if bias is not None:
            wide += _by_row(bias, self.way.ends)
        return wide

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return products_by_expert(x, weight, self.way.ends, self.experts.grouped)


def _weigh(x: Tensor, each: Tensor) -> Tensor:
    """x [rows, n] times each [rows, 1], where x is: the product in the wider dtype is rounded once. Without memory
    there is no cache to keep to, and thousands of parts would be as many calls that compute nothing."""
    dtype = torch.promote_types(x.dtype, each.dtype)
    if dtype == x.dtype or x.is_meta:
        return x.mul_(each)
    rows = max(1, elements_at_a_time(x, _WIDENED_ELEMENTS) // x.shape[1])
    for part, of_part in zip(x.split(rows), each.split(rows), strict=True):
        part.copy_(part.to(dtype).mul_(of_part))
    return x


def _by_row(bias: Tensor, ends: tuple[int, ...]) -> Tensor:
    """[experts, out] -> [rows, out]: that of each row's expert."""
    starts = zip(bias, (0, *ends), ends, strict=False)
    return torch.cat([one.expand(end - start, -1) for one, start, end in starts])
