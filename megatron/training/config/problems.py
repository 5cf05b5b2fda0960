"""What is wrong with a configuration, told so that the reader can mend it (floor 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

MAX_SHOWN = 100  # more of them are a wrong file, not slips


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


def render_problems(problems: Iterable[Problem]) -> str:
    """Every problem, numbered, under one heading; of very many the first, and how many more there are."""
    told = tuple(problems)
    heading = "configuration: 1 problem" if len(told) == 1 else f"configuration: {len(told)} problems"
    lines = [f"{n:3d}. {problem}" for n, problem in enumerate(told[:MAX_SHOWN], 1)]
    more = [f"     ... and {len(told) - MAX_SHOWN} more"] if len(told) > MAX_SHOWN else []
    return "\n".join([heading, *lines, *more])
