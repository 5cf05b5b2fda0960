"""Tensor x pipeline x data parallel layouts and schedules against the plain PyTorch GPT.

fp64: loss, norm and every gradient to 1e-10. The comparison bit for bit with one process is in test_schedules_bitwise.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from tests.harness.layouts import NO_DROPOUT, Layout, assembled, microbatch, reference_config, train
from tests.harness.ranks import run_ranks
from tests.harness.reference_gpt import ReferenceGPT

GPT: list[str] = []
LLAMA = [
    *"--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights".split(),
]
EXACT = ["--fp64", *NO_DROPOUT]


def schedules(pp: int) -> list[dict[str, object]]:
    if pp == 1:
        return [{}]
    return [{"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2}]


OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")
SHARDED = ("--use-distributed-optimizer",)
# Schedules that split backwards with everything that hears of weight gradients, or communicates in B or W.
ZERO_BUBBLE = [
    Layout(tp=2, sp=True, pp=2, schedule="zbv"),
    Layout(tp=2, pp=2, schedule="zb-1p"),
    Layout(tp=2, sp=True, pp=2, schedule="v-half"),
    Layout(pp=2, dp=2, schedule="zb-1p", more=OVERLAP),
    Layout(pp=2, dp=2, schedule="zbv", more=(*OVERLAP, *SHARDED)),
    Layout(pp=2, dp=2, schedule="v-half", more=(*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")),
]
NEW_SCHEDULES = ("zb-h1", "zb-h2", "zb-1p", "zb-2p", "zbv", "v-half", "v-min", "1f1b-v", "dualpipe-v", "gis")
EVERY_ZERO_BUBBLE = [
    Layout(tp=tp, sp=sp, pp=2, dp=4 // tp, schedule=schedule, chunks=2 if schedule == "gis" else 1, more=more)
    for schedule in NEW_SCHEDULES
    for tp, sp in ((1, False), (2, False), (2, True), (4, True))
    for more in ((), OVERLAP, SHARDED, (*OVERLAP, *SHARDED))
    if 4 // tp > 1 or not more
]
RECOMPUTED = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)
PADDING = ("--allow-padding-num-layers", "--use-distributed-optimizer")
SELECTIVE = ("--recompute-granularity", "selective")
# Longer pipelines, and what B recomputes.
DEEP_ZERO_BUBBLE = [
    Layout(
        tp=tp,
        sp=sp,
        pp=pp,
        dp=8 // (tp * pp),
        schedule=schedule,
        chunks=2 if schedule == "gis" else 1,
        more=more,
    )
    for schedule in NEW_SCHEDULES
    for tp, sp, pp, more in (
        (2, False, 4, ()),
        (2, True, 4, RECOMPUTED),
        (1, False, 4, (*OVERLAP, *SHARDED, *SELECTIVE)),
        (1, False, 8, RECOMPUTED),
        (1, False, 8, ()),
    )
]


def layouts(world_size: int) -> list[Layout]:
    """Every factorisation into TP x PP x DP, with and without sequence parallel, under every schedule."""
    sizes = range(1, world_size + 1)
    return [
        Layout(tp=tp, pp=pp, dp=world_size // (tp * pp), sp=sp, **schedule)
        for tp, pp in itertools.product(sizes, sizes)
        if world_size % (tp * pp) == 0
        for sp in ([False, True] if tp > 1 else [False])
        for schedule in schedules(pp)
    ]


def size_of(layout: Layout) -> tuple[int, int]:
    """As few layers and microbatches as the layout can do with: 8 ranks share two cores here."""
    chunks = max(layout.chunks, 2 if SCHEDULES[layout.schedule].placement == "v" else 1)
    fewest = 2 * layout.pp if layout.schedule == "dualpipe-v" else max(2, layout.pp)
    return max(2, layout.pp * chunks), fewest * layout.dp


def reference_step(words, global_batch, weights):
    """Mean loss of the first global batch and its gradients, in fp64."""
    model = ReferenceGPT(reference_config(words)).double()
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    model.load_state_dict(tensors, strict=False)
    missing = {name for name, _ in model.named_parameters()} ^ set(tensors)
    assert not missing, missing
    total = 0.0
    for index in range(global_batch):
        batch = microbatch(1, index)
        loss = model(batch["tokens"], labels=batch["labels"]).mean() / global_batch
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def assert_equals_reference(words, global_batch, results):
    """results: Trained of each rank."""
    loss, grads = reference_step(words, global_batch, assembled([rank.initial for rank in results]))
    for rank in results:
        assert abs(rank.losses[0] - loss) < 1e-10
    ours = assembled([rank.grads for rank in results])
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    assert abs(results[0].norms[0] - norm) < 1e-10
    assert {rank.norms[0] for rank in results} == {results[0].norms[0]}
    for name, expected in grads.items():
        difference = np.abs(ours[name] / global_batch - expected).max()
        assert difference < 1e-10, f"{name}: {difference}"


def check_all(ctx, cases):
    return [train(ctx, layout, words, global_batch=batch) for layout, batch, words in cases]


def all_equal_reference(layouts, words, num_layers=None):
    """num_layers: of all; as few as each layout can do with where it is not given."""
    sizes = [size_of(layout) for layout in layouts]
    words_of = [[*words, "--num-layers", str(num_layers or fewest)] for fewest, _ in sizes]
    cases = [
        (layout, batch, words) for layout, (_, batch), words in zip(layouts, sizes, words_of, strict=True)
    ]
    by_rank = run_ranks(check_all, layouts[0].world_size, cases, timeout=300)
    for number, (layout, batch, flags) in enumerate(cases):
        try:
            assert_equals_reference(flags, batch, [rank[number] for rank in by_rank])
        except AssertionError as error:
            raise AssertionError(f"{layout}, {flags}: {error}") from error


@pytest.mark.grid
def test_every_layout_of_four_ranks_equals_the_reference():
    all_equal_reference(layouts(4), [*GPT, *EXACT])


@pytest.mark.grid
def test_zero_bubble_schedules_of_four_ranks_equal_the_reference():
    all_equal_reference(ZERO_BUBBLE, [*GPT, *EXACT])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (GPT, [Layout(tp=4, sp=True), Layout(tp=2, pp=2)]),
        (LLAMA, [Layout(tp=2, dp=2, more=SHARDED), Layout(tp=2, pp=2, schedule="zbv")]),
    ],
    ids=["gpt", "llama"],
)
def test_a_vocabulary_that_the_ranks_do_not_divide_equals_the_reference(model, layouts):
    """Of 65 ids, four ranks hold 17, 17, 17 and 14: the plain GPT has no further row, either."""
    all_equal_reference(layouts, [*model, *EXACT, "--padded-vocab-size", "65"])


@pytest.mark.full
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_zero_bubble_schedule_of_eight_ranks_equals_the_reference(model):
    all_equal_reference(EVERY_ZERO_BUBBLE, [*model, *EXACT])


@pytest.mark.full
@pytest.mark.parametrize("schedule", NEW_SCHEDULES)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_zero_bubble_schedules_of_deep_pipelines_equal_the_reference(model, schedule):
    mine = [layout for layout in DEEP_ZERO_BUBBLE if layout.schedule == schedule]
    all_equal_reference(mine, [*model, *EXACT])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_padded_layers_equal_the_reference(model):
    """Fewer layers than stages: some hand on what they get."""
    layouts = [
        Layout(
            tp=2, sp=True, pp=2, dp=2, schedule=schedule, chunks=2 if schedule == "gis" else 1, more=PADDING
        )
        for schedule in NEW_SCHEDULES
    ]
    all_equal_reference(layouts, [*model, *EXACT], num_layers=3)


REPEATED = [
    Layout(tp=4, sp=True),
    Layout(tp=2, pp=2, schedule="interleaved", chunks=2),
    Layout(tp=2, sp=True, dp=2, more=("--overlap-grad-reduce", "--ddp-bucket-size", "2000")),
    Layout(pp=2, dp=2, schedule="gpipe", more=("--overlap-grad-reduce", "--ddp-bucket-size", "2000")),
    Layout(pp=2, dp=2, schedule="zbv", more=("--overlap-grad-reduce", "--ddp-bucket-size", "2000")),
]


def train_twice(ctx):
    return [
        [
            train(ctx, layout, ["--num-layers", str(size_of(layout)[0])], global_batch=4, steps=2)
            for _ in range(2)
        ]
        for layout in REPEATED
    ]


@pytest.mark.grid
def test_a_run_repeated_at_one_layout_has_the_same_bits():
    by_rank = run_ranks(train_twice, 4, timeout=120)
    for number, layout in enumerate(REPEATED):
        first, second = ([rank[number][run] for rank in by_rank] for run in (0, 1))
        assert [rank.losses for rank in first] == [rank.losses for rank in second], layout
        assert [rank.norms for rank in first] == [rank.norms for rank in second], layout
        for kind in ("grads", "weights"):
            one, other = (assembled([getattr(rank, kind) for rank in run]) for run in (first, second))
            for name, values in one.items():
                assert np.array_equal(values, other[name]), f"{layout}: {kind} of {name}"


@pytest.mark.full
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_layout_of_eight_ranks_equals_the_reference(model):
    all_equal_reference(layouts(8), [*model, *EXACT])
