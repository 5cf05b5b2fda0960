"""Whole runs over stages and tensor parallel ranks: what they print, compute and save against one process.

A pipeline adds nothing to the arithmetic: its runs are compared bit for bit, with the run of as many data and tensor
parallel ranks. Tensor parallel ranks add parts of sums in another order: theirs are compared with a tolerance.
"""

import json
import re

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.pipeline_parallel.plan.held.units import groups_of
from tests.harness import launch
from tests.harness.runs import assert_same_bits, assert_same_but_for_rounding, runs_of
from tools import show_schedule
from tools.schedules.overlay import chosen_step

FAULTY = "tests/functional_tests/trainers/faulty.py"
PLAIN = "tests/functional_tests/trainers/plain_pipeline.py"
BASE = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 4 --save ck --save-interval 4".split(),
]
LOGGED = "--eval-interval 2 --eval-iters 2 --log-num-zeros-in-grad --log-params-norm"
PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
PP3, PP4 = "--pipeline-model-parallel-size 3", "--pipeline-model-parallel-size 4"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
CHUNKS = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
ENDS = " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
# Tensor parallel ranks talk in every layer: two microbatches a step instead of four, one of an evaluation.
SHORT = f"{LOGGED} --global-batch-size 4 --eval-iters 1 --train-iters 3 --save-interval 3"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs_of(
        BASE,
        tmp_path_factory.mktemp,
        left_out_with_data=("--mock-data", "--no-create-attention-mask-in-dataloader"),
    )


# --- pipelines


@pytest.mark.grid
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, PP2),
        pytest.param(2, f"{PP2} --pipeline-schedule gpipe", marks=pytest.mark.grid),
        (2, CHUNKS),
        pytest.param(  # the last group is of one
            2, f"{CHUNKS} --microbatch-group-size-per-virtual-pipeline-stage 3", marks=pytest.mark.grid
        ),
        pytest.param(4, PP4, marks=pytest.mark.full),
        pytest.param(4, f"{PP4} --pipeline-schedule gpipe", marks=pytest.mark.full),
    ],
)
def test_a_pipeline_is_one_process_bit_for_bit(run, ranks, flags):
    """Losses, norms, zeros, parameters' norm, evaluations, and every tensor of the checkpoint."""
    assert_same_bits(run(1, LOGGED), run(ranks, f"{LOGGED} {flags}"))


@pytest.mark.grid
def test_what_a_pipeline_says(run):
    one, two, looped = run(1, LOGGED), run(2, f"{LOGGED} {PP2}"), run(2, f"{LOGGED} {CHUNKS}")
    assert len(one.validation) == 4
    assert "num zeros: " in two.lines[0]
    assert "params norm: " in two.lines[0]
    counts = {
        what.output: dict(
            re.findall(
                r"parameters on \(tensor, pipeline\) model parallel rank \((\d, \d)\): (\d+)", what.output
            )
        )
        for what in (one, two)
    }
    whole, parts = (list(map(int, count.values())) for count in counts.values())
    assert len(parts) == 2
    assert sum(parts) == whole[0] + 128 * 32  # both ends hold the tied embedding
    for what in (
        one,
        two,
        looped,
        run(2, f"{SHORT} {NO_DROPOUT} {TP2}"),
    ):  # the record has every parameter once
        start = json.loads((what.folder / "ck" / "metrics.jsonl").read_text().splitlines()[0])
        assert start["parameters"] == whole[0]
    assert " > stages: 2 of 2 layers; embedding on stage 0, loss on stage 1\n" in two.output
    assert (
        " > stages: 4 of 1 layer, 2 on each of 2 pipeline ranks; embedding on stage 0, loss on stage 3\n"
        in looped.output
    )
    plans = [two.plan, looped.plan]
    assert [plan["schedule"] for plan in plans] == ["1f1b", "interleaved"]
    assert plans[0]["ops_per_rank"] == [{"F": 4, "B": 0, "W": 0, "BW": 4}] * 2
    assert plans[1]["ops_per_rank"] == [{"F": 8, "B": 0, "W": 0, "BW": 8}] * 2
    assert plans[0]["hash"] != plans[1]["hash"]
    assert (
        len(set(plans[0]["persistent_bytes_per_rank"])) == 2
    )  # positions on the first, the last norm on the last


@pytest.mark.grid
def test_who_prints_and_who_reads(tmp_path):
    """The last rank prints the iterations; only the first and the last stage draw samples."""
    words = [*BASE, *PP4.split(), "--record-samples", "samples", "--tag-lines"]
    output = launch.ok(launch.run_forked(words, ranks=4, script=FAULTY, cwd=tmp_path)).output
    assert re.findall(r"^(\d): .*iteration +\d+/", output, re.MULTILINE) == ["3"] * 4
    assert set(re.findall(r"^(\d): .*(?:saving|successfully saved) ", output, re.MULTILINE)) == {"0"}
    read = [json.loads(line)["index"] for line in (tmp_path / "samples").read_text().splitlines()]
    assert sorted(read) == sorted([*range(32)] * 2)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("ranks", "flags", "lines"),
    [
        (2, f"{PP2} --decoder-first-pipeline-num-layers 1",
         ["stage 0 on pipeline rank 0: embedding, layer 0", "stage 1 on pipeline rank 1: layers 1-3, loss"]),
        (3, f"{PP3} --decoder-last-pipeline-num-layers 2",
         ["stage 1 on pipeline rank 1: layer 1", "stage 2 on pipeline rank 2: layers 2-3, loss"]),
        (3, f"{PP3} --pipeline-model-parallel-layout Ettt||tL",
         ["stage 1 on pipeline rank 1: no layers"]),
        (2, f"{PP2} --pipeline-model-parallel-layout E|tt||ttL",
         ["stage 0 on pipeline rank 0: embedding, no layers", "stage 2 on pipeline rank 0: no layers"]),
        (3, f"{PP3}{ENDS}",
         ["stage 0 on pipeline rank 0: embedding, layer 0", "stage 1 on pipeline rank 1: layers 1-2"]),
        (3, f"{PP3} --allow-padding-num-layers",
         ["stage 0 on pipeline rank 0: embedding, layer 0", "stage 1 on pipeline rank 1: layers 1-2",
          "stage 2 on pipeline rank 2: layer 3, loss"]),
    ],
)  # fmt: skip
def test_layer_splits(run, ranks, flags, lines):
    split = run(ranks, f"{LOGGED} {flags}")
    for line in lines:
        assert f" > {line}\n" in split.output
    assert_same_bits(run(1, LOGGED), split)


PRECISION = {
    "fp16": (
        "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2 --train-iters 6 --save-interval 6"
    ),
    "bf16, untied, per token, recomputed": (
        "--bf16 --untie-embeddings-and-output-weights --calculate-per-token-loss --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", PRECISION)
@pytest.mark.parametrize("flags", [PP2, pytest.param(CHUNKS, marks=pytest.mark.full)])
def test_precision_and_losses(run, name, flags):
    one, two = run(1, PRECISION[name]), run(2, f"{PRECISION[name]} {flags}")
    assert_same_bits(one, two)
    if name == "fp16":
        assert "number of skipped iterations:   1 " in two.lines[0]  # an overflow, skipped on both stages
        assert "number of skipped iterations:   0 " in two.lines[-1]


@pytest.mark.grid
def test_batch_ramp_up(run, tmp_path):
    """4, 6 and 8 samples a step: plans for 2, 3 and 4 microbatches."""
    flags = [*launch.TINY, *"--num-layers 4 --train-samples 40 --rampup-batch-size 4 2 16".split()]
    losses = [
        launch.ok(launch.run_forked([*flags, *more.split()], ranks=ranks, cwd=tmp_path)).losses()
        for ranks, more in ((1, ""), (2, PP2), (2, f"{PP2} --pipeline-schedule gpipe"))
    ]
    assert len(losses[0]) > 5
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Short documents, each with its end-of-document token."""
    folder = tmp_path_factory.mktemp("corpus")
    dice = np.random.default_rng(3)
    with IndexedDatasetWriter(str(folder / "corpus"), np.dtype("<u2")) as writer:
        for _ in range(200):
            writer.add_document(np.append(dice.integers(0, 126, dice.integers(5, 30)), 127))
    return folder / "corpus"


@pytest.mark.grid
def test_masks_reach_the_stages_between(run, corpus):
    """--reset-attention-mask: attention of every stage needs the mask, so every stage reads."""
    masked = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
    one, plain = run(1, masked, data=corpus), run(1, "", data=corpus)
    assert one.lines != plain.lines
    assert_same_bits(one, run(3, f"{masked} {PP3} --decoder-first-pipeline-num-layers 2", data=corpus))


@pytest.fixture(scope="module")
def odd_corpus(tmp_path_factory):
    """Five microbatches of validation: a step of four, and one that is left."""
    folder = tmp_path_factory.mktemp("corpus")
    dice = np.random.default_rng(4)
    with IndexedDatasetWriter(str(folder / "corpus"), np.dtype("<u2")) as writer:
        for _ in range(20):
            writer.add_document(dice.integers(0, 127, 32))
    return folder / "corpus"


@pytest.mark.grid
@pytest.mark.parametrize("flags", [PP2, CHUNKS])
def test_full_validation(run, odd_corpus, flags):
    """Also where the last microbatches are fewer than interleaving takes in turn."""
    whole = "--full-validation --eval-interval 2 --eval-iters 1 --split 45,55,0"
    one, two = run(1, whole, data=odd_corpus), run(2, f"{whole} {flags}", data=odd_corpus)
    assert len(one.validation) == 3
    assert_same_bits(one, two)


@pytest.mark.grid
def test_iterations_to_skip(run):
    flags = "--iterations-to-skip 2 3"
    assert_same_bits(run(1, flags), run(2, f"{flags} {PP2}"))


@pytest.mark.grid
def test_a_measured_timeline_beside_its_plan(run, capsys):
    """--log-pipeline-timeline: a file a rank, which the tool lays beside the plan; nothing else changes."""
    timed = run(2, f"{LOGGED} {PP2} --log-pipeline-timeline times")
    assert_same_bits(run(1, LOGGED), timed)
    assert len(list((timed.folder / "times").iterdir())) == 2
    words = ["--measured", str(timed.folder / "times"), "--iteration", "3", "--format", "json"]
    assert show_schedule.main(words) in (0, None)
    measured = json.loads(capsys.readouterr().out)
    assert (measured["iteration"], measured["hash"]) == (3, timed.plan["hash"])


@pytest.mark.grid
def test_a_timeline_says_what_gathers_and_reductions_are_about(run):
    flags = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
    timed = run(2, f"{LOGGED} {flags} --log-pipeline-timeline times")
    step = chosen_step(timed.folder / "times", None)
    assert (step.plan.residency.strategy, step.plan.residency.size_of("dp")) == ("optim_grads_params", 2)
    assert groups_of(step.lanes.stages)[0].size == 2
    assert step.at_rest == tuple(timed.plan["persistent_bytes_per_rank"][:1])
    assert sum(unit.activation for unit in step.lanes.stages[0].units) > 0
    assert step.lanes.costs.bandwidth > 1e3  # bytes a second


# --- a user's own modules


@pytest.mark.grid
@pytest.mark.parametrize("flags", [PP2, CHUNKS])
def test_a_plain_module_in_a_pipeline(run, flags):
    assert_same_bits(run(1, LOGGED, PLAIN), run(2, f"{LOGGED} {flags}", PLAIN))


# --- tensor, pipeline and data parallel ranks together


@pytest.mark.grid
def test_tensor_parallel_ranks(run):
    flags = f"{SHORT} {NO_DROPOUT}"  # masks of attention probabilities are each rank's own
    one = run(1, flags)
    two, sequence = run(2, f"{flags} {TP2}"), run(2, f"{flags} {TP2} --sequence-parallel")
    for other in (two, sequence):
        assert_same_but_for_rounding(one, other, rel=1e-4)


@pytest.mark.grid
def test_stages_add_nothing_to_tensor_parallel_ranks(run):
    flags = f"{SHORT} {TP2} --sequence-parallel"
    assert_same_bits(run(2, flags), run(4, f"{flags} {PP2}"))


@pytest.mark.grid
def test_stages_add_nothing_to_data_parallel_ranks(run):
    """Also with reductions that overlap backward, and with neighbouring stages on neighbouring ranks.

    Untied: a tied weight's two gradients are added before the sum over data parallel ranks, or after it between stages.
    """
    flags = f"{LOGGED} --untie-embeddings-and-output-weights"
    two = run(2, flags)
    assert_same_bits(two, run(4, f"{flags} {PP2}"))
    overlapped = f"{flags} {PP2} --use-tp-pp-dp-mapping --overlap-grad-reduce --ddp-bucket-size 4096"
    assert_same_bits(two, run(4, overlapped))


@pytest.mark.grid
def test_weights_that_are_filled_where_they_are(run):
    """--init-model-with-meta-device fills each rank's part with the bits of the whole."""
    flags = f"{SHORT} {NO_DROPOUT} {TP2}"
    assert_same_bits(run(2, flags), run(2, f"{flags} --init-model-with-meta-device"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, f"{TP2} {CHUNKS}"),
        (4, f"{TP2} {PP2} --use-tp-pp-dp-mapping --untie-embeddings-and-output-weights"),
        (8, f"{TP2} --sequence-parallel {PP2} --overlap-grad-reduce"),
        (8, f"{TP2} --sequence-parallel {PP2} --use-tp-pp-dp-mapping"),
    ],
)
def test_everything_together(run, ranks, flags):
    """The same losses as one process, but for rounding."""
    untied = "--untie-embeddings-and-output-weights" if "untie" in flags else ""
    same = f"{LOGGED} {NO_DROPOUT}"
    one, many = run(1, f"{same} {untied}"), run(ranks, f"{same} {flags}")
    for iteration, expected in one.numbers.items():
        assert many.numbers[iteration] == pytest.approx(expected, rel=1e-4), iteration
