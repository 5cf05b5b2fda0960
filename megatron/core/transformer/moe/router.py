"""The router of a layer: which experts each token meets, by one product with its hidden state.

Each rank has logits of its own tokens; under sequence parallel they are gathered, a number an expert and token, and
all that follows is computed for the whole microbatch, on every rank alike (`routing`, `balancing`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.param_meta import InitKind
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.tensor_parallel.parallel_layers import Route
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule, whole_region
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.moe import balancing, counted, routing
from megatron.core.transformer.moe.routing import Routes
from megatron.core.transformer.norm import in_dtype
from megatron.core.weight_grad import put_linear


@dataclasses.dataclass(frozen=True)
class Cast:
    """An `Operand`: a tensor in another dtype, made when it is wanted."""

    x: Tensor
    dtype: torch.dtype

    def start(self) -> None:
        """Nothing is gathered."""

    def whole(self) -> Tensor:
        return in_dtype(self.x, self.dtype)


class ReplicatedLinear(NamedTuple):
    """A `GradFunction` of x [..., in] -> [..., out]: a product in `dtype` with a matrix that every rank has whole."""

    weight: Tensor
    bias: Tensor | None
    route: Route
    dtype: torch.dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        weight, bias = in_dtype(self.weight, self.dtype), self.bias
        if bias is not None:
            bias = in_dtype(bias, self.dtype)
        return torch.nn.functional.linear(in_dtype(x, self.dtype), weight, bias), (x, self.weight)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        x, weight = kept
        put_linear(self.route, Cast(x.flatten(0, -2), self.dtype), dy, *self[:2])
        return (in_dtype(dy @ in_dtype(weight, self.dtype), x.dtype),)


class Router(SinkModule):
    """Hidden states [s/tp, b, h] -> the routes of the whole microbatch. Communicates over tp."""

    def __init__(
        self,
        config: TransformerConfig,
        context: ModelContext,
        layer: int,
        num_experts: int,
        factory: LayerFactory,
    ) -> None:
        super().__init__(factory)
        self.config, self.context, self.layer, self.num_experts = config, context, layer, num_experts
        shape, partial = (num_experts, config.hidden_size), self.tp.sequence_parallel
        regions = whole_region(shape, self.tp, partial=partial)
        self.weight = self.new_parameter("weight", shape, InitKind.NORMAL, regions, init_std=factory.init_std)
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:
            regions = whole_region(shape[:1], self.tp, partial=partial)
            self.bias = self.new_parameter("bias", shape[:1], InitKind.ZEROS, regions)
        self.losses = counted.balancing_losses(config)

    def forward(self, x: Tensor) -> Routes:
        config, batch = self.config, x.shape[1]
        logits = self._logits(x)  # [s b, experts]
        work = in_dtype(logits, torch.promote_types(logits.dtype, torch.float32))
        if self.training and config.moe_z_loss_coeff:
            work = self._with_loss(work, counted.Z_LOSS, balancing.z_loss(work), config.moe_z_loss_coeff)
        experts, weights = routing.chosen_experts(config, work, None)
        kept = routing.within_capacity(config, experts, weights, self.num_experts)
        if self.training:
            weights = self._balanced(weights, work, batch)
        if work.is_meta:
            counts = routing.balanced_counts(experts.numel(), self.num_experts)
        else:
            of_experts = routing.tokens_by_expert(experts, kept, self.num_experts)
            self._count(counted.TOKENS, of_experts)
            counts = of_experts.tolist()  # sync: how many rows each product has
        return routing.routes_of(experts, weights, kept, counts)

    def _logits(self, x: Tensor) -> Tensor:
        asked = self.config.moe_router_dtype
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[asked] if asked else x.dtype
        route = Route(self.sink, self.key("weight"), self.key("bias") if self.bias is not None else None)
        parameters = self.weight, self.bias
        own = apply(ReplicatedLinear(*parameters, route, dtype), x, parameters=parameters).flatten(0, 1)
        if self.tp.sequence_parallel:
            own = mappings.moved(own, self.tp, mappings.gathered, mappings.own_part, 0)
        return own

    def _balanced(self, weights: Tensor, logits: Tensor, batch: int) -> Tensor:
        """The weights with the losses that balance experts, of `batch` sequences."""
        for word, coefficient in self.losses.items():
            scores = balancing.probabilities(self.config, logits)
            if word == "seq_aux_loss":
                scores = scores.unflatten(0, (-1, batch)).transpose(0, 1)  # [b, s, experts]
            loss = balancing.load_balancing_loss(scores, self.config.moe_router_topk)
            weights = self._with_loss(weights, counted.BALANCING[word], loss, coefficient)
        return weights

    def _with_loss(self, x: Tensor, name: str, loss: Tensor, coefficient: float) -> Tensor:
        """See balancing, [Note: auxiliary losses]. With --calculate-per-token-loss the step is divided by tokens, of
        which this loss counts for all of the microbatch's."""
        self._count(name, loss.detach())
        tokens = len(x) if self.config.calculate_per_token_loss else 1
        return balancing.with_loss(x, loss, coefficient * tokens * self.context.loss_scale)

    def _count(self, name: str, numbers: Tensor) -> None:
        if self.training:
            self.context.counts.add(self.layer, name, numbers)
