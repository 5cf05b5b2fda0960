"""Run pretrain_gpt.py as a user does: a process of its own, its output, its exit status, its exit.json.

A run of one rank is plain `python pretrain_gpt.py`, several are torchrun. Every run has a hard time limit after which its
whole process group is killed, and no child may outlive it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) \|.*?lm loss: (\S+) \|.*?grad norm: (\S+) \|")

# A GPT that trains an iteration in some milliseconds.
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --seed 7 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --num-workers 0 --log-interval 1 "
    "--no-create-attention-mask-in-dataloader"
).split()


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    status: int
    output: str
    seconds: float

    def losses(self) -> dict[int, str]:
        """iteration -> "loss grad-norm" exactly as printed: equal strings mean equal to 7 digits."""
        return {int(m[1]): f"{m[3]} {m[4]}" for m in ITERATION.finditer(self.output)}


def command(flags: Sequence[str], *, ranks: int = 1, script: str = "pretrain_gpt.py") -> list[str]:
    """The launch line."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(ROOT / script), *map(str, flags)]


@contextlib.contextmanager
def started(
    flags: Sequence[str],
    *,
    ranks: int = 1,
    script: str = "pretrain_gpt.py",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A run under way, in a process group of its own that is gone when the block ends."""
    variables = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **(env or {}))
    process = subprocess.Popen(
        command(flags, ranks=ranks, script=script),
        cwd=cwd or ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def run(
    flags: Sequence[str],
    *,
    ranks: int = 1,
    script: str = "pretrain_gpt.py",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Finished:
    """Run to the end. Fails the test, with the output so far, when the time limit passes."""
    start = time.monotonic()
    with started(flags, ranks=ranks, script=script, cwd=cwd, env=env) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s:\n{output}") from None
        return Finished(process.returncode, output, time.monotonic() - start)


def read_until(process: subprocess.Popen[str], matches: Callable[[str], bool], timeout_s: float = 60.0) -> str:
    """Output up to and including the first line that matches."""
    assert process.stdout is not None
    deadline, lines = time.monotonic() + timeout_s, []
    for line in process.stdout:
        lines.append(line)
        if matches(line):
            return "".join(lines)
        assert time.monotonic() < deadline, "no such line in time:\n" + "".join(lines)
    raise AssertionError("the run ended without such a line:\n" + "".join(lines))


def exit_record(directory: Path) -> dict[str, Any]:
    """The run's exit.json."""
    record: dict[str, Any] = json.loads((directory / "exit.json").read_text())
    return record


def ok(finished: Finished) -> Finished:
    """The run, which must have ended with status 0."""
    assert finished.status == 0, f"status {finished.status}\n{finished.output}"
    return finished


def digests(checkpoints: Path, iteration: int) -> dict[str, str]:
    """Tensor name -> digest of its values over the whole checkpoint: equal digests mean equal bits."""
    from megatron.training.checkpointing import tensor_digests

    return tensor_digests(checkpoints / f"iter_{iteration:07d}")
