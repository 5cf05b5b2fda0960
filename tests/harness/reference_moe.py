"""The oracle of experts in plain PyTorch: every choice by sorting in Python. Imports nothing of ours."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class ReferenceExperts:
    num: int = 4
    topk: int = 2
    width: int = 64
    score: str = "softmax"  # sigmoid
    before: bool = False  # softmax over all
    factor: float = 1.0
    groups: int = 1
    group_topk: int = 1
    losses: dict[str, float] = field(default_factory=dict)  # aux_loss, ..., z_loss -> coefficient
    capacity: float | None = None
    by_position: bool = False
    shared: int = 0
    shared_gate: bool = False
    sinkhorn: bool = False
    biased: bool = False
    pattern: tuple[int, ...] = ()


class Projection(nn.Module):
    def __init__(self, *shape: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[:-1]))


def best(scores: list[float], count: int) -> list[int]:
    """The largest, of equal ones the first."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def sinkhorn(logits: Tensor) -> Tensor:
    cost, rows, columns = (
        logits.exp(),
        torch.ones(len(logits)).to(logits),
        torch.ones(logits.shape[1]).to(logits),
    )
    error = math.inf
    while error > 1e-4:
        rows = 1 / len(rows) / ((columns * cost).sum(1) + 1e-8)
        new = 1 / len(columns) / ((rows[:, None] * cost).sum(0) + 1e-8)
        error = (columns - new).abs().mean().item()
        columns = new
    return columns * cost * rows[:, None]


class ReferenceMoe(nn.Module):
    """[b, s, h] -> [b, s, h]; leaves what it adds to the loss in `added`, and tokens by expert in `counts`. seen: by
    whom experts were chosen in each microbatch of the step, which whoever trains clears."""

    def __init__(self, hidden: int, e: ReferenceExperts, gated: bool, bias: bool, act):
        super().__init__()
        self.seen: list[list[int]] = []
        self.e, self.act = e, act
        parts = 2 if gated else 1
        self.router = Projection(e.num, hidden, bias=bias)
        if e.biased:
            self.router.register_buffer("expert_bias", torch.zeros(e.num))
        self.experts = nn.Module()
        self.experts.linear_fc1 = Projection(e.num, parts * e.width, hidden, bias=bias)
        self.experts.linear_fc2 = Projection(e.num, hidden, e.width, bias=bias)
        if e.shared:
            self.shared_experts = nn.Module()
            self.shared_experts.linear_fc1 = nn.Linear(hidden, parts * e.shared, bias=bias)
            self.shared_experts.linear_fc2 = nn.Linear(e.shared, hidden, bias=bias)
            if e.shared_gate:
                self.shared_experts.gate_weight = nn.Parameter(torch.empty(1, hidden))

    def choose(self, logits: Tensor) -> tuple[list[list[int]], Tensor]:
        """The experts of each token; weights [tokens, experts], zero elsewhere."""
        e = self.e
        if e.sinkhorn:
            weighed = logits.sigmoid() if e.topk == 1 else logits.softmax(-1)
            values = sinkhorn(logits.detach()) if self.training else weighed
        elif e.score == "sigmoid":
            values = weighed = logits.sigmoid()
        else:
            values = weighed = logits.softmax(-1) if e.before else logits
        if e.biased:
            values = values + self.router.expert_bias
        chosen = []
        for row in values.tolist():
            if e.groups > 1:
                size, each = e.num // e.groups, e.topk // e.group_topk
                of = [sum(sorted(row[g * size : (g + 1) * size])[-each:]) for g in range(e.groups)]
                kept = best(of, e.group_topk)
                row = [x if i // size in kept else -math.inf for i, x in enumerate(row)]
            chosen.append(best(row, e.topk))
        mask = torch.zeros_like(logits, dtype=torch.bool)
        for token, experts in enumerate(chosen):
            mask[token, experts] = True
        if e.score == "softmax" and not e.before and not e.sinkhorn:
            weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
        else:
            weights = weighed * mask
            if e.score == "sigmoid" and e.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * e.factor

    def losses(self, logits: Tensor, batch: int) -> Tensor:
        e, added = self.e, logits.new_zeros(())
        for word, coefficient in e.losses.items():
            if word == "z_loss":
                added = added + coefficient * logits.exp().sum(-1).log().pow(2).mean()
                continue
            probs = logits.softmax(-1) if e.score == "softmax" else logits.sigmoid()
            probs = probs / probs.sum(-1, keepdim=True)
            parts = [probs[b::batch] for b in range(batch)] if word == "seq_aux_loss" else [probs]
            for part in parts:
                counts = [0] * e.num
                for row in part.tolist():
                    for i in best(row, e.topk):
                        counts[i] += 1
                if word == "global_aux_loss":
                    self.seen.append(counts)
                    counts = [sum(of_expert) / len(self.seen) for of_expert in zip(*self.seen, strict=True)]
                share = torch.tensor(counts, dtype=probs.dtype) / (len(part) * e.topk)
                added = added + coefficient * e.num * (part.mean(0) * share).sum() / len(parts)
        return added

    def drop(self, chosen: list[list[int]], weights: Tensor) -> Tensor:
        e, room = self.e, math.ceil(len(chosen) * self.e.topk / self.e.num * (self.e.capacity or 0))
        kept = torch.zeros_like(weights)
        for expert in range(e.num):
            tokens = [t for t, experts in enumerate(chosen) if expert in experts]
            if e.capacity is not None:
                if not e.by_position:
                    tokens.sort(key=lambda t: (-weights[t, expert].item(), t))
                tokens = tokens[:room]
            kept[tokens, expert] = 1.0
        self.counts = [int(one) for one in kept.sum(0)]
        return weights * kept

    def forward(self, x: Tensor) -> Tensor:
        e, (batch, length, hidden) = self.e, x.shape
        tokens = x.transpose(0, 1).reshape(-1, hidden)  # by position, then by sequence
        logits = tokens @ self.router.weight.t()
        if hasattr(self.router, "bias"):
            logits = logits + self.router.bias
        chosen, weights = self.choose(logits)
        self.added = self.losses(logits, batch)
        weights = self.drop(chosen, weights)
        out = torch.zeros_like(tokens)
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        for i in range(e.num):
            y = tokens @ fc1.weight[i].t()
            y = self.act(y + fc1.bias[i] if hasattr(fc1, "bias") else y) @ fc2.weight[i].t()
            y = y + fc2.bias[i] if hasattr(fc2, "bias") else y
            out = out + weights[:, i : i + 1] * y
        if e.shared:
            of = self.shared_experts
            y = of.linear_fc2(self.act(of.linear_fc1(tokens)))
            out = out + (y * (tokens @ of.gate_weight.t()).sigmoid() if e.shared_gate else y)
        return out.view(length, batch, hidden).transpose(0, 1)
