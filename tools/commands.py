"""The commands of `megatron-zero`: each is a script's own `main`, imported once its command is chosen."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.command import NAME, called_as, lost_folder


class Command(NamedTuple):
    """script: below SCRIPTS. flags: those that come before the user's."""

    script: str
    about: str
    flags: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("pretrain_gpt.py", "pre-train a GPT, by Megatron-LM's command line"),
    "launch": Command("tools/launch.py", "start several ranks of a command, and say how the run ended"),
    "slurm": Command("tools/slurm.py", "print the batch script of a launch line, or submit it"),
    "check": Command(
        "pretrain_gpt.py", "say what a train line means, without running it", ("--check-config",)
    ),
    "schedule": Command("tools/show_schedule.py", "plan, time, draw and compare pipeline schedules"),
    "data preprocess": Command("tools/preprocess_data.py", "make a tokenized corpus from text"),
    "data inspect": Command(
        "tools/inspect_data.py", "show the samples that a run trains on, or check a corpus"
    ),
    "checkpoint": Command(
        "tools/checkpoint.py", "import, export, compare and inspect checkpoints, ours and others'"
    ),
    "report": Command("tools/report.py", "write one HTML page about a run"),
    "generate": Command("tools/generate.py", "write text with a trained checkpoint"),
    "evaluate": Command("tools/evaluate.py", "say how well a model predicts text, or does in tasks"),
}

_HELP = ("-h", "--help", "help")
_RANKS = (
    "",
    "Several ranks of this machine, and of others with torchrun's flags for them:",
    f"  {NAME} launch --nproc-per-node 2 -- train --use-custom-fsdp ...",
    "or, by torchrun itself:",
    f"  torchrun --standalone --nproc-per-node 2 --no-python {NAME} train --use-custom-fsdp ...",
    f"  torchrun --standalone --nproc-per-node 2 -m megatron train ...    where {NAME} is not on the PATH",
)


def main() -> None:
    """Run the command that the process's words name. Its exit status is the process's; 2 where none is named."""
    words = sys.argv[1:]
    if gone := lost_folder():
        print(f"{NAME}: {gone}", file=sys.stderr)
        raise SystemExit(2)
    if name := next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None):
        raise SystemExit(_run(name, words[len(name.split()) :]))
    if words == ["--version"]:
        core = importlib.import_module("megatron.core")
        print(f"{NAME} {sys.modules['megatron'].__version__}, megatron.core {core.__version__}")
        return
    named = [word for word in words if word not in _HELP]
    names = [name for name in COMMANDS if name.split()[: len(named)] == named]
    asks_for_help = bool(names) and named != words
    told = overview(names, named) if names else _unknown(" ".join(named))
    print(told, end="", file=sys.stdout if asks_for_help else sys.stderr)
    raise SystemExit(0 if asks_for_help else 2)


def _run(name: str, words: list[str]) -> object:
    """What the script's `main` returns: an exit status."""
    command = COMMANDS[name]
    typed = NAME if os.path.basename(sys.argv[0]) == NAME else f"{sys.orig_argv[0]} -m megatron"
    sys.argv = [f"{typed} {name}", *command.flags, *words]
    return importlib.import_module(command.script.removesuffix(".py").replace("/", ".")).main()


def overview(names: Iterable[str] = COMMANDS, named: Sequence[str] = ()) -> str:
    """The page of --help. named: the words with which all these commands begin."""
    usage = " ".join([NAME, *named, "COMMAND ..."])
    page = [f"usage: {usage}", "", *(f"  {NAME} {name:<16} {COMMANDS[name].about}" for name in names), ""]
    page += [f"`{NAME} COMMAND --help` lists a command's flags."]
    return "\n".join(page if named else [*page, *_RANKS]) + "\n"


def _unknown(asked: str) -> str:
    """What to say of words that name no command: the nearest one, by its name, a part of it or that of its script."""
    meant = {
        part: name for name in COMMANDS for part in (name, name.split()[-1], Path(COMMANDS[name].script).stem)
    }
    meant["pretrain_gpt"] = "train"
    first = next(iter(asked.split()), asked)
    near = difflib.get_close_matches(asked, meant, n=1) or difflib.get_close_matches(first, meant, n=1)
    guess = f": did you mean  {NAME} {meant[near[0]]}  ?" if near else ""
    return f"{NAME}: no command {asked!r:.60}{guess}\n`{NAME} --help` lists the commands\n"


def as_called(text: str) -> str:
    """A text with the scripts that it names as this process was called: `python tools/report.py` in a checkout."""
    if typed := called_as(sys.argv[0]):
        for name, command in COMMANDS.items():
            script = re.escape(command.script)
            text = re.sub(
                rf"python {script}|(?<![\w/])tools/{script.rpartition('/')[2]}", f"{typed} {name}", text
            )
    return text
