"""Lines are read back with the expressions of a script that was written for Megatron's log."""

import json
import math
import re
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.machine import MemoryFigures
from megatron.training.report import metrics
from megatron.training.report.metrics import IntervalTotals, IterationRecord, iteration_line

WHEN = datetime(2026, 3, 4, 5, 6, 7, 89)
USER_LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{6})?\] iteration +(\d+)/ +(\d+) \| consumed "
    r"samples: +(\d+) \| "
    r"(?:skipped samples: +(\d+) \| )?"
    r"elapsed time per iteration \(ms\): ([\d.]+) \| (?:throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \| )?"
    r"(?:energy per GPU \(J/iter/GPU\): ([\d.]+) \| power per GPU \(W/GPU\): ([\d.]+) \| )?"
    r"learning rate: ([-+.\dE]+) \| (?:decoupled learning rate: ([-+.\dE]+) \| )?"
    r"global batch size: +(\d+) \| (?:lm loss: ([-+.\dE]+) \| )?(?:z_loss: ([-+.\dE]+) \| )?"
    r"loss scale: ([\d.]+) \| (?:grad norm: ([-+.\dE]+) \| )?(?:num zeros: (\d+) \| )?"
    r"(?:params norm: ([-+.\dE]+) \| )?"
    r"number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|$"
)


def record(**changes) -> IterationRecord:
    fields = {
        "iteration": 7,
        "train_iters": 100,
        "consumed_samples": 56,
        "elapsed_s": 0.12345,
        "learning_rate": 1.5e-4,
        "global_batch_size": 8,
        "losses": {"lm loss": 10.123456789},
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "when": WHEN,
    }
    return IterationRecord(**{**fields, **changes})


def test_iteration_line_is_megatrons_to_the_letter():
    assert iteration_line(record(grad_norm=12.3456789)) == (
        " [2026-03-04 05:06:07.000089] iteration        7/     100 | consumed samples:           56 | "
        "elapsed time per iteration (ms): 123.5 | learning rate: 1.500000E-04 | global batch size:     8 | "
        "lm loss: 1.012346E+01 | loss scale: 1.0 | grad norm: 1.234568E+01 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_docs_page_shows_the_real_lines():
    page = (Path(__file__).resolve().parents[3] / "docs" / "logging.md").read_text(encoding="utf-8")
    assert iteration_line(record(grad_norm=12.3456789)) in page
    assert metrics.validation_lines("iteration 40", {"lm loss": 2.0})[1] in page
    assert all(f"`{tag}`" in page for tag in metrics.iteration_scalars(record(tokens_per_s=1.0)))


def test_every_optional_field_in_its_place():
    line = iteration_line(
        record(
            skipped_samples=16,
            throughput_tflops=88.84,
            decoupled_learning_rate=2e-4,
            losses={"lm loss": 2.5, "z_loss": 0.25},
            loss_scale=65536.0,
            grad_norm=1.0,
            num_zeros=42,
            params_norm=123.0,
            skipped_iterations=3,
            nan_iterations=1,
        )
    )
    found = USER_LINE.match(line)
    assert found, line
    assert found.groups() == (
        *("7", "100", "56", "16", "123.5", "88.8", None, None, "1.500000E-04", "2.000000E-04", "8"),
        *("2.500000E+00", "2.500000E-01", "65536.0", "1.000000E+00", "42", "1.230000E+02", "3", "1"),
    )


@pytest.mark.parametrize(
    ("rate", "text"), [(0.0, "0.0"), (0.00223, "0.00223"), (1.234, "1.23"), (412.34, "412.3")]
)
def test_a_small_throughput_has_three_digits(rate, text):
    line = iteration_line(record(throughput_tflops=rate))
    assert f"| throughput per GPU (TFLOP/s/GPU): {text} |" in line
    assert USER_LINE.match(line)


@given(
    loss=st.floats(0, 1e4),
    norm=st.floats(0, 1e12),
    iteration=st.integers(0, 10**10),
    rate=st.floats(0, 1),
    elapsed=st.floats(0, 1e5),
)
def test_any_values_parse_and_keep_their_digits(loss, norm, iteration, rate, elapsed):
    line = iteration_line(
        record(
            losses={"lm loss": loss},
            grad_norm=norm,
            iteration=iteration,
            learning_rate=rate,
            elapsed_s=elapsed,
        )
    )
    found = USER_LINE.match(line)
    assert found, line
    assert int(found[1]) == iteration
    assert float(found[12]) == pytest.approx(loss, rel=1e-6)
    assert float(found[15]) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("loss", [math.nan, -0.5])
def test_nan_and_negative_losses_are_left_out(loss):
    assert "lm loss" not in iteration_line(record(losses={"lm loss": loss}))


def test_zero_loss_is_printed():
    assert "lm loss: 0.000000E+00 |" in iteration_line(record(losses={"lm loss": 0.0}))


def test_scalars_have_megatrons_tags():
    scalars = metrics.iteration_scalars(
        record(grad_norm=1.0, num_zeros=0, params_norm=2.0, throughput_tflops=3.0, tokens_per_s=99.0)
    )
    assert scalars["num-zeros"] == 0
    assert set(scalars) == {
        *("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm"),
        *("iteration-time", "throughput", "tokens-per-second", "skipped-iterations", "nan-iterations"),
    }
    assert "grad-norm" not in metrics.iteration_scalars(record())
    memory = metrics.memory_scalars(MemoryFigures(1, 2, 3, 4))
    assert memory == {"mem-allocated-bytes": 1, "mem-max-allocated-bytes": 2, "mem-reserved-bytes": 3}


def test_interval_loss_is_mean_over_non_skipped_iterations():
    totals = IntervalTotals()
    totals.add_iteration({"lm loss": (30.0, 10)}, tokens=16)
    totals.add_iteration({"lm loss": (math.inf, 10)}, skipped=True, tokens=16)
    totals.add_iteration({"lm loss": (7.0, 10)}, skipped=True)
    totals.add_iteration({"lm loss": (20.0, 20), "z_loss": (4.0, 8)}, tokens=16)
    assert totals.losses() == {"lm loss": 2.0, "z_loss": 0.5}
    assert (totals.iterations, totals.skipped_iterations, totals.nan_iterations, totals.tokens) == (
        4,
        2,
        1,
        48,
    )
    totals.reset()
    assert (totals.losses(), totals.iterations, totals.nan_iterations, totals.tokens) == ({}, 0, 0, 0)


def test_interval_without_loss_tokens_prints_no_loss():
    totals = IntervalTotals()
    totals.add_iteration({"lm loss": (0.0, 0)})
    assert math.isnan(totals.losses()["lm loss"])
    assert "lm loss" not in iteration_line(record(losses=totals.losses()))


def test_validation_lines():
    top, line, bottom = metrics.validation_lines("iteration 40", {"lm loss": 2.0})
    assert (
        line
        == " validation loss at iteration 40 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert top == bottom == "-" * (len(line) + 1)
    assert "on test set" in metrics.validation_lines("iteration 40 on test set", {"lm loss": 2.0})[1]
    named = metrics.validation_lines("iteration 4", {"lm loss": 50.0}, set_name="wiki")[1]
    assert named.startswith(" validation-wiki loss at iteration 4 |")
    assert f"PPL: {math.exp(20):.6E}" in named
    assert metrics.validation_scalars({"lm loss": 0.0}, set_name="1") == {
        "lm loss validation-1": 0.0,
        "lm loss validation-1 ppl": 1.0,
    }


def test_start_memory_checkpoint_and_exit_lines():
    place = metrics.PLACE.format(tp=2, tp_size=2, pp=1, pp_size=4)
    assert metrics.SAVED.format(iteration=40, directory="/ckpt", place=place).strip() == (
        "successfully saved checkpoint from iteration      40 to /ckpt [ t 2/2, p 1/4 ]"
    )
    assert metrics.LOADED.format(iteration=40, directory="/ckpt", place=place).strip() == (
        "successfully loaded checkpoint from /ckpt [ t 2/2, p 1/4 ] at iteration 40"
    )
    assert metrics.SAVING.format(iteration=40, directory="/ckpt", format="torch_dist").startswith(
        "saving checkpoint at iteration      40 to /ckpt"
    )
    assert metrics.PARAMETER_COUNT.format(tp_rank=0, pp_rank=1, count=1234) == (
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 1234"
    )
    assert (
        metrics.PADDED_VOCAB.format(size=257, dummies=127, padded=384)
        == " > padded vocab (size: 257) with 127 dummy tokens (new size: 384)"
    )
    memory = MemoryFigures(1 << 20, 2 << 20, 3 << 20, 4 << 20)
    assert metrics.memory_line(3, 10, memory) == (
        "[Rank 3] (after 10 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.00"
        " | max reserved: 4.00"
    )
    assert metrics.datetime_line("exiting program at iteration 9", WHEN).startswith(
        "[exiting program at iteration 9] datetime: 2026-03-04 "
    )
    assert metrics.THREADS.format(threads=1, cores="2 cores", ranks="2 local ranks", said_by="") == (
        " > threads per rank: 1 (2 cores, 2 local ranks)"
    )
    told = metrics.THREADS.format(
        threads=3, cores="2 cores", ranks="2 local ranks", said_by="; OMP_NUM_THREADS"
    )
    assert told == " > threads per rank: 3 (2 cores, 2 local ranks; OMP_NUM_THREADS)"
    lines = metrics.dataset_lines("GPT", {"train": 80, "validation": 8, "test": 0})
    assert lines[0] == "> building train, validation, and test datasets for GPT ..."
    assert lines[1] == " > datasets target sizes (minimum size):"
    assert [line.split() for line in lines[2:]] == [["train:", "80"], ["validation:", "8"], ["test:", "0"]]
    assert metrics.DATASETS_DONE.format(name="GPT") == "> finished creating GPT datasets ..."


def test_plan_line_is_json_without_what_is_empty():
    plan = {"schedule": "no-pipeline", "ops_per_rank": [{"F": 2, "BW": 2}], "post_validation": "off"}
    line = metrics.plan_line({**plan, "persistent_bytes_per_rank": (1024, 2048), "units_per_rank": ()})
    head, _, text = line.partition(" > plan: ")
    assert head == ""
    assert "\n" not in line
    assert json.loads(text) == {**plan, "persistent_bytes_per_rank": [1024, 2048]}


def test_plan_line_tells_units_where_weights_are_gathered():
    assert json.loads(metrics.plan_line({"units_per_rank": (3,)}).partition(" > plan: ")[2]) == {
        "units_per_rank": [3]
    }


def test_memory_is_told_with_its_time():
    assert metrics.memory_lines("after iteration 1", ["category live", "weights 12"]) == [
        " > bytes of the sharding engine on rank 0, after iteration 1:",
        "   category live",
        "   weights 12",
    ]
