"""The loss of a microbatch, in Megatron's three parts."""

from __future__ import annotations

from torch import Tensor


def gpt_loss(
    loss_mask: Tensor, per_token_losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """(summed loss, counted tokens, {"lm loss": (the same two, for the log)}).

    loss_mask and per_token_losses [b, s]. The caller divides: by this microbatch's tokens, or with
    `--calculate-per-token-loss` by all tokens of the step. Only the first element carries a gradient.
    """
    mask = loss_mask.to(per_token_losses.dtype)
    loss_sum = (per_token_losses * mask).sum()
    num_tokens = mask.sum()
    return loss_sum, num_tokens, {"lm loss": (loss_sum.detach(), num_tokens)}
