"""Every pipeline schedule at TP = DP = 1 gives the bits of one process.

Losses, norms, gradients, and weights after clipped steps, with dropout: ten in the full grid, two to four by default.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES as TABLE
from tests.harness.layouts import CLIP, NO_DROPOUT, Layout, assembled, plan_ahead, train
from tests.harness.ranks import run_ranks

MODELS = {
    "fp32 tied": [],
    "fp32 untied": ["--untie-embeddings-and-output-weights"],
    "bf16 tied": ["--bf16"],
    "bf16 untied": ["--bf16", "--untie-embeddings-and-output-weights", "--swiglu"],
}
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
SCHEDULES = {
    (pp, name): Layout(pp=pp, schedule=name, chunks=2 if row.placement == "looped" else 1)
    for pp in (2, 4)
    for name, row in TABLE.items()
}
# A sample for every run: each schedule, each dtype, tied and untied.
SAMPLE = [
    ((2, "gpipe"), "fp32 tied"),
    ((2, "1f1b"), "bf16 untied"),
    ((2, "interleaved"), "bf16 tied"),
    ((2, "zb-h1"), "bf16 untied"),
    ((2, "zb-h2"), "fp32 tied"),
    ((2, "1f1b-v"), "fp32 tied"),
    ((2, "zb-1p"), "bf16 tied"),
    ((2, "zbv"), "fp32 tied"),
    ((2, "zbv"), "bf16 untied"),
    ((2, "v-half"), "bf16 tied"),
    ((2, "dualpipe-v"), "fp32 tied"),
    ((4, "1f1b"), "fp32 untied"),
    ((4, "interleaved"), "fp32 tied"),
    ((4, "zb-2p"), "fp32 tied"),
    ((4, "zbv"), "fp32 tied"),
    ((4, "v-min"), "fp32 untied"),
    ((4, "gis"), "fp32 tied"),
]


@dataclasses.dataclass(frozen=True)
class Size:
    """layers: as many as 4 pipeline ranks have chunks, or as 2 have; fewer are padded. recompute: all layers."""

    layers: int = 8
    steps: int = 10
    microbatches: int = 8
    recompute: bool = False


FULL, SHORT, SHALLOW = Size(), Size(steps=2), Size(layers=4, steps=4)
# Fewer layers than stages: some are empty, on a V of 2 ranks the last one too.
PADDED = Size(layers=3, steps=2, recompute=True)
SPARSE = Size(layers=1, steps=2)


def words_of(size):
    return ["--num-layers", str(size.layers), *(RECOMPUTED if size.recompute else [])]


def run_cases(ctx, cases, size):
    return [
        train(
            ctx,
            layout,
            [*words_of(size), *words],
            steps=size.steps,
            global_batch=size.microbatches,
        )
        for layout, words in cases
    ]


@functools.cache
def in_one_process(model, size):
    (trained,) = run_ranks(run_cases, 1, [(Layout(), MODELS[model])], size, timeout=120)[0]
    return trained


def assert_same_bits(results, model, size):
    alone = in_one_process(model, size)
    for rank in results:
        assert rank.losses == alone.losses
        assert rank.norms == alone.norms
        assert rank.zeros == alone.zeros
    for kind in ("initial", "grads", "weights"):
        ours = assembled([getattr(rank, kind) for rank in results])
        expected = assembled([getattr(alone, kind)])
        assert ours.keys() == expected.keys()
        for name, values in expected.items():
            assert np.array_equal(ours[name], values), f"{kind} of {name} differ"


def layout_of(schedule, size):
    layout, padding = SCHEDULES[schedule], ("--allow-padding-num-layers",)
    stages = layout.pp * (1 if TABLE[layout.schedule].placement == "linear" else 2)
    return dataclasses.replace(layout, more=padding if size.layers % stages else ())


def check(cases, sizes):
    """sizes: by the number of stages."""
    for pp, size in sizes.items():
        mine = [(schedule, model) for schedule, model in cases if schedule[0] == pp]
        layouts = [(layout_of(schedule, size), MODELS[model]) for schedule, model in mine]
        for layout, words in layouts:
            plan_ahead(layout, [*words_of(size), *words], global_batch=size.microbatches)
        by_rank = run_ranks(run_cases, pp, layouts, size, timeout=240)
        for number, (schedule, model) in enumerate(mine):
            try:
                assert_same_bits([rank[number] for rank in by_rank], model, size)
            except AssertionError as error:
                raise AssertionError(f"{layout_of(schedule, size)}, {model}: {error}") from error


def test_the_sample_has_every_schedule():
    assert {schedule for (_, schedule), _ in SAMPLE} == set(TABLE)


def test_schedules_have_the_bits_of_one_process():
    check(SAMPLE, {2: SHALLOW, 4: SHORT})


@pytest.mark.grid
def test_padded_layers_and_recomputation_have_the_bits_of_one_process():
    cases = [((2, name), model) for name, model in (("zb-1p", "fp32 tied"), ("zbv", "bf16 untied"))]
    check([*cases, ((2, "v-half"), "fp32 tied")], {2: PADDED})
    check([((2, "zbv"), "fp32 tied")], {2: SPARSE})


@pytest.mark.full
@pytest.mark.parametrize("size", [PADDED, SPARSE])
def test_every_schedule_with_padded_layers_has_the_bits_of_one_process(size):
    check([(schedule, model) for schedule in SCHEDULES for model in MODELS], {2: size, 4: size})


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_has_the_bits_of_one_process(model, pp):
    check([(schedule, model) for schedule in SCHEDULES], {pp: FULL})


def test_dropout_and_clipping_act():
    """What the comparison above would not show if both sides lacked it."""
    model = "fp32 tied"
    with_dropout = in_one_process(model, SHALLOW)
    (without,) = run_ranks(run_cases, 1, [(Layout(), [*MODELS[model], *NO_DROPOUT])], SHALLOW)[0]
    assert with_dropout.losses[0] != without.losses[0]
    assert min(with_dropout.norms) > CLIP
