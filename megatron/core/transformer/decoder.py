"""A decoder layer, x + attention(norm(x)), then x + mlp(norm(x)); and the layers of one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.module import ModelContext, ModelUnit
from megatron.core.tensor_parallel.random import DropoutSite, dropout
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.experts.moe_layer import MoELayer
from megatron.core.transformer.feed_forward import MLP
from megatron.core.transformer.layer_halves import (
    AsBuilt,
    IntoAttention,
    LayerHalves,
    MlpHalf,
    OutOfAttention,
)
from megatron.core.transformer.layer_table import layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.norm import Norm, norm_again
from megatron.core.transformer.recompute import computed_again, recomputed
from megatron.core.transformer.self_attention import Angles, InferenceCache, SelfAttention


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
        experts, at = layer_table(config)[layer].experts, factory.at("mlp")
        self.mlp: MLP | MoELayer
        self.first_half: FirstHalf | None = None
        if experts is None:
            self.mlp = MLP(config, at)
        else:
            self.mlp, self.first_half = MoELayer(config, context, layer, experts, at), FirstHalf(self)
        tp_rank = factory.tp.sequence_rank
        self.attention_site = DropoutSite(context, layer, "attention_output", tp_rank)
        self.mlp_site = DropoutSite(context, layer, "mlp_output", tp_rank)
        dropout, self._norms_again = config.hidden_dropout, config.recomputes("layernorm")
        self._mlp_again, self._context = experts is None and config.recomputes("mlp"), context
        norms = self._norms_again
        mlp, besides = None, (self.first_half, self.pre_mlp_layernorm, self.mlp)
        if isinstance(self.mlp, MLP) and not self._mlp_again:
            mlp = MlpHalf(self.pre_mlp_layernorm, self.mlp, self.mlp_site, dropout, norms)
        self._halves = LayerHalves(
            IntoAttention(self.input_layernorm, self.self_attention, norms),
            OutOfAttention(self.self_attention, self.attention_site, dropout),
            mlp,
        )
        self._as_built = AsBuilt(self, [part for part in besides if part is not None and mlp is None])

    def units(self, names: tuple[str, ...]) -> tuple[ModelUnit, ...]:
        """What is gathered and reduced together. names: of `unit_order.layer_units`."""
        if not isinstance(self.mlp, MoELayer):
            return (ModelUnit(names[0], (self,)),)
        assert self.first_half is not None
        parts = self.first_half, self.pre_mlp_layernorm, self.mlp.router, self.mlp.shared_experts
        entered_by = tuple(part for part in parts if part is not None)
        return ModelUnit(names[0], (self,), entered_by=entered_by), ModelUnit(names[1], (self.mlp.experts,))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Angles | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        """mask: bool [b or 1, 1, s, s], True = masked, None = causal. angles: of rotary positions."""
        if self._halves.mlp is not None and self._as_built:
            return self._halves(x, mask, angles, inference_cache, self._dropped)
        first = self.attended if self.first_half is None else self.first_half
        x = first(x, mask, angles, inference_cache)
        return self._add(x, self._normed(self.pre_mlp_layernorm, x, self._through_mlp), self.mlp_site)

    def attended(
        self, x: Tensor, mask: Tensor | None, angles: Angles | None, cache: InferenceCache | None
    ) -> Tensor:
        """x + attention(norm(x)), as `forward`."""
        if self._halves.mlp is None and self._as_built:
            return self._halves(x, mask, angles, cache, self._dropped)
        branch = self._normed(self.input_layernorm, x, lambda y: self.self_attention(y, mask, angles, cache))
        return self._add(x, branch, self.attention_site)

    def _normed(self, norm: nn.Module, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """branch(norm(x)). See layer_halves, [Note: norms again]."""
        y: Tensor = norm(x)
        compute = norm_again(y) if self._norms_again else None
        if compute is None:
            return branch(y)
        with computed_again(y, compute):
            return branch(y)

    def _through_mlp(self, y: Tensor) -> Tensor:
        if not self._mlp_again:
            out: Tensor = self.mlp(y)
            return out
        anchor = next((one for one in self.mlp.parameters() if one.requires_grad), None)
        return recomputed(self.mlp, self._context, y, anchor=anchor)

    @property
    def _dropped(self) -> float:
        return self.hidden_dropout if self.training else 0.0

    def _add(self, residual: Tensor, branch: Tensor, site: DropoutSite) -> Tensor:
        return residual + dropout(branch, self.hidden_dropout, site, self.training)


class FirstHalf(nn.Module):
    """`TransformerLayer.attended` as a module without parameters, so that an engine that gathers weights sees where a
    layer with experts begins, which are a unit of their own."""

    def __init__(self, layer: TransformerLayer) -> None:
        super().__init__()
        self._layer = (layer,)  # a tuple: the layer is no part of it

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        return self._layer[0].attended(x, *context)


class TransformerBlock(nn.Module):
    """[s, b, h] -> [s, b, h] through `layers` (global numbers). It holds the final norm, too, where the stage ends the
    model, which the model's head runs.

    [s/tp, b, h] under sequence parallel. Layers are held under their global numbers, so parameter names are the same
    on every stage. Without layers the input itself is returned.
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
        made = (TransformerLayer(config, context, i, factory.at(f"layers.{i}")) for i in layers)
        self.layers = nn.ModuleDict(dict(zip(map(str, layers), made, strict=True)))
        norm = factory.at("final_layernorm")
        self.final_layernorm = Norm(config, config.hidden_size, norm) if final_norm else None
        self.chunks = config.recompute_chunks(len(layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Angles | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        """mask: bool [b or 1, 1, s, s], True = masked, None = causal. angles: of rotary positions."""
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
        return x
