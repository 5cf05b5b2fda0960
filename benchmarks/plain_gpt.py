"""The peer of `single_process.py` and `pipeline_training.py`: a GPT and a training step as a plain PyTorch script
writes them (nanoGPT's style), and our trainer's weights and schedule as both benchmarks need them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.core.optimizer.flat_update import ParamGroup

# Modules of the plain model by our names for them; those of a block are our decoder layer's.
BLOCK_NAMES = {
    "ln_1": "input_layernorm",
    "ln_2": "pre_mlp_layernorm",
    "c_attn": "self_attention.linear_qkv",
    "c_proj": "self_attention.linear_proj",
    "c_fc": "mlp.linear_fc1",
    "mlp_proj": "mlp.linear_fc2",
}
TOP_NAMES = {
    "wte": "embedding.word_embeddings",
    "wpe": "embedding.position_embeddings",
    "ln_f": "decoder.final_layernorm",
    "lm_head": "output_layer",
}


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.c_fc, self.mlp_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attend(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(h, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, h))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class PlainGPT(nn.Module):
    """Tied embeddings, learned positions, biases, exact GELU."""

    def __init__(self, layers: int, hidden: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class PlainTrainer:
    """fp32 weights; bf16 through autocast. model: (tokens, labels) -> (logits, mean loss)."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.autocast = (
            contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)
        )

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        loss = self.gradients(batches)
        self.update()
        return loss

    def gradients(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Forward and backward; the mean loss."""
        total = 0.0
        for tokens, labels in batches:
            with self.autocast:
                _logits, loss = self.model(tokens, labels)
                loss = loss / len(batches)
            loss.backward()
            total += loss.item()
        return total

    def update(self) -> None:
        """Clip, and one step of the optimizer."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def copy_weights(ours: Mapping[str, Tensor], plain: nn.Module, heads: int) -> None:
    """The plain model, or a stage of one, starts from our weights (its QKV rows are all queries, all keys, all
    values)."""
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            head, _, kind = name.rpartition(".")
            if head.startswith("blocks."):
                _, number, module = head.split(".")
                value = ours[f"decoder.layers.{number}.{BLOCK_NAMES[module]}.{kind}"]
                if module == "c_attn":
                    value = value.view(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
            else:
                value = ours[f"{TOP_NAMES[head]}.{kind}"]
            parameter.copy_(value)


def set_schedule(param_groups: Iterable[ParamGroup], lr: float, weight_decay: float) -> None:
    """What the trainer's schedule does to our optimizer's groups at every step; here once, the rates stay."""
    for group in param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]
