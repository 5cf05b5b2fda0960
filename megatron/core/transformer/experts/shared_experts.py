"""The experts that every token meets, together one MLP (arXiv 2401.06066), and how much they count (Qwen2)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.param_meta import InitKind
from megatron.core.tensor_parallel.functions import apply
from megatron.core.tensor_parallel.parallel_layers import ColumnParallelLinear, Route, RowParallelLinear
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule, even_bands, whole_region
from megatron.core.transformer.activations import mlp_activation
from megatron.core.transformer.experts.router import ReplicatedLinear
from megatron.core.transformer.model_config import TransformerConfig


class SharedExperts(SinkModule):
    """[s/tp, b, h] -> [s/tp, b, h] through width `width`, of all of them; with `--moe-shared-expert-gate` times
    sigmoid(x gate). Communicates over tp."""

    def __init__(self, config: TransformerConfig, width: int, factory: LayerFactory) -> None:
        super().__init__(factory)
        self.activation, hidden, bias = mlp_activation(config), config.hidden_size, config.add_bias_linear
        parts = 2 if config.gated_linear_unit else 1
        bands = even_bands(parts * width, factory.tp, parts)
        into, out_of = factory.at("linear_fc1"), factory.at("linear_fc2")
        self.linear_fc1 = ColumnParallelLinear(hidden, parts * width, into, bias=bias, bands=bands)
        self.linear_fc2 = RowParallelLinear(width, hidden, out_of, bias=bias)
        self.gate_weight: nn.Parameter | None = None
        if config.moe_shared_expert_gate:
            shape = (1, hidden)
            regions = whole_region(shape, self.tp, partial=self.tp.sequence_parallel)
            std = factory.init_std
            self.gate_weight = self.new_parameter(
                "gate_weight", shape, InitKind.NORMAL, regions, init_std=std
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_weight is None:
            return self.linear_fc2(self.linear_fc1(x), activation=self.activation)
        x = x.view_as(
            x
        )  # gradients of its two uses are added here, before the layer's others: also when recomputed
        y = self.linear_fc2(self.linear_fc1(x), activation=self.activation)
        route = Route(self.sink, self.key("gate_weight"))
        gate = ReplicatedLinear(self.gate_weight, None, route, x.dtype)
        return y * apply(gate, x, parameters=(self.gate_weight,)).sigmoid()
