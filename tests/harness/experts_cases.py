"""A covering array of the ways in which eight ranks can train models with experts: every pair of choices that go
together.

`python -m tests.harness.experts_cases` writes it (tests/parity/experts_cases.txt) as `covering` does: from possible
cases of which each layout has a few.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import ClassVar

from tests.harness.covering import CHOICES, SEED, Case, covering_array, write_cases

FILE = "experts_cases.txt"
GATED = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
ROUTERS = {
    "mixtral": f"{GATED} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
    "qwen2": f"{GATED} --moe-router-pre-softmax --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
    "deepseek": f"{GATED} --moe-router-score-function sigmoid --moe-router-topk 3 --moe-router-num-groups 2 "
    "--moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-topk-scaling-factor 1.5 --moe-shared-expert-intermediate-size 16",
    "sinkhorn": f"{GATED} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-input-jitter-eps 0.1 "
    "--moe-layer-freq 2",
    "biases": "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2 --moe-layer-freq 2",
    "one": f"{GATED} --moe-router-pre-softmax --moe-router-topk 1 --moe-router-dtype fp64 --moe-z-loss-coeff 0.02",
    "forced": f"{GATED} --moe-router-force-load-balancing --moe-aux-loss-coeff 0.1",
}
DROPPING = {
    "none": "",
    "probs": "--moe-expert-capacity-factor 0.75",
    "position": "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position",
}
OF_LAYOUT = {
    name: CHOICES[name] for name in ("pp", "strategy", "schedule", "policy", "sp", "padded", "validated")
}
OF_MODEL = {
    "router": tuple(ROUTERS),
    "dropping": tuple(DROPPING),
    "recompute": ("none", "core_attn", "full", "moe", "shared_experts+mlp", "layernorm+core_attn"),
    "per_token": (False, True),
    "tied": (True, False),
}


@dataclasses.dataclass(frozen=True)
class ExpertsCase(Case):
    """recompute: none, full, or modules joined by +. per_token: the loss is that of all tokens, of which some do not
    count."""

    choices: ClassVar[dict[str, tuple[object, ...]]] = {"tp": (1, 2, 4), **OF_LAYOUT, **OF_MODEL}
    together: ClassVar[tuple[str, ...]] = ()

    router: str
    dropping: str
    per_token: bool

    @property
    def is_possible(self) -> bool:
        if self.sp != (self.tp > 1):  # experts take no tensor parallel ranks without it
            return False
        if self.router == "sinkhorn" and self.dropping != "none":
            return False
        return super().is_possible

    @property
    def words(self) -> list[str]:
        """Flags of the model, beside its layers."""
        words = ["--num-experts", "4", "--moe-ffn-hidden-size", "24", *ROUTERS[self.router].split()]
        words += DROPPING[self.dropping].split()
        words += ["--calculate-per-token-loss"] if self.per_token else []
        words += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        return words

    @property
    def recompute_words(self) -> list[str]:
        """Flags that change no number."""
        if self.recompute == "full":
            return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
        if self.recompute == "none":
            return []
        return ["--recompute-granularity", "selective", "--recompute-modules", *self.recompute.split("+")]


def possible_cases() -> Iterator[ExpertsCase]:
    """Every layout, each with a few models that are drawn for it."""
    draw, names = random.Random(SEED), ("tp", *OF_LAYOUT)
    for values in itertools.product(*(ExpertsCase.choices[name] for name in names)):
        layout = dict(zip(names, values, strict=True))
        for _ in range(4):
            model = {name: draw.choice(choices) for name, choices in OF_MODEL.items()}
            case = ExpertsCase(**layout, **model)  # type: ignore[arg-type]
            if case.is_possible:
                yield case


if __name__ == "__main__":
    write_cases(FILE, covering_array(list(possible_cases())))
