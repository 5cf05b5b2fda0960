"""Losses that balance experts, in closed form."""

import numpy as np
import torch

from megatron.core.transformer.experts.balancing import load_balancing_loss, tokens_that_choose, z_loss

EXPERTS, K = 4, 2


def loss_of(scores):
    return load_balancing_loss(scores, K, tokens_that_choose(scores, K))


def test_perfect_balance_is_one():
    token = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    scores = torch.stack([token.roll(shift) for shift in range(EXPERTS)] * 3)
    assert tokens_that_choose(scores, K).tolist() == [3 * K] * EXPERTS
    assert abs(loss_of(scores).item() - 1.0) < 1e-15


def test_all_tokens_to_the_same_experts():
    """The lowest of equal ones: E / (k T^2) x T x T x the scores of these."""
    scores = torch.full((6, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    assert tokens_that_choose(scores, K).tolist() == [6, 6, 0, 0]
    assert loss_of(scores).item() == 1.0
    certain = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 6, dtype=torch.float64)
    assert loss_of(certain).item() == EXPERTS / K


def test_closed_form_and_z_loss():
    logits = np.random.default_rng(3).normal(size=(10, EXPERTS))
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = np.zeros_like(scores)
    np.put_along_axis(chosen, np.argsort(-scores, 1)[:, :K], 1.0, 1)
    expected = EXPERTS / (K * 100) * (scores.sum(0) * chosen.sum(0)).sum()
    assert abs(loss_of(torch.tensor(scores)).item() - expected) < 1e-12
    assert abs(z_loss(torch.tensor(logits)).item() - (np.log(np.exp(logits).sum(1)) ** 2).mean()) < 1e-12
