"""Ranks that were started differently, or cannot meet, say so at once: before any group is made, where they would wait
for each other until the timeout."""

import re

import pytest

from tests.harness import launch

ODD = "tests/functional_tests/trainers/odd_start.py"
FOUR = [*launch.TINY, "--train-iters", "2"]  # a timeout of ten minutes, which no test waits for
THREE = [*FOUR, "--global-batch-size", "12"]


def start(tmp_path, more, *, ranks=2, odd_rank=1, flags=FOUR, **variables):
    """A run whose odd rank has more flags, or variables of its own."""

    def of_rank(rank):
        return {"MORE_FLAGS": more, **variables} if rank == odd_rank else {}

    return launch.run_forked(flags, ranks=ranks, script=ODD, cwd=tmp_path, rank_env=of_rank)


def unlike(run, text):
    launch.ended(run, 2)
    assert "Traceback" not in run.output
    assert text in run.output, run.output
    return run


@pytest.mark.parametrize(
    ("ranks", "more", "told"),
    [
        (2, "--tensor-model-parallel-size 2", "tensor_model_parallel_size: rank 1 has 2, rank 0 1"),
        (4, "--pipeline-model-parallel-size 2", "pipeline_model_parallel_size: rank 1 has 2, rank 0 1"),
        (2, "--distributed-timeout-minutes 1", "distributed_timeout_minutes: rank 1 has 1, rank 0 10"),
    ],
)
def test_flags_that_make_other_groups_are_named(tmp_path, ranks, more, told):
    run = unlike(start(tmp_path, more, ranks=ranks), told)
    assert run.output.count("the ranks were not started alike") == 1, "one rank of the machine says it"
    assert "  configuration:" not in run.output


def test_a_rank_number_used_twice(tmp_path):
    run = start(tmp_path, "", ranks=3, odd_rank=2, flags=THREE, RANK="1")
    unlike(run, "RANK=1 was given to two processes of one launch: process ")


def test_other_world_sizes(tmp_path):
    unlike(start(tmp_path, "", WORLD_SIZE="4"), "WORLD_SIZE: rank 1 has 4, rank 0 2")


def test_a_rank_that_never_comes_is_named(tmp_path):
    """Refused by its own flags: the others are told who is missing, well before a collective would give up."""
    faulty = "tests/functional_tests/trainers/faulty.py"
    flags = [*THREE, "--timeout-s", "1.5"]

    def refused(rank):
        return {"WORLD_SIZE": "nonsense"} if rank == 2 else {}

    run = launch.run_forked(flags, ranks=3, script=faulty, cwd=tmp_path, rank_env=refused)
    assert run.statuses == (6, 6, 2), run.output
    assert run.output.count("rank 2 has not come") == 2
    assert "Traceback" not in run.output


def test_rank_0_never_comes(tmp_path):
    faulty = "tests/functional_tests/trainers/faulty.py"

    def refused(rank):
        return {"WORLD_SIZE": "nonsense"} if rank == 0 else {}

    flags = [*FOUR, "--timeout-s", "1"]
    run = launch.run_forked(flags, ranks=2, script=faulty, cwd=tmp_path, rank_env=refused)
    assert run.statuses == (2, 6), run.output
    assert re.search(
        r"rank 0 has not come: nobody listens at MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+", run.output
    )


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set, or empty"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: expected a free port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: expected a free port"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT=-1: expected a free port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is no integer"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR='no.such.host.invalid' is no host"),
        ({"WORLD_SIZE": "9" * 12}, f"WORLD_SIZE={'9' * 12}: at most 262144 ranks"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, or empty"),
    ],
)
def test_variables_that_name_no_place_to_meet(tmp_path, variables, told):
    env = {"ANSWER_S": "0.1", **variables}
    run = launch.run_forked(FOUR, ranks=2, script=ODD, cwd=tmp_path, env=env)
    launch.ended(run, 2)
    assert run.output.count(told) == 2, run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("kind", ["silence", "words"])
def test_a_port_that_is_taken(tmp_path, kind):
    """Rank 0 cannot listen; the others find what is no store, and do not wait for its answer."""
    with launch.forked(
        FOUR,
        ranks=2,
        script=ODD,
        cwd=tmp_path,
        env={"ANSWER_S": "0.5"},
        rank_env=lambda rank: {"PORT_OF": kind} if rank == 1 else {"WAITS_FOR_PORT": "1"},
    ) as group:
        run = launch.ended(group.wait(), 2)
    assert re.search(r"MASTER_PORT=\d+ is taken by another process .*: choose another port", run.output)
    assert re.search(
        r"rank 1 finds no store of a launch at MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+", run.output
    )
    assert len(run.output.strip().splitlines()) == 2, run.output
