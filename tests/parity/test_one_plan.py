"""Pipelines x sharding x everything that acts with them, on 8 ranks, against a plain PyTorch loop on one process.

fp64, clipped AdamW steps: losses, norms and weights agree to 1e-10, over the covering array of
`tests.harness.covering`: every pair of choices, and every triple of strategy, schedule and policy. The first of two
validated steps is taken back: it is clipped by less than what the last rank adds to the norm, so that the first ranks
have stepped.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.harness.covering import DEEP, WORLD_SIZE, Case, every_case, read_cases, to_cover
from tests.harness.layouts import (
    CLIP,
    NO_DROPOUT,
    Layout,
    assembled,
    microbatch,
    plan_ahead,
    reference_config,
    train,
)
from tests.harness.ranks import run_ranks
from tests.harness.reference_gpt import ReferenceGPT
from tests.harness.validated_steps import train_validated

STEPS = 2
UNTIED = "--untie-embeddings-and-output-weights"
INSTANCES = ("--num-distributed-optimizer-instances", "2")
STRATEGY = {"HSDP": "optim_grads_params", "HFSDP": "optim_grads_params"}
CASES = read_cases(Case, "one_plan_cases.txt")
PARTS = 12  # of the whole array, each of some minutes: --lf goes on where a run was stopped


def num_layers_of(case) -> int:
    """As few as the layout can do with; padded: one less than the stages share evenly."""
    stages = case.pp * case.chunks
    layers = max(2, stages) * (2 if case.recompute == "2" else 1)
    return layers - 1 if case.padded else layers


def microbatches_of(case) -> int:
    return 2 * case.pp if case.schedule == "dualpipe-v" else max(2, case.pp)


def words_of(case) -> list[str]:
    """Flags of the model."""
    words = ["--num-layers", str(num_layers_of(case)), "--fp64", *NO_DROPOUT]
    words += [] if case.tied else [UNTIED]
    if case.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    elif case.recompute != "none":
        words += "--recompute-granularity full --recompute-method uniform --recompute-num-layers".split()
        words += [case.recompute]
    return words


def layout_of(case, clip) -> Layout:
    more = [
        "--use-custom-fsdp",
        "--data-parallel-sharding-strategy",
        STRATEGY.get(case.strategy, case.strategy),
    ]
    more += ["--fsdp-reshard-policy", case.policy] if case.policy != "memory" else []
    more += ["--fsdp-memory-budget", "60000"] if case.policy == "budget" else []
    more += INSTANCES if case.strategy in STRATEGY else []
    more += ["--outer-dp-sharding-strategy", "optim"] if case.strategy == "HFSDP" else []
    more += ["--allow-padding-num-layers"] if case.padded else []
    more += ["--enable-optimizer-post-validation", "--post-validation-after", "0"] if case.validated else []
    more += ["--clip-grad", str(clip)]
    looped = case.schedule in ("interleaved", "gis")
    return Layout(case.tp, case.pp, case.dp, case.sp, case.schedule, 2 if looped else 1, tuple(more))


def run_cases(ctx, cases, clips):
    torch.set_num_threads(1)
    outcomes = []
    for case, clip in zip(cases, clips, strict=True):
        layout, words, batch = layout_of(case, clip), words_of(case), microbatches_of(case) * case.dp
        try:
            if case.validated:
                outcomes.append(train_validated(ctx, layout, words, batch, STEPS))
            else:
                one = train(ctx, layout, words, global_batch=batch, steps=STEPS)
                outcomes.append((one.losses, one.norms, one.weights, 0))
        except Exception as error:
            error.add_note(f"{case}")
            raise
    return outcomes


@functools.cache
def initial_weights(words: tuple[str, ...]) -> dict[str, np.ndarray]:
    return assembled([run_ranks(train, 1, Layout(), list(words), steps=0)[0].initial])


@functools.cache
def plain_run(
    words: tuple[str, ...], global_batch: int, clip: float
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """One process that sees every microbatch itself: losses, norms, weights."""
    model = ReferenceGPT(reference_config(words)).double()
    state = {name: torch.from_numpy(values.copy()) for name, values in initial_weights(words).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], [])
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        total = 0.0
        for index in range(global_batch):
            batch = microbatch(step, index)
            loss = model(batch["tokens"], labels=batch["labels"]).mean() / global_batch
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip).item())
        adam.step()
        losses.append(total)
    return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


def expected_of(case, clip):
    return plain_run(tuple(words_of(case)), microbatches_of(case) * case.dp, clip)


def clip_of(case) -> float:
    """Below the norms, so that it acts; of validated steps just below that of the first."""
    return CLIP if not case.validated else 0.9999 * expected_of(case, 1e6)[1][0]


def compare(case, clip, results):
    losses, norms, weights = expected_of(case, clip)
    for ours, our_norms, _, taken_back in results:
        np.testing.assert_allclose(ours, losses, rtol=0, atol=1e-10)
        np.testing.assert_allclose(our_norms, norms, rtol=0, atol=1e-10)
        assert (taken_back > 0) == case.validated, f"{taken_back} steps were taken back"
    whole = assembled([one[2] for one in results])
    assert whole.keys() == weights.keys()
    for name, expected in weights.items():
        assert np.abs(whole[name] - expected).max() < 1e-10, name


def check(cases):
    clips = [clip_of(case) for case in cases]
    for case, clip in zip(cases, clips, strict=True):
        plan_ahead(layout_of(case, clip), words_of(case), global_batch=microbatches_of(case) * case.dp)
    by_rank = run_ranks(run_cases, WORLD_SIZE, cases, clips, timeout=900)
    wrong = []
    for number, (case, clip) in enumerate(zip(cases, clips, strict=True)):
        try:
            compare(case, clip, [rank[number] for rank in by_rank])
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_array_covers_every_pair_and_every_triple_of_strategy_schedule_and_policy():
    assert len(CASES) <= 300
    assert all(case.is_possible for case in CASES)
    assert to_cover(CASES) == to_cover(every_case())
    assert len({tuple(getattr(case, name) for name in DEEP) for case in CASES}) > 150


SAMPLE = [case for case in CASES if case.pp > 1 and case.strategy not in ("no_shard", "optim")][::16]


@pytest.mark.grid
def test_a_sample_of_the_array_equals_one_process():
    check(SAMPLE)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_array_equals_one_process(part):
    check(CASES[part::PARTS])
