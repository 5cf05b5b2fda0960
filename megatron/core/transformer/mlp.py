"""The MLP of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.shards import even_bands
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.activations import mlp_activation
from megatron.core.transformer.transformer_config import TransformerConfig


class MLP(nn.Module):
    """[s, b, h] -> [s, b, h] through width f; `linear_fc1` holds gate then up rows where the activation is gated.

    Each tensor parallel rank has f/tp of the width: of gate and up alike. Communicates over tp.
    """

    def __init__(self, config: TransformerConfig, *, name: str, factory: LayerFactory) -> None:
        super().__init__()
        self.activation = mlp_activation(config)
        width = config.ffn_hidden_size
        parts = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            parts * width,
            name=f"{name}.linear_fc1",
            factory=factory,
            init_std=factory.init_std,
            bias=config.add_bias_linear,
            bands=even_bands(parts * width, factory.tp, parts),
        )
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            name=f"{name}.linear_fc2",
            factory=factory,
            init_std=factory.residual_std,
            bias=config.add_bias_linear,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.linear_fc1(x), activation=self.activation)
