"""Rotary position embedding: angles, and a rotation that keeps no activation.

Sources: RoFormer (arXiv 2104.09864); position interpolation (arXiv 2306.15595); the frequency scaling of Llama 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.model_config import TransformerConfig

# Llama 3.1's scaling: wavelengths beyond the original context are stretched, short ones kept, between them blended.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT_TOKENS = 8192


def inverse_frequencies(config: TransformerConfig) -> Tensor:
    """Angle per position of each rotated pair, fp32 [rotated dims / 2]."""
    dims = int(config.kv_channels * config.rotary_percent)
    powers = torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims
    frequencies = 1.0 / (config.rotary_base**powers)
    if not config.use_rope_scaling:
        return frequencies
    wavelengths = 2.0 * math.pi / frequencies
    periods = ORIGINAL_CONTEXT_TOKENS / wavelengths  # of each wave in the original context
    keep = ((periods - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / config.rope_scaling_factor * (1.0 - keep)


class RotaryEmbedding:
    """Tables of cos and sin for positions 0.., grown on demand, one copy per device and dtype.

    The position is the index in the sequence, as in Megatron: rotations only matter by difference, so
    documents whose position ids restart need nothing here but the attention mask.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.frequencies = inverse_frequencies(config)
        self.interpolation = config.rotary_seq_len_interpolation_factor or 1
        self.interleaved = config.rotary_interleaved
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, like: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 .. length, each [length, 1, 1, rotated dims / 2]; fp32, or fp64. positions [b, s],
        all below length: of these instead, [s, b, 1, rotated dims / 2]."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        table = self._tables.get((like.device, dtype))
        if table is None or table[0].shape[0] < length:
            all_positions = torch.arange(length, dtype=torch.float32, device="cpu") / self.interpolation
            angles = torch.outer(all_positions, self.frequencies)[:, None, None, :]
            table = (angles.cos().to(like.device, dtype), angles.sin().to(like.device, dtype))
            self._tables[(like.device, dtype)] = table
        cos, sin = table
        if positions is None:
            return cos[:length], sin[:length]
        return cos[positions.t(), 0], sin[positions.t(), 0]


def _rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """t with its first 2 n dims rotated, n = cos.shape[-1]; the rest copied."""
    half = cos.shape[-1]
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    firsts, seconds = slice(half), slice(half, 2 * half)
    if interleaved:
        firsts, seconds = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = t[..., firsts], t[..., seconds]
    out[..., firsts] = (a * cos).sub_(b * sin)
    out[..., seconds] = (b * cos).add_(a * sin)
    if t.shape[-1] > 2 * half:
        out[..., 2 * half :] = t[..., 2 * half :]
    return out


class _Rope(torch.autograd.Function):
    """A rotation is linear: its backward is the rotation back, and needs only the angles."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(t, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin.neg(), ctx.interleaved), None, None, None


def apply_rope(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates heads t [s, b, heads, d] by the angles of positions s; products in fp32, result in t's dtype."""
    return _Rope.apply(t, cos, sin, interleaved)
