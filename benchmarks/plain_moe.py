"""A model with experts in plain PyTorch, as a loop of one's own has it: RMSNorm, rotary positions, SwiGLU experts
behind a softmax over the chosen, torch's grouped product; all else is autograd's. Weights have our names and shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class PlainAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.linear_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, spin: tuple[Tensor, Tensor]) -> Tensor:
        b, s, h = x.shape
        qkv = self.linear_qkv(x).view(b, s, self.heads, 3, -1).transpose(1, 2)
        q, k, v = qkv.unbind(3)
        y = F.scaled_dot_product_attention(turned(q, spin), turned(k, spin), v, is_causal=True)
        return self.linear_proj(y.transpose(1, 2).reshape(b, s, h))


def turned(x: Tensor, spin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions. x [b, heads, s, d]."""
    cos, sin = (one.to(x.dtype) for one in spin)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def angles(seq: int, dims: int) -> tuple[Tensor, Tensor]:
    """cos, sin [s, d]."""
    frequencies = 10000.0 ** -(torch.arange(0, dims, 2) / dims)
    each = torch.outer(torch.arange(seq), frequencies)
    both = torch.cat((each, each), -1)
    return both.cos(), both.sin()


class Matrices(nn.Module):
    """One of each expert."""

    def __init__(self, experts: int, out: int, into: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, into))

    def forward(self, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        return F.grouped_mm(x.to(dtype), self.weight.to(dtype).transpose(1, 2), offs=ends)


class PlainMoe(nn.Module):
    def __init__(self, hidden: int, experts: int, width: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleDict(
            {
                "linear_fc1": Matrices(experts, 2 * width, hidden),
                "linear_fc2": Matrices(experts, hidden, width),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        best = logits.float().topk(self.topk, -1)
        order = best.indices.flatten().argsort(stable=True)
        counts = best.indices.flatten().bincount(minlength=len(self.router.weight))
        ends, of_token, dtype = counts.cumsum(0, dtype=torch.int32), order // self.topk, logits.dtype
        wide = self.experts["linear_fc1"](tokens.index_select(0, of_token), ends, dtype)
        gate, up = wide.chunk(2, -1)
        weights = best.values.softmax(-1).flatten().index_select(0, order).to(dtype)
        inner = F.silu(gate) * up * weights.unsqueeze(1)
        rows = self.experts["linear_fc2"](inner, ends, dtype)
        return torch.zeros_like(tokens, dtype=dtype).index_add_(0, of_token, rows).view(x.shape)


class PlainMoeLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, experts: int, width: int, topk: int) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = (nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.self_attention = PlainAttention(hidden, heads)
        self.mlp = PlainMoe(hidden, experts, width, topk)

    def forward(self, x: Tensor, spin: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), spin)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class PlainMoeGPT(nn.Module):
    """(tokens, labels) [b, s] -> (logits, mean loss)."""

    def __init__(self, shape: dict[str, int], *, experts: int, width: int, topk: int) -> None:
        super().__init__()
        hidden, heads, vocab = shape["hidden"], shape["heads"], shape["vocab"]
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, hidden)})
        layers = (PlainMoeLayer(hidden, heads, experts, width, topk) for _ in range(shape["layers"]))
        self.decoder = nn.ModuleDict(
            {"layers": nn.ModuleList(layers), "final_layernorm": nn.RMSNorm(hidden, eps=1e-5)}
        )
        self.output_layer = nn.Linear(hidden, vocab, bias=False)
        self.spin = angles(shape["seq"], hidden // heads)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding["word_embeddings"](tokens)
        for layer in self.decoder["layers"]:
            x = layer(x, self.spin)
        logits = self.output_layer(self.decoder["final_layernorm"](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())
