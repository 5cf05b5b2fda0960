"""What the tables of rules and of derived values may look at (floor 0)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import optional
from megatron.core.config_base import flag_names
from megatron.training.config.command_line import UsedFlag
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.expressions import Names
from megatron.training.config.launch_env import LaunchEnv


class Context:
    """Settings as attributes, by destination name: `c.seq_length`."""

    config: Config

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(name)
        return getattr(getattr(self.config, FIELDS[name][0]), name)

    def named(self, functions: Mapping[str, Callable[..., Any]]) -> Names:
        """What a name in a table stands for. functions: of the context and what they are called with."""
        return lambda name: (
            functools.partial(functions[name], self) if name in functions else getattr(self, name)
        )

    def given(self, name: str) -> bool:
        return self.config.given(name)

    def differs(self, name: str) -> bool:
        """Whether a setting is another one than its default; a file that was printed has given every one."""
        return bool(getattr(self, name) != FIELDS[name][1].default)

    def told(self, name: str) -> str:
        """The flag of a setting, and its value."""
        return f"{spelled(name)} {getattr(self, name)}"


@dataclasses.dataclass(frozen=True)
class RuleContext(Context):
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

    @property
    def launched_ranks(self) -> int:
        return self.env.place[1]

    @property
    def launched_rank(self) -> int:
        return self.env.place[0]

    @property
    def under_torchrun(self) -> bool:
        return self.env.run_id is not None

    def uses(self, name: str) -> bool:
        """Whether a flag that is no setting is on the command line."""
        return any(used.entry.name == name for used in self.used)

    def available(self, package: str) -> bool:
        return optional.available(package)

    def flags(self, *names: str) -> str:
        """The flags of those settings that ask for something."""
        return ", ".join(spelled(name) for name in names if getattr(self, name))

    def exclusive(self, *names: str) -> str | None:
        """That several of these were given; of one or none nothing."""
        told = [spelled(name) for name in names if getattr(self, name)]
        return f"{' and '.join(told)} exclude each other" if len(told) > 1 else None

    def undivided(self, whole: str, part: str) -> str | None:
        """That one size is no multiple of another; sizes that make no sense have rules of their own."""
        size, by = getattr(self, whole), getattr(self, part)
        if not size or not by or by < 1 or size % by == 0:
            return None
        return f"{self.told(whole)} is not divisible by {self.told(part)}"


def refusal(make: Callable[[], object], *errors: type[Exception]) -> str | None:
    """What one of these errors says of the attempt; None where there is none."""
    try:
        make()
    except errors as error:
        return str(error)
    return None


def spelled(name: str) -> str:
    """The documented flag of a field."""
    return flag_names(FIELDS[name][1])[0]
