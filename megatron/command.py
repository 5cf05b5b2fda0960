"""The door of `megatron-zero COMMAND ...`: where the scripts are, and how this process was called (floor 0).

Scripts are beside the package in a checkout; a wheel has copies of them in megatron/scripts/. tools/commands.py has the
commands.
"""

import importlib
import os
import re
import sys
from pathlib import Path

NAME = "megatron-zero"
_HERE = Path(__file__).resolve().parent
SCRIPTS = _HERE / "scripts" if (_HERE / "scripts").is_dir() else _HERE.parent


def main() -> None:
    """Run the command that the process's words name."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        importlib.import_module("tools.commands").main()
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def lost_folder() -> str:
    """What to say where the working directory was removed, in which torch ends a process without a word; else empty."""
    try:
        os.getcwd()
    except OSError as error:
        return f"the working directory is gone ({error.strerror}): change to a folder that exists, and start again"
    return ""


def called_as(argv0: str) -> str:
    """`megatron-zero` or `python -m megatron`, where a process's first word says so; empty for a script."""
    found = re.match(rf"({NAME}|.* -m megatron) ", argv0)
    return found[1] if found else ""


def as_called(text: str) -> str:
    """A text with its commands as this process was called: `python tools/report.py`, or `megatron-zero report`."""
    return importlib.import_module("tools.commands").as_called(text) if called_as(sys.argv[0]) else text


def program(script: str) -> str:
    """For usages and errors: `megatron-zero report`, or the script's name `report.py`."""
    return os.path.basename(sys.argv[0] if called_as(sys.argv[0]) else script)
