"""Line 1: on a terminal short lines above one bar, Megatron's lines in the log file and in pipes; the refusal last."""

import dataclasses
import datetime
import json
import re
import signal

import pytest

from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles
from megatron.core.words import brief_duration, counted
from megatron.training.guard.exit_status import ExitStatus, report_failure
from megatron.training.report.metrics import IterationRecord
from megatron.training.report.screen import bar_line, short_line
from tests.harness import launch
from tests.harness.screen import Terminal, frames, log_of, on_terminal, seen

FLAGS = "--train-iters 12 --log-interval 3 --eval-interval 6 --eval-iters 1 --save-interval 6 --log-throughput".split()
STEP = re.compile(r" step +(\d+)/12  loss +\d\.\d{4}  lr [\d.]+ +grad +\d\.\d{3}  +[\d,]+ tok/s")
PLAN = re.compile(r"^ > plan: (\{.*\})$", re.MULTILINE)
BAR = re.compile(r"^ █*░* [ \d]*\d\.\d% \| \d+/\d+")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(folder, all that was written to a terminal of 80 columns) of a pipeline of two ranks."""
    folder = tmp_path_factory.mktemp("terminal")
    more = "--log-interval 3 --save ck --pipeline-model-parallel-size 2".split()
    flags = [*launch.TINY, *FLAGS, *more]
    with on_terminal(flags, 80, ranks=2, cwd=folder) as (terminal, ranks):
        finished = ranks.wait()
    assert finished.statuses == (0, 0), terminal.written.decode()
    return folder, terminal.written.decode()


def test_one_short_line_a_report(two_ranks):
    lines = seen(two_ranks[1])
    steps = [line for line in lines if STEP.match(line)]
    assert [int(STEP.match(line)[1]) for line in steps] == [1, 3, 6, 9, 12]
    assert all(len(line) < 80 for line in steps), steps
    columns = [re.sub(r"[\d.,%]+|-", "0", re.sub(" +", " ", line)) for line in steps]
    assert set(columns) == {" step 0/0 loss 0 lr 0 grad 0 0 tok/s bubble 0"}, steps
    assert {len(line) for line in steps} == {len(steps[0])}, "columns do not stand below each other"
    assert all(re.search(r"bubble +\d+\.\d%$", line) for line in steps[1:]), steps
    assert not [line for line in lines if line.startswith(" step") and line not in steps]
    found = [line.partition(": loss ")[0] for line in lines if ": loss " in line]
    assert found == [" validation at iteration 6", " validation at iteration 12", " test at iteration 12"]


def test_one_bar_that_leaves_nothing_behind(two_ranks):
    _, written = two_ranks
    drawn = frames(written)
    assert len(drawn) >= 5, "nobody sees a bar"
    for screen in drawn:
        bars = [row for row, line in enumerate(screen) if "█" in line or "░" in line]
        assert bars == [len(screen) - 1], screen
        assert BAR.match(screen[-1]), screen[-1]
        assert len(screen[-1]) < 80
        assert screen[-2] == "", "the cursor is not on a line of its own"
    assert not [line for line in seen(written) if "█" in line or "░" in line]
    assert any("| 12/12 " in screen[-1] for screen in drawn)


def test_nothing_that_is_for_scripts_is_on_the_screen(two_ranks):
    text = "\n".join(seen(two_ranks[1]))
    assert not re.search(r"[0-9a-f]{64}|\{\"|\b1 ranks|TFLOP|MFU|elapsed time", text), text
    assert " > plan: schedule 1f1b, sharding no_shard\n > memory: " in text
    assert "successfully saved checkpoint from iteration 6 to ck\n" in text


def test_what_a_person_is_told_first(two_ranks):
    """In order, whichever rank says it, and nothing twice."""
    lines = seen(two_ranks[1])
    start = lines[: lines.index("training ...") + 1]
    assert [re.sub(r"(: ).*", r"\1", line) for line in start] == [
        " > threads per rank: ", " > vocabulary: ", " > log: ", " > model: ", " > plan: ", " > memory: ", " > stages: ",
        " > data: ", " > metrics: ", "training ...",
    ]  # fmt: skip
    assert " > model: 30,592 parameters, split in 2 parts of 16,864 to 17,824" in start
    assert all(len(line) < 80 for line in start), start


def test_the_log_file_has_megatrons_lines_whole(two_ranks):
    folder, written = two_ranks
    log = log_of(folder / "ck")
    found = launch.ITERATION.findall(log)
    assert [int(step) for step, *_ in found] == [1, 3, 6, 9, 12]
    assert (
        len(
            re.findall(
                r"^ \[[^\n]*\| throughput per GPU \(TFLOP/s/GPU\): 0\.0*[1-9]\d\d \|[^\n]* \|$", log, re.M
            )
        )
        == 5
    )
    assert len(json.loads(PLAN.search(log)[1])["hash"]) == 64
    assert log.count("validation loss at iteration") == 4
    assert len(re.findall(r"^\[Rank \d\] \(after", log, re.M)) == 2
    assert "\x1b" not in log
    assert "\r" not in log
    start = [
        " > padded vocab",
        "rank (0, 0): ",
        "rank (0, 1): ",
        " > plan: {",
        " > stages: ",
        "> building",
        "training ...",
    ]
    assert sorted(start, key=log.index) == start, log
    both = [line for line in log.splitlines() if line in seen(written)]  # what is not given in short
    for one in (" > threads per rank: ", " > metrics: ", "training ..."):  # the first before there is a file
        assert [line for line in both if line.startswith(one)], one


def test_a_resumed_run_that_is_interrupted(two_ranks):
    """One process, 140 columns."""
    folder, _ = two_ranks
    more = "--train-iters 5000 --save ck --load ck --log-interval 10 --override-opt_param-scheduler".split()
    flags = [*launch.TINY, *FLAGS, *more]
    with on_terminal(flags, 140, cwd=folder) as (terminal, ranks):
        terminal.wait_for(" step    20/5,000", lambda: ranks.alive(0))
        ranks.signal(signal.SIGINT)
        finished = ranks.wait()
    assert finished.statuses == (75,)
    lines = seen(terminal.written.decode())
    step = next(line for line in lines if line.startswith(" step    20/5,000"))
    amounts = r"lr 0\.\d+ +grad norm \d\.\d{3}  +[\d,]+ tokens/s +[\d.]+ [MG]FLOP/s a rank  memory +\S+ GiB  ETA +\S+$"
    assert re.search(r"  loss \d\.\d{4}  " + amounts, step), step
    assert not [line for line in lines if "█" in line or "░" in line]
    last = [line for line in lines if line.strip()][-1]
    assert last.startswith("successfully saved checkpoint from iteration"), lines
    assert log_of(folder / "ck").count(" > plan: {") == 2, "a resumed run goes on in the same file"


def test_pipes_get_megatrons_lines_and_no_file(tmp_path):
    run = launch.ok(launch.run_forked([*launch.TINY, "--train-iters", "2"], cwd=tmp_path))
    assert [
        len(launch.ITERATION.findall(line)) for line in run.output.splitlines() if " iteration  " in line
    ] == [1, 1]
    assert PLAN.search(run.output)
    assert not re.search("\x1b|\r|█|MFU|1 ranks|1 local ranks", run.output)
    assert ", 1 local rank" in run.output
    assert not list(tmp_path.rglob("console.log"))


def test_a_dumb_terminal_is_a_pipe(tmp_path):
    terminal = Terminal(80)
    flags = [*launch.TINY, "--train-iters", "1"]
    with launch.forked(flags, env={"TERM": "dumb"}, terminal=terminal.path, cwd=tmp_path) as ranks:
        ranks.wait()
    written = terminal.close()
    assert launch.ITERATION.search(written)
    assert "\x1b" not in written


def test_the_refusal_is_the_last_thing_under_torchrun():
    run = launch.run(
        [*launch.TINY, "--train-iters", "2", "--mtp-num-layers", "1", "--hidden-sizee", "3"], ranks=2
    )
    assert run.status == 1
    lines = run.output.rstrip().splitlines()
    expected = [
        "  configuration: 2 problems",
        "    1. [unknown-flag] unknown flag --hidden-sizee",
        "       fix: did you mean --hidden-size?",
        "    2. [not-supported] --mtp-num-layers 1 is not supported",
        "       fix: leave out for now; planned, see docs/roadmap.md, 'multi-token prediction'",
    ]
    assert lines[-6:-1] == expected, run.output
    assert set(lines[-1]) == {"="}, "torchrun's own last line"
    assert run.output.index("Root Cause (first observed failure):\n[0]:") < run.output.rindex(expected[0])


def test_who_is_to_blame_for_a_lost_rank_is_the_last_thing_under_torchrun(tmp_path, capsys):
    told = tmp_path / "error.json"
    table = {ConnectionError: ExitStatus.PEER_LOST}
    blame = {"diagnose": lambda: "rank 1 (host h, pid 5) is silent", "error_file": str(told)}
    report_failure(ConnectionError("reset by peer"), table, rank=0, **blame)
    printed = capsys.readouterr().err.rstrip("\n")
    assert json.loads(told.read_text())["message"]["message"] == printed
    assert printed.splitlines()[-1] == "[rank 0] rank 1 (host h, pid 5) is silent"


RECORD = IterationRecord(
    when=datetime.datetime(2026, 3, 4),
    iteration=12345,
    train_iters=100000,
    consumed_samples=1,
    elapsed_s=1.0,
    throughput_tflops=0.0123,
    learning_rate=1e-4,
    global_batch_size=8,
    losses={"lm loss": 3.25, "aux": 0.5},
    loss_scale=1.0,
    grad_norm=1.5,
    skipped_iterations=2,
    nan_iterations=1,
    tokens_per_s=12345.6,
    bubbles=Bubbles(1, 0.0769, 0.0931),
    memory_bytes=6_700_000_000,
    eta="0:01:10",
)

EVERY = ("throughput_tflops", "bubbles", "eta")


def test_columns_go_by_their_importance_and_a_line_is_never_wrapped():
    assert short_line(RECORD, 400, EVERY) == (
        " step  12,345/100,000  loss 3.2500  lr 0.0001     grad norm 1.500  12,346 tokens/s  12.3 GFLOP/s a rank"
        "  memory  6.24 GiB  bubble  9.3% (plan  7.7%)  ETA 0:01:10  aux 0.5000  2 skipped (1 NaN)"
    )
    for width in range(30, 300):
        assert all(len(row) < width for row in short_line(RECORD, width, EVERY).split("\n"))
    line = " step  12,345/100,000  loss 3.2500  lr 0.0001     grad 1.500  12,346 tok/s"
    assert short_line(RECORD, 80, EVERY) == f"{line}\n   2 skipped (1 NaN)"
    assert short_line(RECORD, 95, EVERY) == f"{line}  bubble  9.3%\n   2 skipped (1 NaN)"
    assert short_line(RECORD, 95, {"eta"}) == f"{line}  mem  6.24 GiB\n   2 skipped (1 NaN)"
    assert (
        short_line(RECORD, 50, ()) == " step  12,345/100,000  loss 3.2500  grad 1.500\n   2 skipped (1 NaN)"
    )


@pytest.mark.parametrize("width", [60, 80, 140, 300])
def test_a_column_is_in_all_lines_of_a_run_or_in_none(width):
    """Whatever values there are, and whether there are any."""
    lines = []
    for loss, norm, speed, held, bubble, eta in (
        (None, None, None, None, None, None),
        (10.82451, 123.456, 123.4, 123_456_789, 1.0, 26 * 3600),
        (0.04, 1e5, 123_456.0, 95_000_000_000, 0.003, 5 * 86400),
        (123.4, 0.0004, 12_345_678.0, 1_234_567, 0.1, 30),
    ):
        record = dataclasses.replace(
            RECORD,
            losses={} if loss is None else {"lm loss": loss},
            grad_norm=norm,
            tokens_per_s=speed,
            throughput_tflops=0.0 if speed is None else speed / 1e6,
            memory_bytes=held,
            bubbles=None if bubble is None else Bubbles(1, bubble, bubble),
            eta=None if eta is None else brief_duration(eta),
            skipped_iterations=0,
        )
        lines.append(short_line(record, width, EVERY))
    assert len({len(line) for line in lines}) == 1, lines
    assert (
        len({tuple(found.start() for found in re.finditer(r"(?<=  )[a-zA-Z]+ ", line)) for line in lines})
        == 1
    )


@pytest.mark.parametrize("width", [20, 40, 80, 140, 300])
def test_a_bar_fits(width):
    columns = [(0, "50.0%"), (1, "10/20"), (4, "loss 3.2500"), (2, "ETA 0:01:10")]
    bar = bar_line(0.5, columns, width, ascii_only=True)
    assert len(bar) < width
    assert bar.startswith(" #####")


def test_counted():
    assert [counted(1, "rank"), counted(2, "rank"), counted(1024, "rank")] == [
        "1 rank",
        "2 ranks",
        "1,024 ranks",
    ]
    assert counted(2, "microbatch") == "2 microbatches"
