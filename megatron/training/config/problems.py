"""What is wrong with a configuration, told so that the reader can mend it (floor 0)."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from typing import Any

from megatron.core.words import counted

NOT_SUPPORTED = " is not supported"  # how a message of such a flag ends
MAX_SHOWN = 100  # more of them are a wrong file, not slips

WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One broken rule: its id, the flags concerned, what is wrong, what to do. meant: flags probably meant."""

    rule: str
    flags: tuple[str, ...]
    message: str
    fix: str
    meant: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}\n    fix: {self.fix}"


class ConfigurationError(ValueError):
    """A configuration that cannot run, with every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(render_problems(self.problems))


def render_causes(problems: Iterable[Problem], width: int) -> str:
    """The same for a person, by what is to be done: one entry for all that a rule says with the same fix, the largest
    first."""
    told: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        told.setdefault((problem.rule, problem.fix), []).append(problem.message)
    causes = sorted(told.items(), key=lambda cause: -len(cause[1]))
    number = sum(map(len, told.values()))
    of = f" of {counted(len(causes), 'cause')}" if 1 < len(causes) < number else ""
    lines = [f"configuration: {counted(number, 'problem')}{of}"]
    for n, ((rule, fix), messages) in enumerate(causes, 1):
        what = "; ".join(messages)
        if len(messages) > 1 and rule == "not-supported":
            flags = ", ".join(message.removesuffix(NOT_SUPPORTED) for message in messages)
            what = f"{len(messages)} flags are not supported: {flags}"
        for text in (f"{n:3d}. [{rule}] {what}", f"     fix: {fix}"):
            lines += textwrap.wrap(text, width, subsequent_indent=" " * 9, **WHOLE_WORDS)
    return "\n".join(lines)


def render_problems(problems: Iterable[Problem]) -> str:
    """Every problem, numbered, under one heading; of very many the first, and how many more there are."""
    told = tuple(problems)
    heading = f"configuration: {counted(len(told), 'problem')}"
    lines = [f"{n:3d}. {problem}" for n, problem in enumerate(told[:MAX_SHOWN], 1)]
    more = [f"     ... and {len(told) - MAX_SHOWN} more"] if len(told) > MAX_SHOWN else []
    return "\n".join([heading, *lines, *more])
