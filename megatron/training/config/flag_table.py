"""Every flag we know, in one of three states (floor 0).

    implemented                  a field of a configuration group, made by `arg`
    accepted, no effect here     parsed and reported once, with why
    not supported                an error that says what to use, or which roadmap line will bring it

A flag that is not supported may still be given with a value that asks for nothing (`--num-experts 0`). Fields can
be limited too: `--tensor-model-parallel-size` exists, and only 1 of it is supported so far. A setting of a feature that
is not supported has no effect where the feature is not asked for (`--moe-router-topk 2` without `--num-experts`).
"""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum
from typing import Any

from megatron.core.config_base import arg_info, flag_names, value_type
from megatron.training.config.config import FIELDS, closest_names
from megatron.training.config.flag_lists import (
    FIELD_LIMITS,
    INERT,
    INERT_FIELDS,
    SETTINGS,
    UNSUPPORTED,
    FlagList,
)


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
    group and field of an implemented or limited flag. allowed: the supported values of a limited field.
    setting_of: flags without which it has no effect.
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
    allowed: tuple[Any, ...] | None = None
    setting_of: tuple[str, ...] = ()

    @property
    def spelling(self) -> str:
        return self.flags[0]

    def asks_for_nothing(self, words: tuple[str, ...]) -> bool:
        """Whether these words after an unsupported flag switch nothing on."""
        return bool(words) and all(word in self.neutral for word in words)


def _field_entry(name: str) -> FlagEntry:
    group, field = FIELDS[name]
    info = arg_info(field)
    assert info is not None, f"field {name} is no flag"
    kind = value_type(field.type)
    arity = Arity.MANY if kind.many else Arity.SWITCH if kind.kind is bool else Arity.ONE
    state, why, allowed = FlagState.IMPLEMENTED, "", None
    if name in FIELD_LIMITS:
        allowed, why = FIELD_LIMITS[name]
        # Where only values that ask for nothing are supported, the flag is not; choices are in part.
        state = FlagState.IMPLEMENTED if kind.choices else FlagState.UNSUPPORTED
    elif name in INERT_FIELDS:
        state, why = FlagState.INERT, INERT_FIELDS[name]
    flags = flag_names(field)
    if field.default is True:
        # Megatron's generated --no-x switches also answer to --disable-x.
        flags += tuple("--disable-" + f[5:] for f in flags if f.startswith("--no-"))
    return FlagEntry(name, flags, state, why, arity, (), (), group, field, allowed)


def _name(flag: str) -> str:
    """The destination name of a flag that is no field."""
    return flag.removeprefix("--").replace("-", "_")


def _listed(lists: tuple[FlagList, ...], state: FlagState) -> dict[str, FlagEntry]:
    entries = {}
    for listed in lists:
        for arity, text in (
            (Arity.SWITCH, listed.switches),
            (Arity.ONE, listed.values),
            (Arity.MANY, listed.many),
        ):
            for word in text.split():
                spelled, _, neutral = word.partition("=")
                flags = tuple(spelled.split("/"))
                name = _name(flags[0])
                words = tuple(neutral.split("|")) if neutral else ()
                assert name not in entries, f"flag {flags[0]} is listed twice"
                entries[name] = FlagEntry(name, flags, state, listed.why, arity, words)
    return entries


@functools.cache
def flag_table() -> dict[str, FlagEntry]:
    """Every known flag by destination name: fields in group order, then the listed ones."""
    table = {name: _field_entry(name) for name in FIELDS}
    listed = _listed(INERT, FlagState.INERT) | _listed(UNSUPPORTED, FlagState.UNSUPPORTED)
    assert not set(listed) & set(table), f"fields that are also listed: {sorted(set(listed) & set(table))}"
    for features, settings in SETTINGS.items():
        of = tuple(features.split())
        assert all(listed[_name(flag)].state is FlagState.UNSUPPORTED for flag in of), of
        for name in map(_name, settings.split()):
            listed[name] = dataclasses.replace(listed[name], setting_of=of)
    table.update(listed)
    spelled = {flag for entry in table.values() for flag in entry.flags}
    for name, entry in table.items():
        if entry.field is not None and entry.arity is Arity.SWITCH:
            negations = tuple(flag for flag in map(_negated, entry.flags[:1]) if flag not in spelled)
            table[name] = dataclasses.replace(entry, negations=negations)
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


@functools.cache
def _documented() -> dict[str, FlagEntry]:
    return {flag: entry for entry in flag_table().values() for flag in entry.flags}


def closest_flags(flag: str, extra: tuple[str, ...] = (), count: int = 3) -> tuple[str, ...]:
    """Known spellings nearest to an unknown one, the most likely first. `extra`: spellings beside the table.

    One slip of the fingers is found through shared deletions; anything further away by likeness. Far guesses are not
    offered.
    """
    known = _documented()
    near = {other for cut in _deletions(flag) for other in _by_deletion().get(cut, ())}
    slips = 1 if len(flag) < 8 else 2
    near |= {other for other in extra if edit_distance(flag, other) <= slips}
    # Compared without the dashes, which all flags share.
    candidates = sorted(near) or [
        f"--{name}" for name in closest_names(flag[2:], [other[2:] for other in (*known, *extra)], count=12)
    ]

    def rank(candidate: str) -> tuple[int, bool, int]:
        entry = known.get(candidate)
        implemented = entry is None or entry.state is FlagState.IMPLEMENTED
        return (edit_distance(flag, candidate), not implemented, candidates.index(candidate))

    return tuple(sorted(candidates, key=rank)[:count])


def _deletions(flag: str) -> set[str]:
    """The flag, and the flag without each of its letters."""
    return {flag} | {flag[:at] + flag[at + 1 :] for at in range(2, len(flag))}


@functools.cache
def _by_deletion() -> dict[str, list[str]]:
    """Documented spellings by what is left when one letter is missing."""
    index: dict[str, list[str]] = {}
    for flag in _documented():
        for cut in _deletions(flag):
            index.setdefault(cut, []).append(flag)
    return index


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`."""
    before: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, previous = previous, row
    return previous[-1]
