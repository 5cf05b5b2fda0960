"""The MLP of a layer (arXiv 1706.03762, 3.3)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.tensor_parallel.parallel_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.sink_module import LayerFactory, even_bands
from megatron.core.transformer.activations import mlp_activation
from megatron.core.transformer.model_config import TransformerConfig


class MLP(nn.Module):
    """[s, b, h] -> [s, b, h] through width f; `linear_fc1` holds gate then up rows where the activation is gated.

    Each tensor parallel rank has f/tp of the width: of gate and up alike. Communicates over tp.
    """

    def __init__(self, config: TransformerConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.activation = mlp_activation(config)
        hidden, bias, at = config.hidden_size, config.add_bias_linear, factory.at
        parts = 2 if config.gated_linear_unit else 1
        width = parts * config.ffn_hidden_size
        bands = even_bands(width, factory.tp, parts)
        self.linear_fc1 = ColumnParallelLinear(hidden, width, at("linear_fc1"), bias=bias, bands=bands)
        self.linear_fc2 = RowParallelLinear(config.ffn_hidden_size, hidden, at("linear_fc2"), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.linear_fc1(x), activation=self.activation)
