"""Run pretrain_gpt.py as a user does: processes of their own, their output, exit statuses, exit.json.

Two ways to start one, with one result:

- `run`, `started`: `python pretrain_gpt.py`, under torchrun for several ranks, which are forks as the next: each Python
  of its own takes 4 s of a core to import torch. `warm_ranks` has that for other launchers over torch's agent.
- `run_forked`, `forked`: the ranks are forked from this process, which has imported torch already, run the script from
  its first line with RANK, WORLD_SIZE and the rest as torchrun sets them, each on one core. About 0.1 s to start; for
  everything that is not about the launcher.

Every run has a hard time limit after which all of its processes are killed, and no child may outlive it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import importlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPT = "pretrain_gpt.py"
ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) \|.*?lm loss: (\S+) \|.*?grad norm: (\S+) \|")

# Mock data's index is built once, not by every run.
_CACHE = tempfile.mkdtemp(prefix="launch-cache-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
# A GPT that trains an iteration in some milliseconds.
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --seed 7 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --num-workers 0 --log-interval 1 "
    f"--no-create-attention-mask-in-dataloader --eval-iters 0 --data-cache-path {_CACHE}"
).split()
# TINY with data of the test's own instead of mock data.
TINY_DATA = [flag for flag in TINY if flag not in ("--mock-data", "--data-cache-path", _CACHE)]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that has ended. status: of the launcher, or of the first rank that did not end with 0."""

    status: int
    output: str
    seconds: float
    statuses: tuple[int, ...] = ()  # of each rank, where they are known; -n: ended by signal n

    def losses(self) -> dict[int, str]:
        """iteration -> "loss grad-norm" exactly as printed: equal strings mean equal to 7 digits."""
        return {int(m[1]): f"{m[3]} {m[4]}" for m in ITERATION.finditer(self.output)}


def command(
    flags: Sequence[str], *, ranks: int = 1, script: str = GPT, launcher: Sequence[str] = ()
) -> list[str]:
    """The launch line. launcher: more flags for torchrun."""
    words = [str(ROOT / script), *map(str, flags)]
    if ranks > 1:
        torchrun = importlib.import_module("torch.distributed.run").__file__  # here, so that no fork has to
        words = [torchrun, "--standalone", "--nproc-per-node", str(ranks), *launcher, *words]
    return [sys.executable, *words]


def _forked_python(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], **streams: Any
) -> subprocess.Popen[str]:
    """`python script flags` as a process, in a session of its own and a fork of this one: it has torch already."""
    script = next(at for at, word in enumerate(words) if word.endswith(".py"))

    def become_it() -> None:
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the folder's own
                # As a new program; what Popen waits for is one of them. Files stay: pytest's are written by loggers.
                if fd > 2 and not stat.S_ISREG(os.fstat(fd).st_mode):
                    os.close(fd)
        warm_ranks()
        become(list(words[script:]), None, cwd, env, dies_with_parent=False)

    return subprocess.Popen(words, preexec_fn=become_it, **streams)


def warm_ranks() -> None:
    """In a process that is to be torch's agent: its ranks will be forks of it."""
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"

    def start(
        *, args: Sequence[str], env: Mapping[str, str], start_new_session: bool, **streams: Any
    ) -> subprocess.Popen[str]:
        assert start_new_session
        return _forked_python(args, cwd=Path.cwd(), env=env, **streams)

    importlib.import_module(handler).Popen = start


@contextlib.contextmanager
def started(
    flags: Sequence[str],
    *,
    ranks: int = 1,
    script: str = GPT,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> Iterator[subprocess.Popen[str]]:
    """A run under way, in a session of its own that is gone when the block ends."""
    variables = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **(env or {}))
    core = min(os.sched_getaffinity(0))
    words, folder = command(flags, ranks=ranks, script=script, launcher=launcher), cwd or ROOT
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if ranks == 1:
        # A single rank would take all cores for itself: one keeps the machine free and the bits alike.
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            **streams,
        )
    else:
        process = _forked_python(words, cwd=folder, env=variables, **streams)
    try:
        yield process
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def descendants(pid: int) -> list[int]:
    """Processes below this one: torchrun puts its ranks into sessions of their own."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below, found = {pid}, []
    while children := [child for child, parent in parents.items() if parent in below and child not in found]:
        found += children
        below = set(children)
    return found


def run(
    flags: Sequence[str],
    *,
    ranks: int = 1,
    script: str = GPT,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    timeout_s: float = 90.0,
) -> Finished:
    """Run to the end. Fails the test, with the output so far, when the time limit passes."""
    start = time.monotonic()
    with started(flags, ranks=ranks, script=script, cwd=cwd, env=env, launcher=launcher) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s:\n{output}") from None
        return Finished(process.returncode, output, time.monotonic() - start)


def read_until(
    process: subprocess.Popen[str], matches: Callable[[str], bool], timeout_s: float = 90.0
) -> str:
    """Output up to and including the first line that matches."""
    assert process.stdout is not None
    deadline, lines = time.monotonic() + timeout_s, []
    for line in process.stdout:
        lines.append(line)
        if matches(line):
            return "".join(lines)
        assert time.monotonic() < deadline, "no such line in time:\n" + "".join(lines)
    raise AssertionError("the run ended without such a line:\n" + "".join(lines))


class Ranks:
    """A forked run under way. All ranks write into one file, whole lines at a time."""

    def __init__(self, output: Path) -> None:
        self.pids: list[int] = []
        self._output = output
        self._started = time.monotonic()
        self._statuses: dict[int, int] = {}  # rank -> status

    @property
    def output(self) -> str:
        """What all ranks have said so far."""
        return self._output.read_text(errors="replace")

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, by default to all that live."""
        for rank in ranks or range(len(self.pids)):
            if rank not in self._statuses:
                os.kill(self.pids[rank], number)

    def kill(self, *ranks: int) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL, *ranks)

    def alive(self, rank: int) -> bool:
        """Whether this rank has not ended yet."""
        self._reap()
        return rank not in self._statuses

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Wait until the output has a match."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.output)) is None:
            ended = self._reap()
            assert time.monotonic() < deadline, f"no {pattern!r} in time:\n{self.output}"
            found = re.search(pattern, self.output)
            assert found or not ended, f"the run ended without {pattern!r}:\n{self.output}"
            if found:
                return found
            time.sleep(0.01)
        return found

    def wait(self, timeout_s: float = 60.0) -> Finished:
        """Wait for all ranks."""
        deadline = time.monotonic() + timeout_s
        while not self._reap():
            if time.monotonic() > deadline:
                alive = [rank for rank in range(len(self.pids)) if rank not in self._statuses]
                raise AssertionError(f"ranks {alive} still running after {timeout_s} s:\n{self.output}")
            time.sleep(0.01)
        statuses = tuple(self._statuses[rank] for rank in range(len(self.pids)))
        failed = [status for status in statuses if status]
        return Finished(failed[0] if failed else 0, self.output, time.monotonic() - self._started, statuses)

    def close(self) -> None:
        """Kill what is left, loaders included."""
        for rank, pid in enumerate(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if rank not in self._statuses:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _reap(self) -> bool:
        """Collect who has ended; whether all have."""
        for rank, pid in enumerate(self.pids):
            if rank not in self._statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self._statuses) == len(self.pids)


@contextlib.contextmanager
def forked(
    flags: Sequence[str],
    *,
    ranks: int = 1,
    script: str = GPT,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    rank_env: Callable[[int], Mapping[str, str]] = lambda rank: {},
    terminal: str | None = None,
) -> Iterator[Ranks]:
    """A forked run under way; none of its processes outlives the block. rank_env: variables of one rank only. terminal:
    what all ranks write to in place of the file."""
    # Here, so that no rank has to: torch's optimizers import their compiler, and a parser knows 900 flags.
    import torch._dynamo  # noqa: F401

    import megatron.training.run.training  # noqa: F401
    from megatron.training.config.flag_table import flag_table

    flag_table()

    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        output = Path(folder) / "output"
        output.touch()
        group = Ranks(output)
        variables = {} if ranks == 1 else _rendezvous(ranks)
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                pid = os.fork()
                if pid == 0:
                    words = [str(ROOT / script), *map(str, flags)]
                    become(
                        words,
                        terminal or output,
                        cwd or ROOT,
                        {**variables, **own, **(env or {}), **rank_env(rank)},
                        rank,
                    )
                group.pids.append(pid)
            yield group
        finally:
            group.close()


def run_forked(flags: Sequence[str], *, timeout_s: float = 60.0, **options: Any) -> Finished:
    """Run to the end. Fails the test, with the output so far, when the time limit passes."""
    with forked(flags, **options) as group:
        return group.wait(timeout_s)


def free_port() -> int:
    """Below those that systems give to whoever asks for any: no socket of another suite takes it before its owner."""
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _rendezvous(ranks: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",  # this machine's name need not resolve
    }


def become(
    argv: list[str],
    output: str | Path | None,
    cwd: Path,
    variables: Mapping[str, str],
    rank: int | None = None,
    errors: Path | None = None,
    *,
    dies_with_parent: bool = True,
) -> None:
    """In the child: run the script as `python script` would. Never returns. output: None where the streams are as they
    have to be; errors: stderr, if it is not output; rank: has a core of its own."""
    status = 1
    try:
        os.setsid()
        if dies_with_parent and sys.platform == "linux":
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        cores = sorted(os.sched_getaffinity(0))
        if rank is not None:
            # By the test process too: of several, each begins with another core.
            os.sched_setaffinity(0, {cores[(rank + os.getppid()) % len(cores)]})
        os.chdir(cwd)
        for target, path in ((1, output), (2, errors or output)) if output is not None else ():
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY), target)
        # Whole lines reach the file in one write, so ranks do not mix within a line.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(variables)
        sys.argv = argv
        home = Path(argv[0]).parent
        sys.path.insert(0, str(home))
        if (
            home != ROOT and (home / "megatron").exists()
        ):  # a copy of the checkout, whose modules are not ours
            for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "tools")]:
                del sys.modules[name]
        try:
            runpy.run_path(argv[0], run_name="__main__")
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_folder(directory: Path) -> Path:
    """Of the newest run without --save that was started in a directory; a directory without any is a run's own."""
    return max((directory / "runs").glob("*-*"), default=directory)


def exit_record(directory: Path) -> dict[str, Any]:
    """The run's exit.json."""
    record: dict[str, Any] = json.loads((run_folder(directory) / "exit.json").read_text())
    return record


def metrics_lines(directory: Path) -> list[dict[str, Any]]:
    """The run's metrics.jsonl."""
    return [json.loads(line) for line in (run_folder(directory) / "metrics.jsonl").read_text().splitlines()]


def ok(finished: Finished) -> Finished:
    """The run, which must have ended with status 0."""
    assert finished.status == 0, f"status {finished.status}\n{finished.output}"
    return finished


def ended(finished: Finished, status: int) -> Finished:
    """The run, every rank of which must have ended with this status."""
    assert set(finished.statuses or (finished.status,)) == {status}, (
        f"expected {status}, found {finished.statuses or finished.status}\n{finished.output}"
    )
    return finished


def digests(checkpoints: Path, iteration: int) -> dict[str, str]:
    """Tensor name -> digest of its global values: equal digests mean equal bits.

    Read with the safetensors package alone, so that a fault of our reader cannot hide one of our writer.
    """
    import torch
    from safetensors import safe_open

    directory = checkpoints / f"iter_{iteration:07d}"
    manifest = json.loads((directory / "manifest.json").read_text())
    with contextlib.ExitStack() as stack:
        shards = {
            name: stack.enter_context(safe_open(directory / name, framework="pt"))
            for name in manifest["files"]
        }
        out = {}
        for name, tensor in manifest["tensors"].items():
            whole, covered = None, 0
            for chunk in tensor["chunks"]:
                part = shards[chunk["file"]].get_tensor(chunk["key"])
                if whole is None:
                    whole = torch.zeros(tensor["shape"], dtype=part.dtype)
                where = tuple(
                    slice(begin, begin + size)
                    for begin, size in zip(chunk["offset"], chunk["shape"], strict=True)
                )
                whole[where] = part.view(chunk["shape"])
                covered += part.numel()
            assert whole is not None, f"{name}: no chunks"
            assert covered == whole.numel(), f"{name}: {covered} values of {whole.numel()}"
            out[name] = hashlib.sha256(whole.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        return out
