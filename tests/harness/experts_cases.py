"""Covering arrays of the ways in which eight ranks can train models with experts: every pair of choices that go
together, and where experts have ranks of their own every triple of expert parallel size, strategy and schedule.

`python -m tests.harness.experts_cases` writes them (tests/parity/experts_cases.txt, expert_parallel_cases.txt) as
`covering` does: from possible cases of which each layout has a few.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

from tests.harness.covering import CHOICES, SEED, WORLD_SIZE, Case, covering_array, write_cases

FILE, PARALLEL_FILE = "experts_cases.txt", "expert_parallel_cases.txt"
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
    num_experts: ClassVar[int] = 4

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
        words = ["--num-experts", str(self.num_experts), "--moe-ffn-hidden-size", "24"]
        words += ROUTERS[self.router].split()
        words += DROPPING[self.dropping].split()
        words += ["--calculate-per-token-loss"] if self.per_token else []
        words += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        return words

    @property
    def layout_words(self) -> list[str]:
        """Flags that change no number, beside those of dense models' layouts."""
        if self.recompute == "full":
            return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
        if self.recompute == "none":
            return []
        return ["--recompute-granularity", "selective", "--recompute-modules", *self.recompute.split("+")]


C = TypeVar("C", bound=ExpertsCase)
INSTANCED = ("HSDP", "HFSDP")


@dataclasses.dataclass(frozen=True)
class ExpertParallelCase(ExpertsCase):
    """Experts have a grid of their own. ep: of so many ranks each has others of them; etp: each is cut over so many.
    instances: of the optimizer."""

    choices: ClassVar[dict[str, tuple[object, ...]]] = {
        "ep": (1, 2, 4, 8),
        "etp": (1, 2, 4),
        "instances": (1, 2),
        "dispatcher": ("alltoall", "allgather"),
        **ExpertsCase.choices,
    }
    together: ClassVar[tuple[str, ...]] = ("ep", "strategy", "schedule")
    derived: ClassVar[tuple[str, ...]] = ("dp", "edp")
    num_experts: ClassVar[int] = 8

    ep: int
    etp: int
    instances: int
    dispatcher: str

    @property
    def edp(self) -> int:
        return WORLD_SIZE // (self.pp * self.ep * self.etp)

    @property
    def is_possible(self) -> bool:
        if not self.edp or (self.ep == 1 and self.etp == self.tp):
            return False
        if self.strategy in ("no_shard", "optim_grads_params", *INSTANCED):
            if (self.instances == 2) != (self.strategy in INSTANCED):
                return False
        if self.instances == 2 and (self.edp == 1 or self.tp * self.pp == WORLD_SIZE):
            return False
        if (
            self.instances == 2 and self.dp == 2 and self.policy != "memory"
        ):  # instances of one rank gather nothing
            return False
        return super().is_possible

    @property
    def layout_words(self) -> list[str]:
        sizes = f"--expert-model-parallel-size {self.ep} --expert-tensor-parallel-size {self.etp}"
        words = [*super().layout_words, *sizes.split(), "--moe-token-dispatcher-type", self.dispatcher]
        if self.instances == 2 and self.strategy not in INSTANCED:
            words += ["--num-distributed-optimizer-instances", "2"]
        return words


def possible_cases() -> Iterator[ExpertsCase]:
    """Every layout, each with a few models that are drawn for it."""
    every = ("tp", *(name for name in OF_LAYOUT if name != "sp"))
    yield from _possible(ExpertsCase, every, OF_MODEL, 4)


def possible_parallel_cases() -> Iterator[ExpertParallelCase]:
    """Every way to lay out ranks, each with a few ways to use them."""
    every = ("tp", "pp", "ep", "etp", "strategy", "instances", "schedule")
    choices = ExpertParallelCase.choices
    drawn = {name: choices[name] for name in choices if name not in (*every, "sp")}
    yield from _possible(ExpertParallelCase, every, drawn, 16)


def _possible(
    kind: type[C], every: Sequence[str], drawn: Mapping[str, tuple[object, ...]], times: int
) -> Iterator[C]:
    """Of every combination of some choices so many with the others drawn."""
    draw = random.Random(SEED)
    for values in itertools.product(*(kind.choices[name] for name in every)):
        layout = dict(zip(every, values, strict=True))
        layout["sp"] = layout["tp"] != 1
        if not kind(**layout, **{name: choices[0] for name, choices in drawn.items()}).is_possible:  # type: ignore[arg-type]
            continue
        for _ in range(times):
            others = {name: draw.choice(choices) for name, choices in drawn.items()}
            case = kind(**layout, **others)  # type: ignore[arg-type]
            if case.is_possible:
                yield case


if __name__ == "__main__":
    write_cases(FILE, covering_array(list(possible_cases())))
    write_cases(PARALLEL_FILE, covering_array(list(possible_parallel_cases())))
