"""Ways to start the ranks of a case's run."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.cases.case import ROOT, CaseError

NAMES = ("forked", "torchrun", "slurm")
LIMIT_S = 3600.0
JOB_NAME = "--job-name"


class Launch(NamedTuple):
    """script: the trainer. save: its checkpoints' folder. folder: where it runs. nodes: of slurm."""

    script: str
    words: Sequence[str]
    ranks: int
    env: Mapping[str, str]
    folder: Path
    save: Path
    nodes: int = 1


def launch(name: str, job: Launch, environ: Mapping[str, str]) -> tuple[int, str]:
    """The run's status and what it has said. environ: what the run inherits. Raises CaseError for a launcher that is
    not there."""
    if name == "forked":
        return _forked(job)
    words = _torchrun(job) if name == "torchrun" else _slurm(job)
    path = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    status, output = _ended(words, {**environ, **job.env, "PYTHONPATH": path}, job.folder)
    logs = sorted(job.folder.glob("*.log")) if name == "slurm" else []  # what the job itself has said
    return status, "".join([output, *(log.read_text(errors="replace") for log in logs)])


def _ended(words: Sequence[str], env: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """Its status and output. What interrupts this process stops it, and its job, too."""
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if JOB_NAME in words:  # its output is the script
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        words, cwd=folder, env=env, text=True, start_new_session=True, **streams
    ) as process:
        try:
            output = "".join(filter(None, process.communicate()))
            return process.returncode, output
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            if JOB_NAME in words:
                subprocess.run(["scancel", "--name", words[words.index(JOB_NAME) + 1]], env=env)
            process.communicate()
            raise


def _forked(job: Launch) -> tuple[int, str]:
    """Forks of this process, which has imported torch: no Python starts, a rank takes a tenth of a second."""
    try:
        harness = importlib.import_module("tests.harness.launch")
    except ModuleNotFoundError:
        raise CaseError("--launcher forked: its ranks are the tests', of a checkout: use torchrun") from None
    done = harness.run_forked(
        job.words, ranks=job.ranks, script=job.script, cwd=job.folder, env=job.env, timeout_s=LIMIT_S
    )
    return done.status, done.output


def _torchrun(job: Launch) -> list[str]:
    ranks = ["--standalone", "--nproc-per-node", str(job.ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, str(ROOT / job.script), *job.words]


def _slurm(job: Launch) -> list[str]:
    """The job that `megatron-zero slurm` submits for these flags, waited for."""
    if shutil.which("sbatch") is None:
        raise CaseError("--launcher slurm: there is no sbatch on this machine; forked and torchrun need none")
    if job.ranks % job.nodes:
        raise CaseError(f"--nodes {job.nodes}: {job.ranks} ranks do not divide over them")
    words = ["--nodes", str(job.nodes), "--ranks-per-node", str(job.ranks // job.nodes), "--wait", "--submit"]
    words += [JOB_NAME, f"case-{job.folder.name}-{os.getpid()}"]
    if job.script != "pretrain_gpt.py":
        words += ["--script", str(ROOT / job.script)]
    save = [] if "--save" in job.words else ["--save", str(job.save), "--save-interval", "1000000"]
    return [sys.executable, str(ROOT / "tools" / "slurm.py"), *words, "--", *job.words, *save]
