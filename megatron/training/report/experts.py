"""What is said of experts: the losses that balance them, how busy they are, what was dropped. Pure: no torch.

Tags are Megatron's for losses (`load_balancing_loss`, `moe/load_balancing_loss_layer_3`), ours for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.transformer.experts.counted import DROPPED, TOKENS
from megatron.core.transformer.layer_table import expert_layers
from megatron.core.transformer.model_config import TransformerConfig
from megatron.training.report.metrics import IntervalTotals

LOAD, SHARE_DROPPED = "moe/max-over-mean-load", "moe/share-dropped"
Layers = Mapping[tuple[int, str], Sequence[float]]  # (layer, name) -> what it counted in a step


def balancing_means(layers: Layers, num_microbatches: int) -> dict[str, tuple[float, float]]:
    """Of each loss before its coefficient, over layers: (sum, number of values that it is of). num_microbatches: of all
    data parallel ranks."""
    pairs: dict[str, tuple[float, float]] = {}
    for (_, name), values in layers.items():
        if name not in (TOKENS, DROPPED):
            total, count = pairs.get(name, (0.0, 0.0))
            pairs[name] = total + sum(values), count + num_microbatches
    return pairs


class ExpertTotals:
    """Sums between two records."""

    def __init__(self, config: TransformerConfig, *, by_layer: bool) -> None:
        self._layers = expert_layers(config)
        self._by_layer = by_layer
        self.reset()

    def reset(self) -> None:
        """Start the next interval."""
        self._losses = IntervalTotals()
        self._counts: dict[tuple[int, str], list[float]] = {}

    def add_iteration(self, layers: Layers, num_microbatches: int, *, skipped: bool) -> None:
        """Count one iteration. A step that was skipped has routed its tokens all the same."""
        of_losses = {}
        for (layer, name), values in layers.items():
            if name in (TOKENS, DROPPED):
                sums = self._counts.get((layer, name), [0.0] * len(values))
                self._counts[layer, name] = [a + b for a, b in zip(sums, values, strict=True)]
            else:
                of_losses[f"moe/{name}_layer_{layer}"] = sum(values), num_microbatches
        self._losses.add_iteration(of_losses, skipped=skipped)

    def tokens(self) -> dict[int, list[int]]:
        """By layer: tokens that each expert has computed."""
        return {
            layer: [round(one) for one in self._counts[layer, TOKENS]]
            for layer in self._layers
            if (layer, TOKENS) in self._counts
        }

    def scalars(self) -> dict[str, float]:
        """By tag; of layers the mean over them, and with `by_layer` each."""
        loads, shares = {}, {}
        for layer in self.tokens():
            computed = self._counts[layer, TOKENS]
            dropped = self._counts.get((layer, DROPPED), [0.0] * len(computed))
            wanted = [a + b for a, b in zip(computed, dropped, strict=True)]
            if any(wanted):
                loads[layer] = max(wanted) * len(wanted) / sum(wanted)
                shares[layer] = sum(dropped) / sum(wanted)
        if not any(name == DROPPED for _, name in self._counts):
            shares = {}
        named = {LOAD: loads, SHARE_DROPPED: shares}
        scalars = {tag: sum(each.values()) / len(each) for tag, each in named.items() if each}
        if self._by_layer:
            scalars |= self._losses.losses()
            scalars |= {
                f"{tag}_layer_{layer}": value for tag, each in named.items() for layer, value in each.items()
            }
        return scalars
