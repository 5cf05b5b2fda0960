"""One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.random import DropoutSite, dropout
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.attention import Angles, SelfAttention
from megatron.core.transformer.inference_cache import InferenceCache
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerLayer(nn.Module):
    """[s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]); `layer` is the global number, from 0."""

    def __init__(
        self, config: TransformerConfig, context: ModelContext, layer: int, factory: LayerFactory
    ) -> None:
        super().__init__()
        self.hidden_dropout, size = config.hidden_dropout, config.hidden_size
        self.input_layernorm = Norm(config, size, factory.at("input_layernorm"))
        self.self_attention = SelfAttention(config, context, layer, factory.at("self_attention"))
        self.pre_mlp_layernorm = Norm(config, size, factory.at("pre_mlp_layernorm"))
        self.mlp = MLP(config, factory.at("mlp"))
        tp_rank = factory.tp.sequence_rank
        self.attention_site = DropoutSite(context, layer, "attention_output", tp_rank)
        self.mlp_site = DropoutSite(context, layer, "mlp_output", tp_rank)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Angles | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        attended = self.self_attention(self.input_layernorm(x), mask, angles, inference_cache)
        x = self._add(x, attended, self.attention_site)
        return self._add(x, self.mlp(self.pre_mlp_layernorm(x)), self.mlp_site)

    def _add(self, residual: Tensor, branch: Tensor, site: DropoutSite) -> Tensor:
        return residual + dropout(branch, self.hidden_dropout, site, self.training)
