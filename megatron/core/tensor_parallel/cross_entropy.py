"""Cross entropy per token, in the memory of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _CrossEntropy(torch.autograd.Function):
    """One buffer of [tokens, v] holds logits, then probabilities, then the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        work_dtype = torch.promote_types(logits.dtype, torch.float32)
        # The logits of a lower precision are copied; those of the working precision are consumed.
        probabilities = logits.detach().to(work_dtype)
        labels = labels.unsqueeze(-1)
        label_logit = probabilities.gather(-1, labels)
        highest = probabilities.amax(-1, keepdim=True)
        torch.softmax(probabilities, -1, out=probabilities)
        # The most likely id has probability 1 / sum(exp(logit - highest)), so no second pass is needed for
        # the sum.
        log_sum = -probabilities.amax(-1, keepdim=True).log()
        ctx.save_for_backward(probabilities, labels)
        ctx.logits_dtype = logits.dtype
        return (log_sum + highest - label_logit).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient, labels = ctx.saved_tensors
        gradient.scatter_add_(-1, labels, gradient.new_full((1,), -1.0).expand(labels.shape))
        gradient.mul_(grads[0].unsqueeze(-1))
        return gradient.to(ctx.logits_dtype), None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log likelihood of each token, in fp32 (fp64 for fp64 logits).

    logits [..., v] are consumed: fp32 and fp64 logits are overwritten with the softmax, and in the backward
    pass with their gradient. labels [...] int64 -> losses [...].
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels)
    return losses
