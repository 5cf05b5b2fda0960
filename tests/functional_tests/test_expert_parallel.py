"""Runs whose experts lie over ranks: what is stopped goes on with the same bits, schedules agree, and a lost peer is
named by the exchange that missed it."""

from __future__ import annotations

import re
import signal

import pytest

from tests.functional_tests.test_experts import EXPERTS, RUN
from tests.functional_tests.test_resume import assert_bit_for_bit
from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty_collectives.py"
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
TWO = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
HFSDP = f"{FSDP} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"
STAGES = f"--pipeline-model-parallel-size 2 {TWO}"


@pytest.mark.grid
@pytest.mark.parametrize(
    ("ranks", "more"), [(2, TWO), (4, f"{TWO} {FSDP} --bf16"), (4, f"{TWO} {HFSDP}")]
)  # the last: experts' ranks are as many as instances, so they are cut otherwise than dense layers
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks, more, tmp_path):
    length = "--train-iters 12 --lr-decay-style cosine --lr-decay-iters 12".split()
    assert_bit_for_bit(tmp_path, ranks, [*length, *EXPERTS, *more.split()])


@pytest.mark.grid
@pytest.mark.parametrize(
    "more",
    [
        "--enable-zero-bubble",
        "--zero-bubble-v-schedule",
        "--enable-zero-bubble --enable-optimizer-post-validation --post-validation-after 0 --clip-grad 1.0",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
)
def test_schedules_have_the_bits_of_1f1b(more, tmp_path):
    layers = "--num-layers 4"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    clip = "--clip-grad 1.0"
    expected = saved(tmp_path / "a", 4, f"{STAGES} {layers} {clip}")
    assert saved(tmp_path / "b", 4, f"{STAGES} {layers} {clip} {more}") == expected


@pytest.mark.grid
def test_a_peer_that_is_lost_in_an_exchange_is_named_with_it(tmp_path):
    """Its second call over the group: behind the counts, the rows of the first layer."""
    fault = "--fault-at ep_etp:2 --fault-iteration 3 --save-interval 2"
    words = [*RUN, *TWO.split(), *fault.split()]
    run = launch.run_forked(words, ranks=2, script=FAULTY, cwd=tmp_path)
    assert run.statuses == (6, -signal.SIGKILL), run.output
    told = r"rank 0: .*iteration 3, .*lost a peer in all_to_all over group 'ep_etp' \(ranks \[0, 1\]\)"
    assert re.search(told, run.output), run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"], record["checkpoint"]) == (6, True, "ck/iter_0000002")


def saved(folder, ranks, more):
    """SHA-256 of every tensor behind four steps."""
    launch.ok(launch.run_forked([*RUN, *more.split()], ranks=ranks, cwd=folder))
    return launch.digests(folder / "ck", 4)
