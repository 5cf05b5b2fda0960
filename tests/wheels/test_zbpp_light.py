"""zbpp_light under real releases of megatron-core on CPU ranks: bits, refusals, failures (extras/proof).

Two ranks on the oldest release and on the newest that pip offers for Python 3.11; test_zbpp_light_everywhere.py has the
others and four ranks.
"""

import contextlib
import functools
import re

import pytest

from tests.wheels.release_processes import releases, started  # isort: split

import plans
import prove
from cases import EVERY

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
ON_RANKS = "zbpp_light_on_ranks"
AT_EACH_CI = (
    "gpt2 tied, DDP with overlap",
    "llama untied, distributed optimizer, per-token loss",
    "experts",
)


@pytest.fixture(scope="module")
def processes():
    """By release: a process, started once."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda release: stack.enter_context(started(release)))


@pytest.fixture(params=releases.AT_EACH_CI)
def process(processes, request):
    return processes(request.param)


@pytest.fixture(scope="module")
def newest(processes):
    """For what needs one release only."""
    return processes(releases.AT_EACH_CI[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where plans are saved, once for all cases that are as large."""
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize("name", AT_EACH_CI)
def test_training_has_the_bits_of_1f1b(process, name, folder):
    assert not prove.differences(EVERY[name], process, prove.SCHEDULES, folder)


def test_the_first_step_says_what_runs(process, tmp_path):
    assert re.search(
        r"zbpp_light: zb-2p, 2 stages, 4 microbatches, planned bubble 7.7% \(0.0% where ranks do not wait for each "
        r"other between steps; 1f1b 20.0%\); W computes [6-9]\d.\d% of the weights; waiting for W: at most 3 "
        r"microbatches by plan, at most 0.\d MiB measured \(stage [01]\)",
        process.said(),
    )


@pytest.fixture(scope="module")
def refusals(newest, folder):
    other = plans.arguments("zb-1p", 4, 8, folder)["plan"]
    first, second = newest.run(f"{ON_RANKS}:refusals", 2, other_plan=other)
    assert {**first, "runs then": 4, "within a step": 0} == {**second, "within a step": 0}, (
        "each rank is told all"
    )
    return second


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("virtual_pipeline_model_parallel_size", "is 2: virtual pipelines have a schedule of Megatron's own"),
        ("overlap_p2p_comm", "is True: it is of virtual pipelines"),
        ("enable_cuda_graph", "is True: CUDA graphs hold B and W together"),
        ("external_cuda_graph", "is True: CUDA graphs hold B and W together"),
        ("cuda_graph_impl", "is 'local': CUDA graphs hold B and W together"),
        ("defer_embedding_wgrad_compute", "is True: leave it out"),
        (
            "moe_use_legacy_grouped_gemm",
            "is True: its kernel computes B and W together: use sequential experts",
        ),
        ("overlap_moe_expert_parallel_comm", "is True: it is a schedule of Megatron's own"),
        ("variable_seq_lengths", "is True: receives are posted before their shapes are known"),
        ("cpu_offloading", "is True: it counts on the order of 1F1B"),
        ("mtp_num_layers", "is 1: "),
    ],
)
def test_what_is_refused_at_the_first_step(refusals, name, says):
    assert refusals[name].startswith(f"zbpp_light cannot run this training step:\n- {name} {says}")
    assert refusals[name].count("\n- ") == 1
    assert f"\n- {name} {says}" in refusals["all at once"]


def test_other_refusals(refusals):
    assert (
        refusals["patched twice"] == "zbpp_light: Megatron is patched already; call unpatch_megatron() first"
    )
    assert refusals["runs then"] == 4
    assert refusals["not patched"] == "zbpp_light: nothing is patched"
    assert refusals["within a step"] == [
        "zbpp_light: patch_megatron inside a running step: call it between steps",
        "zbpp_light: unpatch_megatron inside a running step: call it between steps",
    ]
    for what in ("a plan for 4 stages, this run has 2", "a plan for 8 microbatches a step, this run has 4"):
        assert what in refusals["a plan of other numbers"]
    assert "no linear layer of Megatron's" in refusals["no linear layer"]


def test_unpatch_gives_megatrons_functions_back(process):
    (found,) = process.run(f"{ON_RANKS}:identity", 1)
    module = "megatron.core.pipeline_parallel.schedules"
    assert found["patched"] == [
        f"{module}.forward_backward_pipelining_with_interleaving",
        f"{module}.forward_backward_pipelining_without_interleaving",
        "apply",
    ]
    assert found["left"] == []
    assert found["with ZBPP_LIGHT=0"] == []


def test_a_trainer_that_was_imported_before_gets_the_patch(newest):
    where = newest.run(f"{ON_RANKS}:imported_before", 2)
    assert len(set(where)) == 1
    assert where[0].endswith(" forward_backward_pipelining_without_interleaving")


def test_an_exception_in_forward_step_comes_out_and_ends_the_others(newest):
    first, last = newest.outcomes(f"{ON_RANKS}:fails_in_forward", 2, timeout=60)
    assert "ArithmeticError: planted in forward_step" in last["error"]
    assert "in forward_step" in last["error"]  # the user's own frames
    assert "in _planted" in last["error"] or "in <lambda>" in last["error"]
    assert first["died"] is None, "it would have been silent until the end"
    assert "Connection" in first["error"]


def test_a_killed_rank_ends_the_others(newest):
    first, last = newest.outcomes(f"{ON_RANKS}:killed", 2, timeout=60)
    assert last["died"] == "killed by SIGKILL"
    assert first["died"] is None
    assert "Connection" in first["error"]


def test_a_step_leaves_no_thread(newest):
    assert newest.run(f"{ON_RANKS}:threads_of_a_step", 2) == [[], []]
