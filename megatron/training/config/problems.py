"""What is wrong with a configuration, told so that the reader can mend it (floor 0)."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.words import counted, printable

# How messages end that are told together, by what they say of several flags.
NOT_SUPPORTED, REQUIRED = " is not supported", " is required"
MAX_SHOWN = 100  # causes, or messages of one; more of them are a wrong file, not slips
# By rule: problems of a flag itself, from which others follow. Of the first ones no value was taken.
_OF_VALUES = ("value", "range-", "limit-")
_OF_FLAGS = (*_OF_VALUES, "unknown-flag", "not-supported", "yaml")

WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One broken rule: its id, the flags concerned, what is wrong, what to do. meant: flags probably meant."""

    rule: str
    flags: tuple[str, ...]
    message: str
    fix: str
    meant: tuple[str, ...] = ()


class ConfigurationError(ValueError):
    """A configuration that cannot run, with every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(render_problems(self.problems))


@dataclasses.dataclass
class Cause:
    """What one fix mends. follows: what is said of other flags, and may go with it."""

    fix: str
    problems: list[Problem] = dataclasses.field(default_factory=list)
    follows: list[Problem] = dataclasses.field(default_factory=list)


def cause_of(problem: Problem, told: Iterable[Problem]) -> Problem | None:
    """Which of those told this one may follow from: one of a flag of its own that is misspelled, refused or without
    its value. None where it stands for itself."""
    if problem.rule.startswith(_OF_FLAGS):
        return None
    of_flags = (other for other in told if other.rule.startswith(_OF_FLAGS))
    return next((o for o in of_flags if not {*o.flags, *o.meant}.isdisjoint(problem.flags)), None)


def worth_telling(problem: Problem, told: Sequence[Problem]) -> bool:
    """False for a rule that has judged the default of a flag whose value is refused, and where a required flag is
    there, misspelled."""
    cause = cause_of(problem, told)
    return cause is None or not (problem.rule.startswith("required-") or cause.rule.startswith(_OF_VALUES))


def causes_of(problems: Sequence[Problem]) -> list[Cause]:
    """By what is to be done: one for all that a rule says with the same fix, or several do with one that names flags;
    the largest first."""
    causes: dict[tuple[str, str], Cause] = {}
    by_problem: dict[int, Cause] = {}
    followers = [(problem, cause_of(problem, problems)) for problem in problems]
    for problem, first in followers:
        if first is None:
            key = ("" if "--" in problem.fix else problem.rule, problem.fix)
            by_problem[id(problem)] = cause = causes.setdefault(key, Cause(problem.fix))
            cause.problems.append(problem)
    for problem, first in followers:
        if first is not None:
            by_problem[id(first)].follows.append(problem)
    return sorted(causes.values(), key=lambda cause: -len(cause.problems) - len(cause.follows))


def render_problems(problems: Iterable[Problem], width: int | None = None) -> str:
    """All of them under one heading, by cause, numbered, each with its fix and with what follows from it. width: of the
    terminal; None: a line for each, however long."""
    told = tuple(problems)
    causes = causes_of(told)
    of = f" of {counted(len(causes), 'cause')}" if len(causes) < len(told) else ""
    lines = [f"configuration: {counted(len(told), 'problem')}{of}"]
    for n, cause in enumerate(causes[:MAX_SHOWN], 1):
        rules = dict.fromkeys(
            "required" if p.rule.startswith("required-") else p.rule for p in cause.problems
        )
        texts = [f"{n:3d}. [{', '.join(rules)}] {_together(cause.problems)}", f"     fix: {cause.fix}"]
        texts += [f"     follows from it: {_together(cause.follows)}"] if cause.follows else []
        for text in map(printable, texts):
            lines += [text] if width is None else _wrapped(text, width)
    more = [f"     ... and {len(causes) - MAX_SHOWN} more"] if len(causes) > MAX_SHOWN else []
    return "\n".join([*lines, *more])


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * 9, **WHOLE_WORDS)


def _together(problems: Sequence[Problem]) -> str:
    """Their messages as one; of very many the first, and how many more there are."""
    told = [problem.message for problem in problems]
    shown, more = told[:MAX_SHOWN], f"; ... and {len(told) - MAX_SHOWN} more" if len(told) > MAX_SHOWN else ""
    for end in (NOT_SUPPORTED, REQUIRED):
        if len(told) > 1 and all(message.endswith(end) for message in told):
            flags = ", ".join(message.removesuffix(end) for message in shown)
            return f"{len(told)} flags {end.replace(' is', 'are', 1)}: {flags}{more}"
    return "; ".join(shown) + more
