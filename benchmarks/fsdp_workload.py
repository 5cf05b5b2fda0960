"""What `fsdp_vs_peers.py` trains: sizes, tokens, first weights, a plain GPT, and how much computing a step is.

Everything that the contestants share is here, so that none of them can train something else: microbatches of one
sample, Adam without decay or clipping, the mean over microbatches and ranks of each microbatch's mean loss.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.plain_gpt import Block, copy_weights
from megatron.core.device import Device
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transport.parallel_state import ParallelState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE, BETAS, EPS = 3e-4, (0.9, 0.95), 1e-8
SEED = 1234
Batches = list[tuple[Tensor, Tensor]]  # tokens and labels of each microbatch, [1, seq]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT with learned positions, biases, exact GELU and a head of its own."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int

    @property
    def num_params(self) -> int:
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (2 * self.vocab + self.seq + 2) * self.hidden

    @property
    def flop_per_token(self) -> int:
        """Forward and backward: matrices (head, not embeddings), and causal attention."""
        matrices = self.layers * 12 * self.hidden**2 + self.vocab * self.hidden
        return 6 * matrices + 6 * self.layers * self.seq * self.hidden


SIZES = {
    "tiny8": Shape(8, 128, 4, 128, 1024),  # of which FSDP2's 2.86x of one process was measured
    "8x64": Shape(8, 64, 4, 32, 256),
    "3m": Shape(8, 160, 5, 128, 1024),
    "34m": Shape(8, 512, 8, 512, 8192),
    "100m": Shape(12, 768, 12, 256, 8192),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """One case on one rank. mine: this rank's microbatches; everyones: those of all ranks, rank by rank."""

    shape: Shape
    dtype: torch.dtype
    ps: ParallelState
    mine: Batches
    everyones: Batches

    @property
    def device(self) -> Device:
        return self.ps.device

    @property
    def num_ranks(self) -> int:
        return self.ps.world_size


class Trainer(Protocol):
    def step(self) -> float | None:
        """One optimizer step over the work's microbatches. The mean loss of those that this rank ran, None if it ran
        none."""


def make_work(size: str, dtype: str, microbatches: int, ps: ParallelState) -> Work:
    """The same tokens on every rank, of which each takes its part."""
    shape = SIZES[size]
    generator = torch.Generator().manual_seed(5)
    samples = microbatches * ps.world_size
    text = torch.randint(shape.vocab, (samples, shape.seq + 1), generator=generator).to(
        ps.device.torch_device
    )
    everyones = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text.split(1)]
    mine = everyones[ps.rank * microbatches : (ps.rank + 1) * microbatches]
    return Work(shape, DTYPES[dtype], ps, mine, everyones)


def our_model(work: Work, dtype: torch.dtype) -> GPTModel:
    """Weights depend on the seed and their names alone."""
    shape = work.shape
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=shape.seq,
        max_position_embeddings=shape.seq,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
    ).resolved()
    return GPTModel(
        config,
        padded_vocab_size=shape.vocab,
        seed=SEED,
        params_dtype=dtype,
        device=work.device.torch_device,
    )


class PlainGPT(nn.Module):
    """The same network as a plain PyTorch script writes it; returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


def plain_model(work: Work) -> PlainGPT:
    """In fp32, with the weights that ours begins with."""
    with torch.device(work.device.torch_device):
        plain = PlainGPT(work.shape)
    weights = {name: weight.detach() for name, weight in our_model(work, torch.float32).named_parameters()}
    copy_weights(weights, plain, work.shape.heads)
    assert sum(p.numel() for p in plain.parameters()) == work.shape.num_params
    return plain


def plain_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
