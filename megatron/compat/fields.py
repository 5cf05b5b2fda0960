"""Megatron's configuration classes are made of our groups' fields, and held to what the flags of these are held to:
kinds, choices, bounds, and the rules among them.

A field that is a flag of Megatron's has the verdict of the flag table: without effect (a warning), or refused with what
to use. `fields.csv`: fields that are not named as their flags, of what is done otherwise, or of pretrain() only.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import math
import re
import warnings
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from megatron.compat.names import rows_of
from megatron.training import global_vars
from megatron.training.config.command_line import UsedFlag
from megatron.training.config.config import FIELDS, Config, closest_name
from megatron.training.config.flag_table import FlagState, flag_table, spellings
from megatron.training.config.problems import Problem
from megatron.training.config.resolve import Machine, resolve
from megatron.training.config.rule_table import RuleContext, spelled
from megatron.training.config.rules import asked_and_idle, broken_rules, without_effect
from megatron.training.config.values import convert_loaded, shown

_ROWS = rows_of("fields.csv")
FLAG_OF = {row["name"]: row["flag"] for row in _ROWS if row["flag"]}
_OF_PRETRAIN = {row["name"]: row["allowed"] for row in _ROWS if row["verdict"] == "pretrain"}
_AXES = ("tensor_model", "pipeline_model", "context", "expert_model")
_NO_EFFECT = [row["name"] for row in _ROWS if row["verdict"] == "no effect"]
# Settings of experts, which such a loop does not have.
_EXPERTS = {name for name in FIELDS if name == "num_experts" or name.startswith("moe_")}
# Those that do otherwise than the flag of that name, if there is one.
_OTHERWISE = {row["name"] for row in _ROWS if row["verdict"] != "pretrain"}


def in_fields(text: str, called: Mapping[str, str]) -> str:
    """A message about flags as one about fields. called: names other than the flags'."""

    def named(flag: re.Match[str]) -> str:
        entry = spellings().get(flag[0])
        return flag[0] if entry is None else called.get(entry.name, entry.name)

    return re.sub(r"--[a-z0-9][\w-]*", named, text)


def check_fields(
    caller: str,
    values: Mapping[str, Any],
    about: Collection[str] = (),
    called: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Values of settings as their flags would have given them.

    about: all settings that the caller has, for rules among them. called: the caller's own names, where they are not
    the settings'. Raises ValueError that names the caller and its arguments, of everything that is wrong.
    """
    wrong, found = [], {}
    for name, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        if isinstance(value, np.generic | Tensor):
            plain = value.item()  # sync: a number of a configuration
        try:
            found[name] = convert_loaded(flag_table()[name], plain)
        except ValueError as error:
            told = f"{caller}({called.get(name, name)}={shown(value)})"
            wrong.append(f"{told}: {in_fields(str(error), called)}")
    if not wrong:
        given = {spelled(name) for name in found if name not in _OF_PRETRAIN}  # which are refused anyhow
        flags = {spelled(name) for name in (*values, *about)}
        ranks = math.prod(found.get(f"{axis}_parallel_size", 1) for axis in _AXES)  # as few as there may be
        config = resolve(found, dict.fromkeys(found, "argument"), Machine(world_size=ranks))
        context = RuleContext(config, check_only=True, needs_data=False, needs_tokenizer=False)
        problems = [one for one in broken_rules(context, flags) if not given.isdisjoint(one.flags)]
        wrong = [f"{caller}: {in_fields(f'{one.message}; {one.fix}', called)}" for one in problems]
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return found


def config_of(args: Any) -> Config:
    """The parsed configuration, with what the caller has written into `args`. Raises ValueError as its flags."""
    config = global_vars.get_config()
    flat, now = config.flat(), vars(args)
    names = [name for name in FIELDS if name in now and name != "world_size"]
    changed = {name: now[name] for name in names if not _is_same(now[name], flat[name])}
    return config.replace(origin="argument", **check_fields("args", changed)) if changed else config


def _is_same(value: Any, other: Any) -> bool:
    """Whether a value is another, kind included: True is no 1.0."""
    return type(value) is type(other) and bool(value == other)


def settings_of_pretrain(given: Mapping[str, Any]) -> list[Problem]:
    """given: by the names of flags. What is not of a loop of one's own."""
    asked = {
        name: value
        for name, value in given.items()
        if name in _OF_PRETRAIN and value != FIELDS[name][1].default
    }
    flags = tuple(
        "--" + name.replace("_", "-") for name, value in asked.items() if value != _OF_PRETRAIN[name]
    )
    told = f"{', '.join(flags)}: a loop of one's own runs 1F1B and shards the optimizer"
    return [Problem("own-loop", flags, told, "use pretrain(), or custom_fsdp.fully_shard")] if flags else []


class ConfigFields:
    """What the classes have in common, which are dataclasses to subclass and write to, as Megatron's."""

    def __new__(cls, *_: Any, **named: Any) -> Any:
        """Raises TypeError for fields that no release knows, with the nearest that is known."""
        known = inspect.signature(cls.__init__).parameters
        if unknown := [name for name in named if name not in known and "kwargs" not in known]:
            near = {name: closest_name(name, known) for name in unknown}
            told = (f"{name} (did you mean {close}?)" if close else name for name, close in near.items())
            raise TypeError(f"{cls.__name__}: unknown fields: {', '.join(told)}")
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Under a name of Megatron's that the flag does not have, under the flag's too."""
        super().__setattr__(name, value)
        if name in FLAG_OF and value is not None:
            super().__setattr__(FLAG_OF[name], value)

    @property
    def called(self) -> dict[str, str]:
        """By the flag's name: how the caller has named it."""
        return {flag: name for name, flag in FLAG_OF.items() if getattr(self, name, None) is not None}

    def __post_init__(self) -> None:
        """Raises ValueError for values that the flags do not take, and for what is not built; warns of flags without
        effect, and of settings of features that are not asked for."""
        vars(self).update(self.values())
        used, theirs = self._used(), {flag: name for name, flag in FLAG_OF.items()}

        def shown_as(name: str) -> str:
            return f"{type(self).__name__}({name}={getattr(self, name)!r})"

        for name, why in without_effect(used, self.values()).items():
            warnings.warn(f"{shown_as(name)} has no effect: {in_fields(why, theirs)}", stacklevel=3)
        if refused := asked_and_idle(used, self.values())[0]:
            told = (f"{shown_as(u.spelling)} is not supported: {u.entry.fix}" for u in refused)
            raise ValueError("\n".join(told))

    def _used(self) -> list[UsedFlag]:
        """What was given of flags that are not implemented, as on a command line, by the caller's names."""
        used = []
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            entry, value = flag_table().get(one.name), getattr(self, one.name)
            if entry is not None and one.name in _EXPERTS:
                setting_of = () if one.name == "num_experts" else ("--num-experts",)
                state, why = FlagState.UNSUPPORTED, "roadmap: mixture of experts"
                entry = dataclasses.replace(entry, state=state, why=why, setting_of=setting_of)
            if entry is None or value in (None, False, one.default) or one.name in _OTHERWISE:
                continue
            if entry.field is None or entry.state is FlagState.INERT or one.name in _EXPERTS:
                several = value if isinstance(value, list | tuple) else (value,)
                words = () if value is True else tuple(map(str, several))
                used.append(UsedFlag(entry, self.called.get(one.name, one.name), words))
        return used

    def values(self) -> dict[str, Any]:
        """What differs from defaults, by the names of flags, as these hold it. Raises ValueError."""
        names = [one.name for one in dataclasses.fields(self) if one.name in FIELDS]  # type: ignore[arg-type]
        given = {
            name: one
            for name in names
            if (one := getattr(self, name)) is not None and not _is_same(one, FIELDS[name][1].default)
        }
        if "num_query_groups" in given:
            given["group_query_attention"] = True  # which Megatron's class does not have
        # fp64: no class of Megatron's has it, and the rule of precisions names it.
        return check_fields(type(self).__name__, given, (*names, "fp64"), self.called)

    def group(self, of: type[Any]) -> Any:
        """Our group of flags with these values. Raises ValueError, as fields can be written to."""
        names = {one.name for one in dataclasses.fields(of)}
        return of(**{name: one for name, one in self.values().items() if name in names})


def expect(config: Any, of: type[Any], caller: str) -> None:
    """Raises ValueError for a configuration of another class."""
    if not isinstance(config, of):
        raise ValueError(f"{caller}({type(config).__name__}): expects {of.__name__}")


def config_class(name: str, *groups: type[Any], base: type[Any] = ConfigFields, **more: Any) -> Any:
    """A dataclass of the fields of these groups, of every flag that is no field of ours, and more with their defaults,
    beside those of the base."""
    flags = [one.name for one in flag_table().values() if one.field is None and one.name not in FLAG_OF]
    values: dict[str, Any] = dict.fromkeys([*flags, *(name.removeprefix("no_") for name in flags)])
    values |= {one.name: one.default for group in groups for one in dataclasses.fields(group)}
    values |= dict.fromkeys(_NO_EFFECT) | more
    theirs = [name for name, flag in FLAG_OF.items() if flag in values]
    # These last: the defaults of those that they stand for would overwrite them.
    values = {name: one for name, one in values.items() if name not in theirs} | dict.fromkeys(theirs)
    inherited = inspect.signature(base.__init__).parameters.keys() - more.keys()
    fields = [
        (name, Any, value)
        for name, value in values.items()
        if not keyword.iskeyword(name) and name not in inherited
    ]
    return dataclasses.make_dataclass(name, fields, bases=(base,), namespace={"__module__": __name__})
