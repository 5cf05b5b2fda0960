"""40 seeded layouts on 1 to 8 ranks: what is planned, what is rehearsed and what ranks of a run hold behind every
operation is the same to the byte, in every category."""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

import pytest
import torch

import pretrain_gpt
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import imagined_world
from megatron.training.run.describe import described_model
from megatron.training.run.rehearse.comparison import (
    account_of,
    differences,
    evaluation_account,
    parts_of,
    step_bytes,
    step_differences,
)
from megatron.training.run.rehearse.rehearsal import rehearsed, steps_of
from tests.harness.covering import CHOICES, Case
from tests.harness.layouts import MODEL
from tests.harness.ranks import run_ranks
from tests.parity.test_one_plan import layout_of, microbatches_of, words_of

SEED, CASES = 30, 40
LLAMA = "--swiglu --position-embedding-type rope --disable-bias-linear --normalization RMSNorm".split()


@dataclasses.dataclass(frozen=True)
class ByteCase(Case):
    """On so many ranks. llama: gated MLP, rotated positions, no biases. Steps that are validated are not taken back: no
    gradient is clipped."""

    choices: ClassVar[dict[str, tuple[object, ...]]] = {
        **CHOICES,
        "ranks": (1, 2, 4, 8),
        "dtype": ("fp32", "bf16"),
        "llama": (False, True),
    }

    ranks: int
    dtype: str
    llama: bool

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)

    @property
    def is_possible(self) -> bool:
        return self.dp * self.tp * self.pp == self.ranks and super().is_possible

    @property
    def words(self) -> list[str]:
        clip = 0.0 if self.validated else 1.0
        words = [word for word in words_of(self) if word != "--fp64"] + layout_of(self, clip).flags
        batch = 2 * microbatches_of(self) * self.dp
        words += [*MODEL, "--global-batch-size", str(batch), *["--bf16"] * (self.dtype == "bf16")]
        if self.dtype == "bf16":  # whose LayerNorm keeps 4 bytes a token more without memory than on a CPU
            words += ["--normalization", "RMSNorm"]
        return words + LLAMA * self.llama


def seeded_cases() -> list[ByteCase]:
    draw, found = random.Random(SEED), list[ByteCase]()
    while len(found) < CASES:
        case = ByteCase(**{name: draw.choice(values) for name, values in ByteCase.choices.items()})
        if case.is_possible and case not in found:
            found.append(case)
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", seeded_cases(), ids=str)
def test_every_category_at_every_boundary(case):
    config = parse_config(case.words, env=LaunchEnv(world_size=case.ranks))
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    spec, ps = together[0].runner.spec, imagined_world(config).state(0)
    description = described_model(config, ps, spec.stages, keeps_gathered=spec.keeps_gathered)

    def against_account(mine):
        spec = mine.runner.spec
        step = step_bytes(config, mine.engine)
        parts = parts_of(config, spec, description, mine.engine.model, step)
        account = account_of(mine.plan, spec, mine.pp_rank, parts)
        found = differences(account, mine.seen) + step_differences(mine.pp_rank, step, mine.parts)
        evaluation = evaluation_account(config, mine.evaluation, mine.runner.spec, mine.pp_rank, parts)
        return len(mine.seen), found + differences(evaluation, mine.evaluated)

    def body(ctx):
        torch.set_num_threads(1)
        ps = ctx.make_ps(tp=case.tp, pp=case.pp, dp=case.dp, **instances_of(case))
        return against_account(steps_of(config, ps, pretrain_gpt.model_provider, pretrain_gpt.forward_step))

    outcomes = [against_account(one) for one in together] + run_ranks(body, case.ranks, timeout=540.0)
    assert [found for _, found in outcomes] == [[]] * len(outcomes)
    assert all(operations > 4 for operations, _ in outcomes)


def instances_of(case: ByteCase) -> dict[str, int]:
    return {"instances": 2} if case.strategy in ("HSDP", "HFSDP") else {}
