"""Runs by --rank-memory-limit equal one process to 1e-10 in fp64, also where the limit moves W's, does them in parts,
or fuses them with their B's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.ir import BW, B, W
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from tests.harness.layouts import CLIP, NO_DROPOUT, Layout, Run, assembled, plan_ahead, train_run
from tests.harness.ranks import run_ranks
from tests.parity.test_one_plan import STEPS, UNTIED, plain_run

WORDS = ("--num-layers", "4", "--fp64", *NO_DROPOUT, UNTIED)
FSDP = ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
GLOBAL_BATCH = 16
# (schedule, chunks, bytes): from just enough to plenty.
CASES = [
    ("zb-1p", 1, 780_000),
    ("zb-1p", 1, 3_000_000),
    ("zbv", 1, 835_000),
    ("zb-1p", 1, 655_000),
    ("zb-h1", 1, 770_000),
    ("zb-h1", 1, 3_000_000),
    ("zbv", 1, 700_000),
    ("gis", 2, 690_000),
    ("gis", 2, 1_000_000),
    ("1f1b", 1, 720_000),
]


def layout_of(schedule, chunks, limit):
    limited = ("--rank-memory-limit", str(limit), "--dp-bandwidth-gb-per-s", "0.02")
    return Layout(
        pp=2, dp=2, schedule=schedule, chunks=chunks, more=(*FSDP, *limited, "--clip-grad", str(CLIP))
    )


def run_cases(ctx, cases):
    torch.set_num_threads(1)
    found = []
    for case in cases:
        run = Run(ctx, layout_of(*case), WORDS, global_batch=GLOBAL_BATCH)
        one = train_run(run, STEPS)
        row = plan_for(run.runner.spec, run.num_microbatches, PlanPurpose.TRAIN).rows[run.ps.pp_rank]
        kinds = frozenset(op[0] for op in row if op[0] in (B, BW, W))
        in_parts = any(op[0] == W and op[4] >= 0 for op in row)
        found.append((one.losses, one.norms, one.weights, kinds, in_parts))
    return found


def check(cases):
    losses, norms, weights = plain_run(WORDS, GLOBAL_BATCH, CLIP)
    for case in cases:
        plan_ahead(layout_of(*case), WORDS, global_batch=GLOBAL_BATCH)
    by_rank = run_ranks(run_cases, 4, cases, timeout=600)
    for number, case in enumerate(cases):
        results = [rank[number] for rank in by_rank]
        for ours, our_norms, *_ in results:
            np.testing.assert_allclose(ours, losses, rtol=0, atol=1e-10, err_msg=str(case))
            np.testing.assert_allclose(our_norms, norms, rtol=0, atol=1e-10, err_msg=str(case))
        whole = assembled([one[2] for one in results])
        for name, expected in weights.items():
            assert np.abs(whole[name] - expected).max() < 1e-10, (case, name)
    return [one for rank in by_rank for one in rank]


@pytest.mark.grid
def test_limited_runs_equal_one_process():
    ran = check(CASES[:3])
    assert any(kinds == {B, BW, W} for *_, kinds, _ in ran), "no plan has fused and split backwards"
    assert any(in_parts for *_, in_parts in ran), "no plan has a W in parts"


@pytest.mark.full
def test_all_limited_runs_equal_one_process():
    check(CASES)
