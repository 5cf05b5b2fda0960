#!/usr/bin/env python3
"""Print the batch script that runs a launch line under Slurm, once the line is checked; submit it if asked to.

    megatron-zero slurm --nodes 4 --gpus-per-node 8 --time 24:00:00 -- --num-layers 24 ... --save /shared/run1

The script is examples/slurm/train.sbatch with these flags as its #SBATCH lines and this launch line; its job saves, is
put back into the queue and goes on as docs/gpus_and_slurm.md says. Nothing is submitted without --submit.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import NAME, SCRIPTS, called_as, program
from megatron.training.config.command_line import last_value
from megatron.training.config.problems import ConfigurationError, render_problems
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.run.arguments import parse_config

TEMPLATE = SCRIPTS / "examples" / "slurm" / "train.sbatch"
FLAGS = {
    "--submit": "hand it to sbatch, too, and end with its status",
    "--ranks-per-node N": "processes of a node; else as many as --gpus-per-node, else 1",
    "--script FILE.py": "a trainer of your own in the place of pretrain_gpt.py, whose flags are not checked",
    "--container WORDS": "what stands before the launcher: 'apptainer exec --nv image.sif'",
    "--nodes N, --time ...": "any other flag is sbatch's own: a line of the script",
}
SHORT = {"-N": "--nodes", "-t": "--time", "-p": "--partition", "-J": "--job-name", "-c": "--cpus-per-task"}
SHORT |= {"-A": "--account", "-q": "--qos", "-o": "--output", "-W": "--wait", "-C": "--constraint"}
SHORT |= {"-G": "--gpus", "-w": "--nodelist", "-x": "--exclude", "-d": "--dependency"}
# Words of Slurm's refusals, and the flag that they are about.
REFUSALS = {
    "time limit": ("--time",),
    "partition": ("--partition",),
    "account": ("--account", "--partition"),
    "qos": ("--qos",),
    "dependency": ("--dependency",),
    "node configuration": ("--nodes", "--gpus-per-node", "--cpus-per-task", "--mem"),
    "node count": ("--nodes",),
    "gres": ("--gres", "--gpus-per-node"),
    "memory": ("--mem",),
}


class SlurmError(ValueError):
    """The script cannot be made, or Slurm refuses it."""


class Asked(NamedTuple):
    """sbatch: its flags, long names. ours: those of FLAGS. line: the trainer's."""

    sbatch: dict[str, str | None]
    ours: dict[str, str | None]
    line: list[str]


def main() -> int:
    """0 once the script is printed, or sbatch's status; 2 where something is wrong with it."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        print(page(), file=sys.stdout if words else sys.stderr)
        return 0 if words else int(ExitStatus.CONFIGURATION)
    try:
        asked = read(words)
        text = script(asked)
        print(text, end="")
        return submit(text) if "--submit" in asked.ours else 0
    except (SlurmError, OSError) as error:
        print(f"{program('slurm.py')}: {error}", file=sys.stderr)
    except ConfigurationError as error:
        print(render_problems(error.problems), file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"{program('slurm.py')}: interrupted; a job that is submitted goes on: scancel ends it",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    return int(ExitStatus.CONFIGURATION)


def page() -> str:
    """The page of --help."""
    about = (__doc__ or "").split("\n\n")
    rows = (f"  {flag:<24}{meaning}" for flag, meaning in FLAGS.items())
    return "\n".join([f"usage: {about[1].strip()}", "", about[0], "", *rows, "", about[2].strip()])


def read(words: Sequence[str]) -> Asked:
    """The words, taken apart. A word that is no flag is the value of the flag before it. Raises SlurmError."""
    if "--" not in words:
        raise SlurmError(
            "the launch line stands behind a --: megatron-zero slurm --nodes 2 -- FLAGS --save DIR"
        )
    at = words.index("--")
    sbatch: dict[str, str | None] = {}
    ours: dict[str, str | None] = {}
    name = None
    names = {flag.split()[0] for flag in list(FLAGS)[:-1]}
    for word in words[:at]:
        if word.startswith("-"):
            flag, given, value = word.partition("=")
            name = SHORT.get(flag, flag)
            (ours if name in names else sbatch)[name] = value if given else None
        elif name is None or (ours if name in names else sbatch)[name] is not None:
            raise SlurmError(f"{word!r:.60} is the value of no flag")
        else:
            (ours if name in names else sbatch)[name] = word
    for flag in ("--ranks-per-node", "--script", "--container"):
        if ours.get(flag, "") is None:
            raise SlurmError(f"{flag} needs a value")
    return Asked(sbatch, ours, list(words[at + 1 :]))


def script(asked: Asked) -> str:
    """train.sbatch for this launch line. Raises SlurmError, ConfigurationError."""
    header, mark, body = TEMPLATE.read_text().partition("\n# ")
    shebang, *lines = header.splitlines()
    flags = dict(re.findall(r"^#SBATCH (--[\w-]+)(?:=(.*))?$", "\n".join(lines), re.MULTILINE)) | asked.sbatch
    gpus = (flags.get("--gpus-per-node") or flags.get("--gres") or "1").rpartition(":")[2]
    nodes = _number("--nodes", flags["--nodes"])
    ranks = _number("--ranks-per-node", asked.ours.get("--ranks-per-node", gpus))
    trainer, save = asked.ours.get("--script"), last_value(asked.line, "--save")
    if trainer is None:
        save = parse_config(
            [*asked.line, "--check-config", "--world-size", str(nodes * ranks)]
        ).checkpoint.save
    if save is None:
        raise SlurmError("--save DIR is missing behind the --: checkpoints, exit.json and logs go there")
    settings = {
        "RANKS_PER_NODE": str(ranks),
        "LAUNCH": _launch(),
        "SCRIPT": trainer,
        "CONTAINER": asked.ours.get("--container"),
    }
    first, rest = body.split("\nset -euo pipefail\n")
    return "\n".join(
        [
            shebang,
            *(f"#SBATCH {flag}={value}" if value else f"#SBATCH {flag}" for flag, value in flags.items()),
            *(mark.strip("\n") + first).splitlines(),
            "set -euo pipefail",
            *(f"{name}={shlex.quote(value)}" for name, value in settings.items() if value is not None),
            f"set -- {shlex.join([save, *asked.line])}",
            rest,
        ]
    )


def _launch() -> str | None:
    """What starts ranks as this program was started; None: `megatron-zero launch`, as the script says."""
    typed = called_as(sys.argv[0])
    if typed == NAME:
        return None
    words = ("-m", "megatron", "launch") if typed else (str(SCRIPTS / "tools" / "launch.py"),)
    return " ".join([sys.executable, *words])


def _number(flag: str, text: str | None) -> int:
    if text is None or not text.isdecimal() or int(text) < 1:
        raise SlurmError(f"{flag} {text}: expected a number, 1 or more")
    return int(text)


def submit(text: str) -> int:
    """sbatch's own status, or with --wait the job's. Raises SlurmError: Slurm's words, and the lines they are about."""
    try:
        done = subprocess.run(["sbatch"], input=text, stderr=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(
            "there is no sbatch on this machine: save the script, and submit it where Slurm is"
        ) from None
    refused = re.findall(
        r"^sbatch: (?:error: )?(?:Batch job submission failed: )?(.*)", done.stderr, re.MULTILINE
    )
    if done.returncode == 0 or not refused:
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode
    words = done.stderr.lower()
    about = next((flags for known, flags in REFUSALS.items() if known in words), ())
    named = {*about, *re.findall(r"--[a-z][\w-]*", words)}
    lines = [
        f"line {n}: {line}" for n, line in enumerate(text.splitlines(), 1)
        if line.startswith("#SBATCH") and line[8:].partition("=")[0] in named
    ]  # fmt: skip
    raise SlurmError("\n  ".join([f"Slurm refuses the job: {'; '.join(dict.fromkeys(refused))}", *lines]))


if __name__ == "__main__":
    sys.exit(main())
