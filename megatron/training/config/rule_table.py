"""What a rule may look at (floor 0)."""

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
    """Everything a rule may look at. Settings are attributes, by destination name: `c.seq_length`.

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

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(name)
        return getattr(getattr(self.config, FIELDS[name][0]), name)

    def given(self, name: str) -> bool:
        return self.config.given(name)

    def known(self, *names: str) -> bool:
        """Whether all of these have values."""
        return all(getattr(self, name) is not None for name in names)

    def differing(self, names: Iterable[str]) -> list[str]:
        """Those of the settings that are not at their defaults."""
        return [name for name in names if differs(name, getattr(self, name))]

    def undivided(self, whole: str, part: str) -> str | None:
        """That one size is no multiple of another; sizes that make no sense have rules of their own."""
        size, by = getattr(self, whole), getattr(self, part)
        if not size or not by or by < 1 or size % by == 0:
            return None
        return f"{self.told(whole)} is not divisible by {self.told(part)}"

    def told(self, name: str) -> str:
        """The flag of a setting, and its value."""
        return f"{spelled(name)} {getattr(self, name)}"


# Of a configuration that breaks a rule: what is wrong, or True where the table has the words. Else False or None.
Predicate = Callable[[RuleContext], bool | str | None]


def refusal(make: Callable[[], object], *errors: type[Exception]) -> str | None:
    """What one of these errors says of the attempt; None where there is none."""
    try:
        make()
    except errors as error:
        return str(error)
    return None


def exclusive(flags: Iterable[str]) -> str | None:
    """That several of these were given; of one or none nothing."""
    told = list(flags)
    return f"{' and '.join(told)} exclude each other" if len(told) > 1 else None


def spelled(name: str) -> str:
    """The documented flag of a field."""
    return flag_names(FIELDS[name][1])[0]


def differs(name: str, value: Any) -> bool:
    """Whether a setting is another one than its default; a file that was printed has given every one."""
    return bool(value != FIELDS[name][1].default)
