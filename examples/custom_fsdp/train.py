#!/usr/bin/env python3
"""A plain PyTorch model, fully sharded: torchrun --nproc-per-node 2 examples/custom_fsdp/train.py

Each rank holds a part of weights, gradients and Adam's state. Rank 0 then trains alone and prints the difference.
"""

import copy
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from megatron.core.distributed.sharded_module.fully_shard import fully_shard

STEPS, MICROBATCHES, SEQ, OUT = 10, 4, 32, Path("runs/custom_fsdp/model.safetensors")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):  # [b, s, 64], in 4 heads
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (12, 16)).transpose(1, 2).chunk(3, dim=1)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, 64), nn.Embedding(SEQ, 64)
        self.layers = nn.Sequential(Block(), Block(), Block(), nn.LayerNorm(64), nn.Linear(64, 256))

    def forward(self, rows):  # [b, s + 1] bytes -> the mean loss
        logits = self.layers(self.tokens(rows[:, :-1]) + self.positions(torch.arange(SEQ)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model, hold_back, rank=0, world=1):
    """Of a step's MICROBATCHES this rank takes every world-th; returns its share of the mean losses."""
    text, losses = torch.tensor(list(Path(__file__).read_bytes())), torch.zeros(STEPS, dtype=torch.float64)
    optimizer, mine = torch.optim.AdamW(model.parameters(), lr=3e-3), range(rank, MICROBATCHES, world)
    for step in range(STEPS):
        for index in mine:
            random = torch.Generator().manual_seed(step * MICROBATCHES + index)
            rows = text[torch.randint(len(text) - SEQ, (4, 1), generator=random) + torch.arange(SEQ + 1)]
            with nullcontext() if index == mine[-1] else hold_back():  # reduced once a step
                (loss := model(rows) / len(mine)).backward()
            losses[step] += loss.detach() / world
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    alone = Model().double()
    fully_shard(model := copy.deepcopy(alone), fsdp_unit_modules=[Block])  # in place
    losses = train(model, model.no_sync, dist.get_rank(), dist.get_world_size())
    dist.all_reduce(losses)
    weights = model.full_state_dict()  # communicates: all ranks call it
    if dist.get_rank() == 0:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, OUT)
        held = sum(p.to_local().numel() for p in model.parameters())
        whole = sum(p.numel() for p in model.parameters())  # as the whole ones answer
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {held:,} of {whole:,} weights a rank; ", end="")
        print(f"saved to {OUT}")
        losses -= train(alone, nullcontext)
        off = max((weights[name] - p.detach()).abs().max() for name, p in alone.named_parameters())
        print(f"largest difference from one process: losses {losses.abs().max():.1e}, weights {off:.1e}")
    dist.destroy_process_group()
