"""Prompts from the command line, from files and from standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core import safe_files
from tools.json_lines import json_object, text_in

MAX_FILE_BYTES = 1 << 30
STDIN = "-"


class Prompt(NamedTuple):
    """where: for messages, such as `prompts.jsonl:3`. id: the user's own, of a JSON line; None without."""

    text: str
    where: str = "--prompt"
    id: Any = None


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> tuple[list[Prompt], list[str]]:
    """Those of --prompt, then those of each file, `-` being standard input; and what is wrong with any of them."""
    several = len(texts) > 1
    prompts = [
        Prompt(text, f"--prompt number {number}" if several else "--prompt")
        for number, text in enumerate(texts, 1)
    ]
    problems: list[str] = []
    for file in files:
        try:
            for where, line in _lines(file):
                if not file.endswith(".jsonl"):
                    prompts.append(Prompt(line, where))
                elif line.strip():
                    try:
                        prompts.append(_of_json(line, where))
                    except ValueError as error:
                        problems.append(f"{where}: {error}")
        except OSError as error:
            problems.append(f"--prompts {file}: {error.strerror}")
        except ValueError as error:
            problems.append(f"--prompts {error}")
    if not prompts and not problems:
        problems.append(
            "no prompt is given: give --prompt TEXT, --prompts FILE, or --prompts - and lines on standard input"
        )
    return prompts, problems


def _lines(file: str) -> Iterator[tuple[str, str]]:
    """(where it is, the line). Raises OSError, and ValueError for what is no text."""
    if file == STDIN:
        try:
            content = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    else:
        content = safe_files.read_text(file, max_bytes=MAX_FILE_BYTES, follow=True)
    for number, line in enumerate(content.removesuffix("\n").split("\n"), 1):
        yield f"{file}:{number}", line.removesuffix("\r")


def _of_json(line: str, where: str) -> Prompt:
    """Raises ValueError."""
    row = json_object(line)
    return Prompt(text_in(row, "prompt", "text"), where, row.get("id"))
