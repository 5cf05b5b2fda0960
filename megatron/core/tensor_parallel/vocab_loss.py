"""Cross entropy per token, in the memory of the logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.tensor_parallel.mappings import ALONE, TensorParallel
from megatron.core.tensor_parallel.parallel_layers import local_ids
from megatron.core.tensor_parallel.sink_module import vocabulary_band
from megatron.core.transport.collectives import all_reduce


class CrossEntropy(NamedTuple):
    """A `GradFunction` of logits and labels.

    One buffer of [tokens, v/tp] holds logits, then probabilities, then the gradient.
    """

    vocab_size: int
    tp: TensorParallel
    dtype: torch.dtype  # of the logits

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Kept]:
        vocab_size, tp = self.vocab_size, self.tp
        held: Kept = ()
        # The logits of a lower precision are copied; those of the working precision are consumed.
        probabilities = logits.detach()
        if logits.itemsize < torch.float32.itemsize:
            probabilities = probabilities.float()
        labels = labels.unsqueeze(-1)
        if tp.size == 1:
            label_logit = probabilities.gather(-1, labels)
            highest = probabilities.amax(-1, keepdim=True)
            torch.softmax(probabilities, -1, out=probabilities)
            # The most likely id has probability 1 / sum(exp(logit - highest)): no second pass is needed for the sum.
            loss = highest.sub_(probabilities.amax(-1, keepdim=True).log_())
        else:  # the highest logit, then sum and label's logit, go over tp
            labels, outside = local_ids(labels, vocab_size, tp)
            probabilities[..., vocabulary_band(vocab_size, tp).size :] = -math.inf  # of no id
            highest = probabilities.amax(-1, keepdim=True)
            all_reduce(highest, tp.peers, "max")
            label_logit = probabilities.gather(-1, labels).masked_fill_(outside, 0.0)
            probabilities.sub_(highest).exp_()
            sums = torch.stack((probabilities.sum(-1, keepdim=True), label_logit))
            all_reduce(sums, tp.peers)
            exp_sum, label_logit = sums
            probabilities.div_(exp_sum)
            loss = exp_sum.log().add_(highest)
            held = (~outside,)
        return loss.sub_(label_logit).squeeze(-1), (probabilities, labels, *held)

    def backward(self, kept: Kept, dloss: Tensor) -> tuple[Tensor, None]:
        gradient, labels, *held = kept
        if held:
            gradient.scatter_add_(-1, labels, held[0].to(gradient.dtype).neg_())
        else:
            gradient.scatter_(-1, labels, -1.0, reduce="add")
        gradient.mul_(dloss.unsqueeze(-1))
        if gradient.dtype == self.dtype:
            return gradient, None
        narrow = gradient.to(self.dtype)
        gradient.untyped_storage().resize_(0)  # autograd holds it until whoever called this is through
        return narrow, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: TensorParallel = ALONE, vocab_size: int | None = None
) -> Tensor:
    """Negative log likelihood of each token, in fp32 (fp64 for fp64 logits), the same on every tp rank.

    logits [..., v/tp] are consumed: fp32 and fp64 logits are overwritten with the softmax, and in the backward
    pass with their gradient. labels [...] int64 over the whole vocabulary -> losses [...]. vocab_size: ids of all
    ranks; what the last has behind them (`vocabulary_part`) counts as none. Communicates over tp.
    """
    function = CrossEntropy(vocab_size or logits.shape[-1] * tp.size, tp, logits.dtype)
    return apply(function, logits, labels)
