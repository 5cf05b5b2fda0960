"""The router of a layer: which experts each token meets, by one product with its hidden state.

Each rank has logits of its own tokens; under sequence parallel they are gathered, a number an expert and token, and
all that follows is computed for the whole microbatch, on every rank alike (`routing`, `balancing`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.device import new_generator
from megatron.core.module import ModelContext
from megatron.core.param_meta import InitKind
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.tensor_parallel.parallel_layers import Route
from megatron.core.tensor_parallel.random import DropoutSite
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule, whole_region
from megatron.core.transformer.experts import balancing, counted, routing
from megatron.core.transformer.experts.routing import Choices
from megatron.core.transformer.model_config import TransformerConfig
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
        of_x = Cast(x.detach().flatten(0, -2), self.dtype)  # what waits for W keeps nothing of the graph
        put_linear(self.route, of_x, dy, *self[:2])
        return (in_dtype(dy @ in_dtype(weight, self.dtype), x.dtype),)


class _Replaced(NamedTuple):
    """A `GradFunction` of x, whose gradient is that of what takes its place."""

    other: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        return self.other, ()

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        return (dy,)


class Router(SinkModule):
    """Hidden states [s/tp, b, h] -> the choices of the whole microbatch. Communicates over tp."""

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
        self.expert_bias: Tensor | None
        bias = None
        if config.moe_router_enable_expert_bias:
            bias = torch.zeros(num_experts, dtype=torch.float32, device=factory.device)
        self.register_buffer("expert_bias", bias)
        self.losses = counted.balancing_losses(config)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As of every module; the bias stays fp32, whatever the weights become."""
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()
        return self

    def forward(self, x: Tensor) -> Choices:
        config, batch = self.config, x.shape[1]
        logits = self._logits(self._jittered(x))  # [s b, experts]
        if config.moe_router_force_load_balancing:
            generator = self._generator("forced_balance", logits)
            logits = apply(_Replaced(torch.empty_like(logits).normal_(generator=generator)), logits)
        work = in_dtype(logits, torch.promote_types(logits.dtype, torch.float32))
        if self.training and config.moe_z_loss_coeff:
            work = self._with_loss(work, counted.Z_LOSS, balancing.z_loss(work), config.moe_z_loss_coeff)
        if "sinkhorn" in config.moe_router_load_balancing_type:
            experts, weights = routing.by_sinkhorn(config, work, self.training)
        else:
            experts, weights = routing.chosen_experts(config, work, self.expert_bias)
        kept = routing.within_capacity(config, experts, weights, self.num_experts)
        if self.training:
            weights = self._balanced(weights, work, batch)
        of_experts = routing.tokens_by_expert(experts, kept, self.num_experts)
        if not work.is_meta:
            self._count(counted.TOKENS, of_experts)
            if kept is not None:
                self._count(counted.DROPPED, routing.tokens_by_expert(experts, ~kept, self.num_experts))
        room = self.num_experts * routing.capacity_of(config, len(work), self.num_experts)
        return Choices(experts, weights, kept, of_experts, min(experts.numel(), room))

    def _jittered(self, x: Tensor) -> Tensor:
        """x times numbers near 1, which follow from a token's place in the microbatch."""
        eps = self.config.moe_input_jitter_eps
        if eps is None or not self.training:
            return x
        parts = self.tp.size if self.tp.sequence_parallel else 1
        noise = x.new_empty(parts * x.shape[0], *x.shape[1:])
        noise.uniform_(1.0 - eps, 1.0 + eps, generator=self._generator("jitter", x))
        return x * mappings.sequence_slice(noise, self.tp)

    def _generator(self, site: str, like: Tensor) -> torch.Generator | None:
        """The same on all tensor parallel ranks."""
        return new_generator(like.device, DropoutSite(self.context, self.layer, site).seed())

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
        k, context = self.config.moe_router_topk, self.context
        for word, coefficient in self.losses.items():
            scores = balancing.probabilities(self.config, logits)
            if word == "seq_aux_loss":
                scores = scores.unflatten(0, (-1, batch)).transpose(0, 1)  # [b, s, experts]
            chosen_by = balancing.tokens_that_choose(scores, k)
            if word == "global_aux_loss":
                mean = context.counts.running_mean(self.layer, context.microbatch, chosen_by)
                chosen_by = in_dtype(mean, scores.dtype)
            loss = balancing.load_balancing_loss(scores, k, chosen_by)
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
