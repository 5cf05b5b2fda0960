"""The layers of one stage, with what is recomputed, and the final norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.attention import Angles
from megatron.core.transformer.inference_cache import InferenceCache
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


def recompute_chunks(config: TransformerConfig, num_layers: int) -> list[tuple[int, int, bool]]:
    """(first, end, recomputed) over a stage's layers.

    uniform: all layers, in chunks of `recompute_num_layers` of which only the inputs are kept. block: the
    first `recompute_num_layers` layers one by one, the others whole.
    """
    if config.recompute_granularity != "full":
        return [(0, num_layers, False)]
    step = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        dropped = min(step, num_layers)
        return [(i, i + 1, True) for i in range(dropped)] + [(dropped, num_layers, False)]
    return [(i, min(i + step, num_layers), True) for i in range(0, num_layers, step)]


class TransformerBlock(nn.Module):
    """[s, b, h] -> [s, b, h] through `layers` (global numbers), then the final norm where the stage ends the model.

    [s/tp, b, h] under sequence parallel. Layers are held under their global numbers, so parameter names are the same
    on every stage. Without layers and norm the input itself is returned.
    """

    def __init__(
        self,
        config: TransformerConfig,
        context: ModelContext,
        layers: Sequence[int],
        factory: LayerFactory,
        *,
        final_norm: bool,
    ) -> None:
        super().__init__()
        self.context = context
        made = {
            str(layer): TransformerLayer(config, context, layer, factory.at(f"layers.{layer}"))
            for layer in layers
        }
        self.layers = nn.ModuleDict(made)
        self.final_layernorm = None
        if final_norm:
            self.final_layernorm = Norm(config, config.hidden_size, factory.at("final_layernorm"))
        self.chunks = recompute_chunks(config, len(layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Angles | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        layers = list(self.layers.values())
        for first, end, dropped in self.chunks:

            def run(x: Tensor, part: Sequence[nn.Module] = tuple(layers[first:end])) -> Tensor:
                for layer in part:
                    x = layer(x, mask, angles, inference_cache)
                return x

            if dropped and self.training:
                anchor = next((p for p in layers[first].parameters() if p.requires_grad), None)
                x = recomputed(run, self.context, x, anchor=anchor)
            else:
                x = run(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)
