"""What a rule is and what it may look at (floor 0)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.config_base import flag_names
from megatron.training.config.command_line import UsedFlag
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.launch_env import LaunchEnv


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """Everything a rule may look at.

    check_only: under --check-config, files need not exist and packages need not be installed.
    needs_data: the caller reads the corpus that the flags name (a user's own provider may not). needs_tokenizer: it
    starts a run, which has a vocabulary. memory_bytes: of this machine.
    """

    config: Config
    env: LaunchEnv = dataclasses.field(default_factory=LaunchEnv)
    used: tuple[UsedFlag, ...] = ()
    has_gpu: bool = False
    check_only: bool = False
    needs_data: bool = True
    needs_tokenizer: bool = True
    memory_bytes: float = math.inf

    def value(self, name: str) -> Any:
        """A setting by destination name."""
        return getattr(getattr(self.config, FIELDS[name][0]), name)

    def given(self, name: str) -> bool:
        return self.config.given(name)

    def differing(self, names: Iterable[str]) -> list[str]:
        """Those of the settings that are not at their defaults."""
        return [name for name in names if differs(name, self.value(name))]

    def undivided(self, whole: str, part: str) -> str | None:
        """That one size is no multiple of another; sizes that make no sense have rules of their own."""
        size, by = self.value(whole), self.value(part)
        if not size or not by or by < 1 or size % by == 0:
            return None
        return f"{self.told(whole)} is not divisible by {self.told(part)}"

    def told(self, name: str) -> str:
        """The flag of a setting, and its value."""
        return f"{spelled(name)} {self.value(name)}"


Predicate = Callable[[RuleContext], str | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A predicate that returns what is wrong, the flags concerned, and what to do about it."""

    id: str
    flags: tuple[str, ...]
    fix: str
    broken: Predicate


class RuleTable(list[Rule]):
    """Rules in the order in which they are told."""

    def rule(self, id: str, flags: str, fix: str) -> Callable[[Predicate], Predicate]:
        """Add the decorated predicate. `flags` are separated by spaces."""

        def add(predicate: Predicate) -> Predicate:
            assert all(known.id != id for known in self), f"rule {id} twice"
            self.append(Rule(id, tuple(flags.split()), fix, predicate))
            return predicate

        return add


def spelled(name: str) -> str:
    """The documented flag of a field."""
    return flag_names(FIELDS[name][1])[0]


def differs(name: str, value: Any) -> bool:
    """Whether a setting is another one than its default; a file that was printed has given every one."""
    return bool(value != FIELDS[name][1].default)
