"""Attention by torch's fused kernels; on tensors without memory by that of the device which they stand for.

torch takes the unfused way for tensors of its meta device, which keeps the scores: ten times what a layer of Llama 70B
keeps. So there the kernel is asked for by name, by the rules that torch chooses one by.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.device import kind_of

_HALF = (torch.bfloat16, torch.float16)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """q [b, heads, s, d], k and v [b, groups, s_all, d] -> [b, heads, s, d]. allowed: bool, True = may be seen; None =
    causal. dropout: the probability, drawn from the device's default generator."""
    causal, grouped = allowed is None, q.shape[1] != k.shape[1]
    if q.is_meta and (out := _by_name(q, k, v, allowed, dropout, scale)) is not None:
        return out
    return F.scaled_dot_product_attention(q, k, v, allowed, dropout, causal, scale=scale, enable_gqa=grouped)


def _by_name(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, dropout: float, scale: float
) -> Tensor | None:
    """None where the device, too, writes the scores out."""
    aten, causal = torch.ops.aten, allowed is None
    bias = None
    if allowed is not None:
        bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(allowed.logical_not(), -math.inf)
    out: Tensor
    if kind_of(q.device) == "cpu":
        if dropout:
            return None
        out, *_ = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif causal and q.dtype in _HALF:
        out, *_ = aten._scaled_dot_product_flash_attention(q, k, v, dropout, True, scale=scale)
    elif q.shape[1] == k.shape[1] and q.dtype is not torch.float64:
        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
        out, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, torch.is_grad_enabled(), dropout, causal, scale=scale
        )
    else:
        return None
    return out
