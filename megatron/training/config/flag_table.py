"""Every flag we know, in one of three states (floor 0).

    implemented                  a field of a configuration group, made by `arg`
    accepted, no effect here     parsed and reported once, with why
    not supported                an error that says what to use, or which roadmap line will bring it

The latter two are rows of megatron_flags.csv, one a flag: its spellings, how many words follow (none, one, several),
the verdict (no effect, refused), why or what to use (`roadmap: NAME` is a heading of docs/roadmap.md), the words with
which a refused flag asks for nothing (`--num-experts 0`), and the features of which it is a setting: where none of them
is asked for, it has no effect (`--moe-router-topk 2` without `--num-experts`). Rows about fields stand there too:
`field` gives the only values that are supported (none: the field has no effect), `choices` the values of Megatron's
that a field lacks. `tools/megatron_flags.py` compares the table with a release of Megatron.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from megatron.core.config_base import ArgInfo, ValueType, arg_info, flag_names, value_type
from megatron.training.config.config import FIELDS
from megatron.training.config.expressions import rows

# difflib's likeness of two flags, the dashes included, from which on a guess helps, and how far behind the nearest.
_CLOSE_ENOUGH, _AS_NEAR = 0.75, 0.1


class FlagState(Enum):
    """What happens to a flag."""

    IMPLEMENTED = "implemented"
    INERT = "accepted, no effect here"
    UNSUPPORTED = "not supported"


class Arity(Enum):
    """How many words follow a flag."""

    SWITCH = "none"
    ONE = "one"
    MANY = "several"


@dataclasses.dataclass(frozen=True)
class FlagEntry:
    """One flag.

    name: destination name. flags: spellings, the documented one first; negations: spellings that set a
    boolean the other way. neutral: words with which a flag that is not supported asks for nothing. field:
    group and field of an implemented or limited flag. allowed: the supported values of a limited field, as text.
    elsewhere: values of Megatron's that the field does not have. setting_of: flags without which it has no effect.
    """

    name: str
    flags: tuple[str, ...]
    state: FlagState
    why: str
    arity: Arity
    neutral: tuple[str, ...] = ()
    negations: tuple[str, ...] = ()
    group: str | None = None
    field: dataclasses.Field[Any] | None = None
    allowed: tuple[str, ...] | None = None
    elsewhere: tuple[str, ...] = ()
    elsewhere_why: str = ""
    setting_of: tuple[str, ...] = ()

    @property
    def spelling(self) -> str:
        return self.flags[0]

    @property
    def setting(self) -> dataclasses.Field[Any]:
        """The field of a flag that has one."""
        assert self.field is not None, f"{self.spelling} is no field"
        return self.field

    @property
    def info(self) -> ArgInfo:
        info = arg_info(self.setting)
        assert info is not None, f"field {self.name} is no flag"
        return info

    @property
    def kind(self) -> ValueType:
        return value_type(self.setting.type)

    @property
    def fix(self) -> str:
        """What to do where it is refused."""
        return _fix(self.why)

    @property
    def fix_of_elsewhere(self) -> str:
        """What to do where a value is asked for that the field does not have."""
        return _fix(self.elsewhere_why)

    def asks_for_nothing(self, words: tuple[str, ...]) -> bool:
        """Whether these words after an unsupported flag switch nothing on."""
        return bool(words) and all(word in self.neutral for word in words)


def _fix(why: str) -> str:
    """What the file says of a refusal, in words for the user."""
    planned = why.removeprefix("roadmap: ")
    return why if planned == why else f"leave out for now; planned, see docs/roadmap.md, {planned!r}"


@functools.cache
def _verdicts(about: str) -> dict[str, dict[str, str]]:
    """Rows of the file by flag. about: `field`, `choices`, or "" for flags that are no fields."""
    kinds = ("field", "choices")
    of = [
        row for row in rows("megatron_flags.csv") if about == (row["value"] if row["value"] in kinds else "")
    ]
    by_flag = {row["flags"]: row for row in of}
    assert len(by_flag) == len(of), "a flag stands twice in megatron_flags.csv"
    return by_flag


def _field_entry(name: str) -> FlagEntry:
    group, field = FIELDS[name]
    kind, flags = value_type(field.type), flag_names(field)
    arity = Arity.MANY if kind.many else Arity.SWITCH if kind.kind is bool else Arity.ONE
    row = _verdicts("field").get(flags[0], {"why": "", "words": ""})
    choices = _verdicts("choices").get(flags[0], {"why": "", "words": ""})
    state = FlagState.IMPLEMENTED
    if row["why"] and not row["words"]:
        state = FlagState.INERT
    elif row["why"] and not kind.choices:
        state = FlagState.UNSUPPORTED  # only what asks for nothing is supported; choices are in part
    if field.default is True:
        # Megatron's generated --no-x switches also answer to --disable-x.
        flags += tuple("--disable-" + f[5:] for f in flags if f.startswith("--no-"))
    return FlagEntry(
        *(name, flags, state, row["why"], arity),
        group=group,
        field=field,
        allowed=tuple(row["words"].split()) or None,
        elsewhere=tuple(choices["words"].split()),
        elsewhere_why=choices["why"],
    )


def _listed() -> Iterator[FlagEntry]:
    states = {"no effect": FlagState.INERT, "refused": FlagState.UNSUPPORTED}
    for row in _verdicts("").values():
        flags, of, neutral = (tuple(row[part].split()) for part in ("flags", "setting_of", "words"))
        name, state = flags[0].removeprefix("--").replace("-", "_"), states[row["verdict"]]
        yield FlagEntry(name, flags, state, row["why"], Arity(row["value"]), neutral, setting_of=of)


@functools.cache
def flag_table() -> dict[str, FlagEntry]:
    """Every known flag by destination name: fields in group order, then the rows of the file."""
    table = {name: _field_entry(name) for name in FIELDS} | {entry.name: entry for entry in _listed()}
    assert len(table) == len(FIELDS) + len(_verdicts("")), "a field is also listed"
    spelled = {flag for entry in table.values() for flag in entry.flags}
    for name, entry in table.items():
        back = _negated(entry.spelling)
        if entry.field is not None and entry.arity is Arity.SWITCH and back not in spelled:
            table[name] = dataclasses.replace(entry, negations=(back,))
    return table


def _negated(flag: str) -> str:
    """The spelling that turns a boolean back, so that a command line can overrule a file."""
    for prefix in ("--no-", "--disable-"):
        if flag.startswith(prefix):
            return "--" + flag.removeprefix(prefix)
    return "--no-" + flag.removeprefix("--")


@functools.cache
def spellings() -> dict[str, FlagEntry]:
    """Every spelling of every flag, negations included."""
    return {flag: entry for entry in flag_table().values() for flag in entry.flags + entry.negations}


def closest_flags(flag: str, extra: tuple[str, ...] = (), count: int = 3) -> tuple[str, ...]:
    """Known spellings nearest to an unknown one, the most likely first; those that are much further away than the
    nearest, and far ones, are not offered. Without any, the flag whose help says its words (`--learning-rate`).

    extra: spellings beside the table. Of equally near ones, those that are implemented come first.
    """
    known = {spelled: entry.state for entry in flag_table().values() for spelled in entry.flags}
    near = difflib.get_close_matches(flag, (*known, *extra), n=4 * count, cutoff=_CLOSE_ENOUGH)
    behind = [(-difflib.SequenceMatcher(None, spelled, flag).ratio(), spelled) for spelled in near]
    implemented = FlagState.IMPLEMENTED
    behind.sort(key=lambda one: (one[0], known.get(one[1], implemented) is not implemented))
    if not behind:
        words, fields = (
            re.split("[-_]", flag.strip("-")),
            (e for e in flag_table().values() if e.field is not None),
        )
        return tuple(entry.spelling for entry in fields if entry.info.help.split()[1:] == words)[:1]
    return tuple(spelled for likeness, spelled in behind[:count] if likeness <= behind[0][0] + _AS_NEAR)
