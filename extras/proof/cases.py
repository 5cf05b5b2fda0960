"""What the proof trains: shapes, layouts and settings of Megatron's own, each a few seconds on CPU."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One training of a tiny GPT under megatron-core. Ranks beyond tensor x context x pipeline are data parallel.

    shape: "gpt2" (LayerNorm, biases, learned positions) or "llama" (RMSNorm, gated, rotary, grouped queries).
    ddp: "none" (gradients in `.grad`), "plain", "overlap" (`overlap_grad_reduce`), "sharded" (distributed optimizer) or
    "sharded-overlap" (with both overlaps). align: `grad_sync_func` is given too: later stages reduce in the bubble.
    experts: of sequential layers, top 2. fusion: Megatron's fused accumulation, by a stand-in for apex's kernel.
    context: ranks that share a sequence; attention is then a module that mixes no tokens, as Megatron's is a GPU's.
    dtype: of weights and activations; gradients are added up and reduced in fp32, float16 with a dynamic loss scale.
    evaluate_every: a forward-only step behind each so many steps.
    """

    name: str
    ranks: int = 2
    tensor: int = 1
    pipeline: int = 2
    expert: int = 1
    context: int = 1
    shape: str = "gpt2"
    tied: bool = True
    ddp: str = "plain"
    align: bool = False
    experts: int = 0
    per_token: bool = False
    dropout: float = 0.0
    fusion: bool = False
    recompute: bool = False
    dtype: str = "float32"
    microbatches: int = 4
    steps: int = 20
    evaluate_every: int = 0
    layers: int = 2
    hidden: int = 16
    length: int = 8
    vocabulary: int = 64
    microbatch_size: int = 2


TWO_RANKS = (
    Case("gpt2 tied, DDP", evaluate_every=7),
    Case("gpt2 tied, DDP with overlap", ddp="overlap"),
    Case("gpt2 untied, no DDP", tied=False, ddp="none"),
    Case(
        "llama untied, distributed optimizer, per-token loss",
        shape="llama",
        tied=False,
        ddp="sharded",
        per_token=True,
    ),
    Case("llama tied, distributed optimizer with overlaps", shape="llama", ddp="sharded-overlap"),
    Case("fused accumulation, overlap", shape="llama", tied=False, ddp="overlap", fusion=True),
    Case("fused accumulation", tied=False, fusion=True),
    Case("experts without overlap", shape="llama", tied=False, experts=4),
    Case("experts", shape="llama", tied=False, experts=4, ddp="overlap"),
    Case("one microbatch on two stages", microbatches=1),
    Case("dropout", dropout=0.1),
    Case("full recomputation", recompute=True),
    Case("bf16, overlap", shape="llama", tied=False, ddp="overlap", dtype="bfloat16"),
    Case("bf16, fused accumulation, distributed optimizer", ddp="sharded", dtype="bfloat16", fusion=True),
    Case("fp16, overlap", ddp="overlap", dtype="float16"),
)
FOUR_RANKS = (
    Case("four stages", ranks=4, pipeline=4, layers=4, microbatches=8, evaluate_every=7),
    Case("three microbatches on four stages", ranks=4, pipeline=4, layers=4, microbatches=3, ddp="overlap"),
    Case("tensor 2 x pipeline 2, sequence parallel", ranks=4, tensor=2, evaluate_every=9),
    Case(
        "tensor 2 x pipeline 2, llama, distributed optimizer",
        ranks=4,
        tensor=2,
        shape="llama",
        tied=False,
        ddp="sharded",
        per_token=True,
    ),
    Case("data 2 x pipeline 2, overlap", ranks=4, ddp="overlap"),
    Case("data 2 x pipeline 2, overlap, grad_sync_func", ranks=4, ddp="overlap", align=True),
    Case("data 2 x pipeline 2, distributed optimizer", ranks=4, shape="llama", ddp="sharded", per_token=True),
    Case(
        "data 2 x pipeline 2, distributed optimizer with overlaps",
        ranks=4,
        shape="llama",
        ddp="sharded-overlap",
    ),
    Case("data 2 x pipeline 2, fused accumulation, overlap", ranks=4, tied=False, ddp="overlap", fusion=True),
    Case("tensor 2 x pipeline 2, fused accumulation", ranks=4, tensor=2, tied=False, fusion=True),
    Case("experts 2 x pipeline 2", ranks=4, expert=2, experts=4, shape="llama", tied=False),
    Case("context 2 x pipeline 2, overlap", ranks=4, context=2, ddp="overlap", per_token=True),
    Case("experts, tensor 2 x pipeline 2", ranks=4, tensor=2, experts=4, shape="llama", tied=False),
)
# Four stages of six layers, whose activations are what fills them.
MEMORY = Case(
    "memory",
    ranks=4,
    pipeline=4,
    tied=False,
    microbatches=8,
    steps=2,
    layers=24,
    hidden=64,
    length=64,
)
EVERY = {case.name: case for case in (*TWO_RANKS, *FOUR_RANKS, MEMORY)}
