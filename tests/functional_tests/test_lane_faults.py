"""A data parallel peer that dies or stops inside an operation of the plan: the others end with status 6 within the
timeout, and say which operation, which unit and which rank; the checkpoint goes on bit for bit."""

import dataclasses
import re
import signal
import time

import pytest

from tests.harness import launch

COLLECTIVES = "tests/functional_tests/trainers/faulty_collectives.py"
STEPS = "tests/functional_tests/trainers/faulty_steps.py"
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
ZBV = f"{FSDP} --pipeline-model-parallel-size 2 --pipeline-schedule zbv"
HSDP = f"{FSDP} --num-distributed-optimizer-instances 2"
FLAGS = [
    *launch.TINY,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 6 --save ck --save-interval 3 --load ck".split(),
    "--untie-embeddings-and-output-weights",
]
VICTIM = 1
TIMEOUT_S = 5.0
full = pytest.mark.full


@dataclasses.dataclass(frozen=True)
class Case:
    """at: the collective in which the rank goes away, by the purpose of its group and its number in the step.
    operation: of the plan."""

    flags: str
    at: str
    operation: str
    ranks: int = 4
    how: str = "kill"

    def __str__(self):
        return f"{self.how} in {self.at}"


GATHER = Case(ZBV, "dp_gather:3", "UNSHARD")
REDUCTION = Case(ZBV, "dp_reduce:3", "REDUCE")
OUTER_SUM = Case(HSDP, "dp_outer:2", "HSDP_ALL_REDUCE")
STOPPED = dataclasses.replace(GATHER, how="stop")
OTHERS = [
    *(dataclasses.replace(case, how="stop") for case in (REDUCTION, OUTER_SUM)),
    dataclasses.replace(GATHER, at="dp_gather:9"),
    dataclasses.replace(REDUCTION, flags=f"{ZBV} --fsdp-reshard-policy step"),
    dataclasses.replace(OUTER_SUM, flags=ZBV.replace(FSDP, HSDP), ranks=8),
]


def run_with_fault(folder, case):
    words = [*FLAGS, *case.flags.split(), "--fault-at", case.at, "--fault-how", case.how]
    if case.how == "stop":
        words += ["--timeout-s", str(TIMEOUT_S)]
    with launch.forked(words, ranks=case.ranks, script=COLLECTIVES, cwd=folder) as group:
        group.wait_for(f"rank {VICTIM} goes away")
        start = time.monotonic()
        survivors = [rank for rank in range(case.ranks) if rank != VICTIM]
        while any(group.alive(rank) for rank in survivors):
            assert time.monotonic() - start < 40.0, group.output
            time.sleep(0.05)
        if case.how == "stop":
            group.kill(VICTIM)
        return group.wait()


@pytest.mark.grid
@pytest.mark.parametrize(
    "case",
    [
        GATHER,
        *(pytest.param(case, marks=pytest.mark.grid) for case in (REDUCTION, OUTER_SUM, STOPPED)),
        *(pytest.param(case, marks=full) for case in OTHERS),
    ],
    ids=str,
)
def test_a_peer_goes_away_in_an_operation(tmp_path, case):
    run = run_with_fault(tmp_path, case)
    assert [status for rank, status in enumerate(run.statuses) if rank != VICTIM] == [6] * (case.ranks - 1)
    assert run.statuses[VICTIM] == -signal.SIGKILL
    told = re.findall(r"error \(peer lost, exit status 6\): (.*)", run.output)
    assert told, run.output
    unit = r"unit '[\w.+]+'"
    operation = rf"(\d{case.operation}(\[\d+:\d+\])?(\.\d+)?, |{case.operation} of ){unit}"
    place = rf"rank \d: .*{operation}: lost a peer in \w+ over group '\w+' \(ranks "
    assert any(re.match(rf"{place}\[[\d, ]*\b{VICTIM}\b", line) for line in told), told
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"], record["checkpoint"]) == (6, True, "ck/iter_0000003")
    assert f"rank {VICTIM}" in record["reason"], record["reason"]
    assert re.search(r"was planned to hold at most [\d.]+ [KM]iB, in [\w-]+; this machine", run.output), (
        run.output
    )
    assert "Traceback" not in run.output


@pytest.mark.grid
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=full)])
def test_a_peer_goes_away_in_a_rollback(tmp_path, how):
    """Ranks that have stepped hear that the step was none; one goes away while it steps back."""
    words = f"{ZBV} --faults 3:0.5:4096 5:0.5:4096 --clip-grad 4 --save-interval 2 --train-iters 6"
    words += " --enable-optimizer-post-validation --post-validation-after 0"
    flags = [*FLAGS, *words.split()]
    fault = ["--kill-in-rollback", f"{VICTIM}:2"]
    if how == "stop":
        fault = [*fault[:1], f"{VICTIM}:2:stop", "--timeout-s", str(TIMEOUT_S)]
    with launch.forked([*flags, *fault], ranks=4, script=STEPS, cwd=tmp_path) as group:
        group.wait_for(f"rank {VICTIM} goes away")
        start = time.monotonic()
        while any(group.alive(rank) for rank in (0, 2, 3)):
            assert time.monotonic() - start < 40.0, group.output
            time.sleep(0.05)
        group.kill(VICTIM)
        run = group.wait()
    assert [run.statuses[rank] for rank in (0, 2, 3)] == [6, 6, 6], run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["requeue"]) == (6, True)
    assert f"rank {VICTIM}" in record["reason"]
    told = re.findall(r"error \(peer lost, exit status 6\): (.*)", run.output)
    named = r"VALIDATE|SEND_STATE|RECV_STATE|STEP|UNSHARD|REDUCE|[FBW]\d"
    assert told, run.output
    assert all(re.match(rf"rank \d: .*iteration \d+, .*({named})", line) for line in told), told
    assert "Traceback" not in run.output
    if how == "stop":
        return  # a checkpoint of a run with a fraction of a minute for its timeout is refused
    again = launch.ok(launch.run_forked(flags, ranks=4, script=STEPS, cwd=tmp_path))
    (tmp_path / "straight").mkdir()
    straight = launch.ok(launch.run_forked(flags, ranks=4, script=STEPS, cwd=tmp_path / "straight"))
    assert again.losses()
    assert again.losses().items() <= straight.losses().items()
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(tmp_path / "straight" / "ck", 6)
