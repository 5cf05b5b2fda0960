"""What is said of weights and gradients in a plan."""

import dataclasses
import json

from megatron.core.pipeline_parallel.plan.planned_residency import (
    HeldBytes,
    RankResidency,
    StepMoves,
    StepResidency,
    start_up_lines,
)
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.sharding_table import ShardPlace
from megatron.training.report.metrics_file import MetricsFile, read_metrics

MIB = 2**20
HELD = HeldBytes(at_rest=3 * MIB, gathered=MIB, gradients=MIB // 2, activations=6 * MIB)
HELD_TEXT = "10.5 MiB (at rest 3 MiB, gathered 1 MiB, gradients 512 KiB, activations 6 MiB)"
MOVES = StepMoves(
    24, 1, 0, 0, 45 * MIB, lane_share=0.61, exposed_share=0.032
)  # of a plan without measured costs
STATES = dataclasses.replace(HELD, activations=None)
PLANNED = RankResidency(1, HELD, STATES, 7 * MIB, MOVES)
STEP = StepResidency(
    120,
    PLANNED,
    dataclasses.replace(STATES, gathered=2 * MIB),
    8 * MIB,
    dataclasses.replace(MOVES, gathers=23, exposed_share=0.05, step_s=0.4),
)


def test_start_up():
    line, moved = start_up_lines(
        "zbv", Residency("optim_grads_params"), ShardPlace(inner_size=2).groups, PLANNED
    )
    assert line == (
        " > residency: zbv, optim_grads_params over 2 ranks, policy memory; "
        f"pipeline rank 1 holds the most at once: {HELD_TEXT}"
    )
    assert moved == (
        " > a step moves on pipeline rank 1: 24 gathers, 1 reduction, 45 MiB, lane busy 61.00%, exposed 3.20%"
    )
    unknown = RankResidency(0, STATES, STATES, None, MOVES)
    line, _ = start_up_lines(
        "1f1b", Residency("optim", policy="step"), ShardPlace(outer_size=4).groups, unknown
    )
    assert line.startswith(" > residency: 1f1b, optim over 1 rank in 4 instances, policy step; ")
    assert "holds the most at once, activations apart, which are not known: 4.5 MiB (at rest" in line


def test_instances_are_told_where_there_are_any():
    moves = StepMoves(6, 6, 3, 1, 1024)
    assert str(moves) == "6 gathers, 6 reductions, 3 HSDP all-gathers, 1 HSDP all-reduce, 1 KiB"


def test_each_interval_says_plan_and_measurement():
    held, activations, moved = STEP.lines()
    assert held == (
        " residency of iteration 120, pipeline rank 1: weights and gradients at once: planned 4.5 MiB (at rest 3 MiB, "
        "gathered 1 MiB, gradients 512 KiB); measured 5.5 MiB (at rest 3 MiB, gathered 2 MiB, gradients 512 KiB)"
    )
    assert activations == (
        " activations of iteration 120, pipeline rank 1: at most: planned 7 MiB; measured 8 MiB"
    )
    unmeasured = dataclasses.replace(STEP, measured_activations=None)
    assert unmeasured.lines()[1].endswith(": at most: planned 7 MiB; not measured")
    unknown = dataclasses.replace(STEP, planned=PLANNED._replace(activations=None))
    assert [line.split()[0] for line in unknown.lines()] == ["residency", "moves"]
    assert moved == (
        " moves of iteration 120, pipeline rank 1: planned 24 gathers, 1 reduction, 45 MiB, lane busy 61.00%, "
        "exposed 3.20%; measured 23 gathers, 1 reduction, 45 MiB, lane busy 61.00%, exposed 5.00% (20 ms)"
    )


def test_the_record_has_the_same(tmp_path):
    scalars = STEP.scalars()
    record = MetricsFile(tmp_path / "metrics.jsonl")
    record.record(scalars, step=120, samples=960)
    record.close()
    (line,) = read_metrics(record.path)
    assert {key: line[key] for key in line.keys() - {"iteration", "time", "consumed_samples"}} == {
        "planned-held-bytes": 4.5 * MIB,
        "planned-at-rest-bytes": 3 * MIB,
        "planned-gathered-bytes": MIB,
        "planned-gradients-bytes": MIB / 2,
        "planned-activations-bytes": 7 * MIB,
        "planned-gathers": 24,
        "planned-reductions": 1,
        "planned-hsdp-all-gathers": 0,
        "planned-hsdp-all-reduces": 0,
        "planned-moved-bytes": 45 * MIB,
        "planned-lane-share": 0.61,
        "planned-exposed-share": 0.032,
        "measured-held-bytes": 5.5 * MIB,
        "measured-at-rest-bytes": 3 * MIB,
        "measured-gathered-bytes": 2 * MIB,
        "measured-gradients-bytes": MIB / 2,
        "measured-activations-bytes": 8 * MIB,
        "measured-gathers": 23,
        "measured-reductions": 1,
        "measured-hsdp-all-gathers": 0,
        "measured-hsdp-all-reduces": 0,
        "measured-moved-bytes": 45 * MIB,
        "measured-lane-share": 0.61,
        "measured-exposed-share": 0.05,
        "measured-exposed-time": 0.05 * 0.4,
    }
    assert json.loads(json.dumps(scalars)) == scalars
