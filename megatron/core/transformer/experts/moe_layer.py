"""Experts in place of a layer's MLP (arXiv 1701.06538, 2101.03961)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.experts.experts import Experts
from megatron.core.transformer.experts.router import Router
from megatron.core.transformer.experts.shared_experts import SharedExperts
from megatron.core.transformer.layer_table import ExpertSizes
from megatron.core.transformer.model_config import TransformerConfig


class MoELayer(nn.Module):
    """[s/tp, b, h] -> [s/tp, b, h] through the experts that the router chooses. `layer` is the global number.
    Communicates over tp.

    The experts run last, and first in the backward: their weights, most of a layer's, are gathered for them alone.
    """

    def __init__(
        self,
        config: TransformerConfig,
        context: ModelContext,
        layer: int,
        experts: ExpertSizes,
        factory: LayerFactory,
    ) -> None:
        super().__init__()
        self.router = Router(config, context, layer, experts.num_experts, factory.at("router"))
        self.shared_experts: SharedExperts | None = None
        if experts.shared_width:
            shared = factory.at("shared_experts")
            self.shared_experts = SharedExperts(config, experts.shared_width, shared)
        self.experts = Experts(config, experts, factory.at("experts"))

    def forward(self, x: Tensor) -> Tensor:
        shared = None if self.shared_experts is None else self.shared_experts(x)
        routed = self.experts(x, self.router(x))
        return routed if shared is None else routed + shared
