"""The oracle: a GPT in plain PyTorch, batch first, autograd everywhere, nothing fused. Imports nothing of ours.

Parameters carry the names of the real model, so one state_dict fits both.
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.harness.reference_moe import ReferenceExperts, ReferenceMoe


@dataclass
class ReferenceConfig:
    num_layers: int = 2
    hidden: int = 32
    heads: int = 4
    groups: int = 4
    head_dim: int = 8
    ffn: int = 64
    vocab: int = 64
    max_positions: int = 32
    positions: str = "learned_absolute"  # rope, none
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_interpolation: float = 1.0
    llama31_factor: float | None = None
    norm: str = "LayerNorm"  # RMSNorm
    norm_1p: bool = False
    eps: float = 1e-5
    qk_norm: bool = False
    activation: str = "gelu"  # gelu_tanh, squared_relu, or one of GATES
    bias: bool = True
    qkv_bias: bool = False
    attention_output_bias: bool = False
    embedding_factor: float = 1.0
    tied: bool = True
    experts: ReferenceExperts | None = None


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# What a gated MLP does with its gate half.
GATES = {
    "swiglu": lambda x: x * torch.sigmoid(x),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
}


class ReferenceNorm(nn.Module):
    def __init__(self, c: ReferenceConfig, size: int):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(size))
        if c.norm == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight + 1 if self.c.norm_1p else self.weight
        if self.c.norm == "RMSNorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + self.c.eps).sqrt() * scale
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + self.c.eps).sqrt() * scale + self.bias


def rope_angles(c: ReferenceConfig, length: int) -> Tensor:
    """[length, rotated dims / 2], in fp32 as the field does it."""
    dims = int(c.head_dim * c.rotary_percent)
    freqs = 1.0 / (c.rotary_base ** (torch.arange(0, dims, 2).float() / dims))
    if c.llama31_factor is not None:
        scaled = []
        for f in freqs:
            wavelength = 2 * math.pi / f
            if wavelength < 8192 / 4:
                scaled.append(f)
            elif wavelength > 8192 / 1:
                scaled.append(f / c.llama31_factor)
            else:
                smooth = (8192 / wavelength - 1) / (4 - 1)
                scaled.append((1 - smooth) * f / c.llama31_factor + smooth * f)
        freqs = torch.stack(scaled)
    return torch.outer(torch.arange(length).float() / c.rotary_interpolation, freqs)


def rope(c: ReferenceConfig, t: Tensor) -> Tensor:
    """t [b, heads, s, d], as multiplication of complex numbers."""
    angles = rope_angles(c, t.shape[2])
    n = angles.shape[1]
    spin = torch.complex(angles.cos().to(t.dtype), angles.sin().to(t.dtype))
    turned, rest = t[..., : 2 * n], t[..., 2 * n :]
    if c.rotary_interleaved:
        out = torch.view_as_real(torch.complex(turned[..., 0::2], turned[..., 1::2]) * spin).flatten(-2)
    else:
        z = torch.complex(turned[..., :n], turned[..., n:]) * spin
        out = torch.cat((z.real, z.imag), -1)
    return torch.cat((out, rest), -1)


class ReferenceAttention(nn.Module):
    def __init__(self, c: ReferenceConfig):
        super().__init__()
        self.c = c
        rows = (c.heads + 2 * c.groups) * c.head_dim
        self.linear_qkv = nn.Linear(c.hidden, rows, bias=c.bias or c.qkv_bias)
        self.linear_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=c.bias or c.attention_output_bias)
        if c.qk_norm:
            self.q_layernorm, self.k_layernorm = ReferenceNorm(c, c.head_dim), ReferenceNorm(c, c.head_dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        c = self.c
        b, s, _ = x.shape
        per_group = c.heads // c.groups
        qkv = self.linear_qkv(x).view(b, s, c.groups, per_group + 2, c.head_dim)
        q = qkv[..., :per_group, :].reshape(b, s, c.heads, c.head_dim).transpose(1, 2)
        k, v = (qkv[..., per_group + i, :].transpose(1, 2) for i in (0, 1))
        if c.qk_norm:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if c.positions == "rope":
            q, k = rope(c, q), rope(c, k)
        k, v = (t.repeat_interleave(per_group, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(c.head_dim)).masked_fill(mask, -math.inf)
        return self.linear_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))


class ReferenceMlp(nn.Module):
    def __init__(self, c: ReferenceConfig):
        super().__init__()
        self.kind = c.activation
        gated = c.activation in GATES
        self.linear_fc1 = nn.Linear(c.hidden, c.ffn * (2 if gated else 1), bias=c.bias)
        self.linear_fc2 = nn.Linear(c.ffn, c.hidden, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(activated(self.kind, self.linear_fc1(x)))


def activated(kind: str, y: Tensor) -> Tensor:
    if kind in GATES:
        gate, up = y.chunk(2, -1)
        return GATES[kind](gate) * up
    if kind == "squared_relu":
        return y.clamp(min=0) ** 2
    return gelu_tanh(y) if kind == "gelu_tanh" else gelu(y)


class ReferenceLayer(nn.Module):
    def __init__(self, c: ReferenceConfig, number: int):
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = ReferenceNorm(c, c.hidden), ReferenceNorm(c, c.hidden)
        self.self_attention = ReferenceAttention(c)
        e, act = c.experts, functools.partial(activated, c.activation)
        if e is None or not (e.pattern or (1,) * c.num_layers)[number]:
            self.mlp = ReferenceMlp(c)
        else:
            self.mlp = ReferenceMoe(c.hidden, e, c.activation in GATES, c.bias, act)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), mask)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class ReferenceGPT(nn.Module):
    def __init__(self, c: ReferenceConfig):
        super().__init__()
        self.c = c
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(c.vocab, c.hidden)
        if c.positions == "learned_absolute":
            self.embedding.position_embeddings = nn.Embedding(c.max_positions, c.hidden)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(ReferenceLayer(c, number) for number in range(c.num_layers))
        self.decoder.final_layernorm = ReferenceNorm(c, c.hidden)
        if not c.tied:
            self.output_layer = nn.Linear(c.hidden, c.vocab, bias=False)

    def added(self) -> Tensor:
        """What experts add to the loss of the last forward."""
        return sum(layer.mlp.added for layer in self.decoder.layers if isinstance(layer.mlp, ReferenceMoe))

    def forward(self, tokens: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits [b, s, v], or with labels the losses [b, s]. mask: True = may not be seen; default causal."""
        s = tokens.shape[1]
        if mask is None:
            mask = torch.ones(s, s, dtype=torch.bool).triu(1)
        x = self.embedding.word_embeddings(tokens) * self.c.embedding_factor
        if self.c.positions == "learned_absolute":
            x = x + self.embedding.position_embeddings(torch.arange(s))
        for layer in self.decoder.layers:
            x = layer(x, mask)
        x = self.decoder.final_layernorm(x)
        head = self.embedding.word_embeddings.weight if self.c.tied else self.output_layer.weight
        logits = x @ head.t()
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
