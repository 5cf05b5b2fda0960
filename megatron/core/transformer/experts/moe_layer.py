"""Experts in place of a layer's MLP (arXiv 1701.06538, 2101.03961)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.experts.experts import Experts
from megatron.core.transformer.experts.router import Router
from megatron.core.transformer.experts.routing import Choices
from megatron.core.transformer.experts.shared_experts import SharedExperts
from megatron.core.transformer.layer_table import ExpertSizes
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.recompute import recomputed


class MoELayer(nn.Module):
    """[s/tp, b, h] -> [s/tp, b, h] through the experts that the router chooses. `layer` is the global number.
    Communicates over tp.

    The experts run last, and first in the backward: their weights, most of a layer's, are gathered for them alone.

    [Note: experts again] With `--recompute-modules moe` router, shared experts and experts keep their input alone. Each
    is computed again by itself, where its backward begins, and of the experts what their activation is given: so that
    other weights are not gathered beside theirs, and no second matrix is multiplied with twice.

    [Note: shared experts beside the exchange] With `--moe-shared-expert-overlap` tokens are sent before the shared
    experts are computed, and waited for by the experts; in the backward the experts send gradients back, which are
    waited for behind the shared experts'. What is added up for a token is the same; its gradients come from the shared
    experts first, then from the experts and the router.
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
        self.context, self.again = context, config.recomputes("moe")
        self.shared_again = self.again or config.recomputes("shared_experts")
        self.router = Router(config, context, layer, experts.num_experts, factory.at("router"))
        self.shared_experts: SharedExperts | None = None
        if experts.shared_width:
            shared = factory.at("shared_experts")
            self.shared_experts = SharedExperts(config, experts.shared_width, shared)
        self.experts = Experts(config, experts, factory.at("experts"))
        exchanges = factory.experts is not None and not factory.experts.gathers
        self.overlaps = config.moe_shared_expert_overlap and bool(experts.shared_width) and exchanges

    def forward(self, x: Tensor) -> Tensor:
        if self.overlaps:
            choices = self._choices(x)
            under_way, shared = self.experts.send(x, choices), self._shared(x)
            routed = self.experts(x, choices, under_way)
        else:
            shared = self._shared(x)
            routed = self.experts(x, self._choices(x))
        return routed if shared is None else routed + shared

    def _shared(self, x: Tensor) -> Tensor | None:
        if self.shared_experts is None or not self.shared_again:
            return None if self.shared_experts is None else self.shared_experts(x)
        return recomputed(self.shared_experts, self.context, x, anchor=_trained(self.shared_experts))

    def _choices(self, x: Tensor) -> Choices:
        """Those of the router, whose weights alone are differentiated; these may be computed again."""
        if not self.again:
            plain: Choices = self.router(x)
            return plain
        first: list[Choices] = []

        def weights(x: Tensor) -> Tensor:
            choices: Choices = self.router(x)
            if not first:
                first.append(choices)
            return choices.weights

        found = recomputed(weights, self.context, x, anchor=_trained(self.router))
        return first[0]._replace(weights=found)


def _trained(module: nn.Module) -> nn.Parameter | None:
    """The first of its parameters that needs a gradient."""
    return next((one for one in module.parameters() if one.requires_grad), None)
