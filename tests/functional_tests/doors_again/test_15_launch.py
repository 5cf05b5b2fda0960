"""E2, number 15: `megatron-zero launch` starts ranks as torchrun does, and its last line says how the run ended;
SIGUSR1 saves and ends as SIGTERM does, whoever of a run gets it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.run

from megatron.training.guard.exit_status import ExitRecord, ExitStatus
from megatron.training.guard.signals import STOP_SIGNALS
from tests.harness import launch
from tests.harness.screen import Terminal
from tools import launch as launcher

ROOT = Path(__file__).resolve().parents[3]
ENDLESS = [
    *launch.TINY,
    *"--train-iters 100000 --save ck --load ck --save-interval 100000 --log-interval 5".split(),
]
RESUMES = "saved at iteration {0} (ck/iter_{0:07d}), the same line resumes"


class Launched:
    """`python tools/launch.py` in a fork of this process, which has torch already; so have its ranks, but for those of
    a launcher that is not `warm`. terminal: what it writes to."""

    def __init__(self, folder, words, output, script=ROOT / "tools" / "launch.py", warm=True, **variables):
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if warm:
                launch.warm_ranks()
            argv = [str(script), *map(str, words)]
            launch.become(
                argv, output, folder, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
            )

    def alive(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def launched(folder, *words):
    """Status and output of a launch that ends by itself."""
    output = folder / "output"
    output.write_text("")
    return Launched(folder, words, output).wait(), output.read_text()


def last_iteration(folder):
    return int((folder / "ck" / "latest_checkpointed_iteration.txt").read_text())


def test_the_last_thing_on_the_screen_is_where_the_run_was_saved(tmp_path):
    terminal = Terminal(100)
    words = ["--nproc-per-node", "2", "--", "train", *ENDLESS]
    run = Launched(tmp_path, words, terminal.path, TERM="xterm", COLUMNS="100")
    terminal.wait_for(" 5/100,000", run.alive)
    os.kill(run.pid, signal.SIGINT)  # the ranks are in sessions of their own, and hear of no key
    assert run.wait() == ExitStatus.STOPPED == launch.exit_record(tmp_path / "ck")["status"]
    screen = terminal.close()
    iteration = last_iteration(tmp_path)
    assert screen.rstrip().endswith(RESUMES.format(iteration))
    assert "exiting program after receiving SIGINT." in screen
    assert "Traceback" not in screen
    assert "torch/distributed" not in screen


def test_a_refusal_is_said_once_and_last_and_is_the_status(tmp_path):
    status, output = launched(
        tmp_path, "--nproc-per-node", "2", "--", "train", *launch.TINY, "--hiden-size", "4"
    )
    assert status == 2
    assert output.count("--hiden-size") == 1
    assert output.splitlines()[0].startswith("configuration: ")
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_signals_reach_the_ranks(tmp_path, number):
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import os, pathlib, signal\n"
        f"signal.signal({int(number)}, lambda *_: None)\n"
        "pathlib.Path('rank' + os.environ['RANK']).touch()\n"
        "signal.pause()\n"
        "os.write(1, f\"rank {os.environ['RANK']} has heard\\n\".encode())\n"
    )
    (tmp_path / "output").write_text("")
    run = Launched(tmp_path, ["--nproc-per-node", "2", "--", waits], tmp_path / "output")
    while not all((tmp_path / f"rank{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    time.sleep(0.2)  # to the pause behind
    os.kill(run.pid, number)
    assert run.wait() == 128 + number  # there is no record of such a script
    *heard, last = (tmp_path / "output").read_text().splitlines()
    assert sorted(heard) == ["rank 0 has heard", "rank 1 has heard"]
    assert last == f"stopped by {number.name}: the ranks have left no record of a run"


@pytest.mark.grid
def test_a_rank_that_dies_is_named_and_restarts_are_the_agents(tmp_path):
    kills = tmp_path / "kills.py"
    kills.write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "line = f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\"\n"
        "os.write(1, line.encode())  # both ranks share this output: a line is one write\n"
    )
    status, output = launched(tmp_path, "--nproc-per-node", "2", "--", kills)
    assert status == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in output.splitlines()[-1]
    assert output.splitlines()[-1].startswith("rank 1 ")
    status, output = launched(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", "--", kills)
    assert (status, sorted(output.splitlines()[-2:])) == (0, ["rank 0 of 2", "rank 1 of 2"])


def test_a_taken_port_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
        status, output = launched(tmp_path, *nodes, "--", "train", *launch.TINY)
    assert (status, len(output.splitlines())) == (2, 1)
    assert f"the port of 127.0.0.1:{port} is taken by another process on this machine" in output


def test_what_is_not_started_is_refused(tmp_path):
    for words, said in (
        (["--", "tran"], "'tran' is neither a command nor a script of Python"),
        (["--no-python", "--", "train"], "--no-python starts other programs"),
        (["--restart-lost-ranks", "--", "train", "--save", "ck"], "--save and --load name one folder"),
        (
            ["--nproc-per-node", "2", "train"],
            "stands behind a --: megatron-zero launch --nproc-per-node 2 -- train",
        ),
    ):
        status, output = launched(tmp_path, *words)
        assert (status, len(output.splitlines())) == (2, 1)
        assert said in output


EARLY = """
import pathlib, runpy, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.training.config.command_line":
            pathlib.Path("imports").touch()
            time.sleep(0.5)
sys.meta_path.insert(0, Slow())
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
sys.path.insert(0, {root!r})
if script == "megatron-zero":
    from megatron.command import main
    main()
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    "door", [["megatron-zero", "launch"], [ROOT / "tools" / "launch.py"]], ids=["command", "script"]
)
def test_a_signal_in_the_first_second_has_last_words_too(tmp_path, door):
    """It comes while modules are imported."""
    words = [*door, "--nproc-per-node", "2", "--", "train", *ENDLESS]
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY.format(root=str(ROOT)), *map(str, words)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "imports").exists():
        time.sleep(0.01)
    process.terminate()
    said = process.communicate(timeout=30)[1]
    assert process.returncode == launch.exit_record(tmp_path / "ck")["status"] == ExitStatus.STOPPED, said
    assert said == "[rank 0] stopped (exit status 75): SIGTERM before training began; nothing is lost\n"


@pytest.mark.grid
def test_sigusr1_to_the_ranks_alone_saves(tmp_path):
    with launch.forked(ENDLESS, ranks=2, cwd=tmp_path) as group:
        group.wait_for(r"iteration +5/")
        group.signal(signal.SIGUSR1, 1)
        done = group.wait()
    assert done.statuses == (75, 75)
    assert launch.exit_record(tmp_path / "ck")["reason"] == "received SIGUSR1"


@pytest.mark.grid
@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_the_whole_job_leaves_its_loaders_to_the_run(tmp_path, number):
    """Batch systems signal every process: the loaders of a train line go on until the run has saved and ends them."""
    with launch.forked([*ENDLESS, "--num-workers", "2"], cwd=tmp_path) as group:
        group.wait_for(r"iteration +5/")
        loaders = launch.descendants(group.pids[0])
        assert len(loaders) >= 2
        for pid in loaders:
            os.kill(pid, number)
        group.signal(number)
        done = group.wait()
    assert done.statuses == (75,), done.output
    assert launch.exit_record(tmp_path / "ck")["reason"] == f"received {number.name}"
    assert not re.search(r"Traceback|DataLoader worker", done.output), done.output


@pytest.mark.grid
def test_sigusr1_to_torchrun_alone_saves(tmp_path):
    """torchrun does not know the signal and is ended by it: its ranks save and end by themselves."""
    (tmp_path / "output").write_text("")
    words = ["--standalone", "--nproc-per-node", "1", ROOT / launch.GPT, *ENDLESS]
    run = Launched(tmp_path, words, tmp_path / "output", torch.distributed.run.__file__, warm=False)
    output = lambda: (tmp_path / "output").read_text()  # noqa: E731
    while " 5/" not in output():
        assert run.alive(), output()
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGUSR1)
    assert run.wait() == -signal.SIGUSR1
    deadline = time.monotonic() + 60
    while not (tmp_path / "ck" / "exit.json").exists():
        assert time.monotonic() < deadline, output()
        time.sleep(0.02)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["iteration"]) == (75, last_iteration(tmp_path))
    assert record["reason"].startswith("the loss of its launcher (pid ")
    assert "exiting program after the loss of its launcher" in output()


@pytest.mark.parametrize(
    ("record", "loads", "line"),
    [
        ((0, "trained to the end", 5, "ck/iter_0000005", True), True, None),
        ((75, "received SIGINT", 7, "ck/iter_0000007", True), True, RESUMES.format(7)),
        ((75, "received SIGINT", 7, "ck/iter_0000007", True), False, "the same line with --load ck resumes"),
        ((75, "second SIGINT", 9, "ck/iter_0000007", True), True, RESUMES.format(7)),
        (
            (143, "received SIGTERM", 7, None, False),
            True,
            "ended at iteration 7, nothing is saved (exit status 143)",
        ),
        ((6, "rank 1 ...", 9, "ck/iter_0000007", True), True, "the newest checkpoint is of iteration 7"),
        ((2, "refused", None, None, False), True, None),
    ],
)
def test_last_lines(record, loads, line):
    status, reason, iteration, checkpoint, requeue = record
    command = ["train", *(["--load", "ck"] if loads else [])]
    found = launcher.last_line(ExitRecord(status, reason, iteration, checkpoint, 0, requeue), command)
    assert found is None if line is None else line in found


def test_it_has_torchruns_flags_and_runs_commands_as_it_was_run(tmp_path, monkeypatch):
    status, output = launched(tmp_path, "--help")
    assert status == 0
    assert "launch.py [flags] -- train FLAGS" in output
    assert all(f"--{flag}" in output for flag in ("nnodes", "node-rank", "rdzv-endpoint", "max-restarts"))
    words = ["train", "--lr", "1"]
    assert launcher.called(words) == [str(ROOT / launch.GPT), "--lr", "1"]
    monkeypatch.setattr(sys, "argv", ["python -m megatron launch"])
    assert launcher.called(words) == ["-m", "megatron", *words]
    monkeypatch.setattr(sys, "argv", ["megatron-zero launch"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/megatron-zero", "launch", "--", *words])
    assert launcher.called(words) == ["/bin/megatron-zero", *words]
