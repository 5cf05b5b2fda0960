"""Losses that keep experts equally busy, and logits small: each of one microbatch, of all its tokens.

[Note: auxiliary losses] A loss here is added to the step's loss as the mean over microbatches and data parallel ranks,
whatever tensor or pipeline parallelism there is. It has no part in the loss that is reported: its gradient enters where
the router's weights (or logits) are differentiated, with the factor that the reported loss has there (`ModelContext.
loss_scale`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.transformer.experts.routing import largest
from megatron.core.transformer.model_config import TransformerConfig


def probabilities(config: TransformerConfig, logits: Tensor) -> Tensor:
    """[tokens, experts] of which each token's add up to 1."""
    if config.moe_router_score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def tokens_that_choose(scores: Tensor, k: int) -> Tensor:
    """[..., E] of scores [..., T, E]: whose k largest scores an expert is among."""
    choices = torch.zeros_like(scores, requires_grad=False).scatter_(-1, largest(scores.detach(), k), 1.0)
    return choices.sum(-2)


def load_balancing_loss(scores: Tensor, k: int, chosen_by: Tensor) -> Tensor:
    """E / (k T^2) sum over experts of (sum over tokens of its scores) x (tokens that choose it): 1 in perfect balance.
    scores [..., T, E]; the mean over leading dims. chosen_by: `tokens_that_choose`, or a mean of it over microbatches.
    Source: arXiv 2101.03961, 2.2."""
    tokens, experts = scores.shape[-2:]
    products = scores.sum(-2) * chosen_by
    return products.sum(-1).mean() * (experts / (k * tokens**2))


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2 (arXiv 2202.08906)."""
    return logits.logsumexp(-1).square().mean()


class _Added(NamedTuple):
    """A `GradFunction` of x and a loss."""

    factor: float

    def forward(self, x: Tensor, loss: Tensor) -> tuple[Tensor, Kept]:
        return x, (loss,)

    def backward(self, kept: Kept, dx: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = kept
        return dx, torch.full_like(loss, self.factor)


def with_loss(x: Tensor, loss: Tensor, factor: float) -> Tensor:
    """x itself; differentiated, factor * loss is too."""
    return apply(_Added(factor), x, loss)
